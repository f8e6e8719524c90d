"""The state that a run starts from: its newest restorable checkpoint, another run's, or none."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.input_digests import input_rules
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, weights_commit
from yatt.checkpoint.commit.run_store import Stores, check_presence, open_run_store, store_url
from yatt.checkpoint.local.local_commits import LocalCommits
from yatt.control.leader.node_clients import NodeClients
from yatt.control.node import Node
from yatt.control.writers import store_sayer
from yatt.core.attempts import inputs
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.errors import CheckpointError, CheckpointsMissing, ConfigError, NoCheckpointLeft
from yatt.obs.metrics import STEP, row_of_strict
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c
from yatt.records.events.saves import CheckpointSkipped, CommitRefused, OriginTaken


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run's state: `adopted` is its own checkpoint, `row` the unfinished row of its metrics."""

    adopted: Manifest | None
    iteration: int
    row: dict[str, Any]
    unwritten: tuple[dict[str, Any], ...] = ()
    """Earlier rows that may be missing in the file."""

    local_bytes: int = 0
    """Bytes that ranks read from the local tiers of their nodes."""

    is_local: bool = False
    """Whether it is a local commit, which is not in the store."""

    changed: tuple[str, ...] = ()
    """Inputs that are others than when it was written (`yatt.core.attempts.inputs`)."""


class Restoring:
    """Restores the trainers of all trainer nodes.

    Args:
        checkpoints: the run's own checkpoints.
    """

    def __init__(self, node: Node, clients: NodeClients, checkpoints: Checkpoints, events: EventLog) -> None:
        self._node, self._clients, self._checkpoints, self._events = node, clients, checkpoints, events
        self._local_bytes = 0

    async def run(self) -> Resumed:
        """Restores the state, after everything is built.

        Raises:
            NoCheckpointLeft: no existing checkpoint can be restored.
            CheckpointsMissing: there is none, and the run's ledger has commits.
            ConfigError: the run cannot continue from the other run's checkpoint, or not with its inputs.
        """
        found = await call_in_thread(self._checkpoints.candidates)
        for name in found.stale:
            self._events.emit(CommitRefused(name=name))
        if not found.names:
            await call_in_thread(self._check_presence)
        manifest, faults = await self._kept()
        if manifest is not None:
            return self._resumed(manifest, is_local=True)
        if found.names:
            manifest = await self._first_whole(found.names, self._checkpoints, is_origin=False)
            return self._resumed(manifest, is_local=False)
        if faults:  # the trainers' state may be a part of it
            raise NoCheckpointLeft(
                "the only saved state of this run is on the disks of its last nodes, and cannot be restored: "
                f"{'; '.join(faults)}. Start on those nodes again; to train from the beginning, remove "
                f"{self._node.paths.local_commits}."
            )
        if self._node.config.run.from_checkpoint.url:
            return Resumed(None, await self._start_from_origin(), {STEP: 0})
        return Resumed(None, 0, {STEP: 0})

    def _resumed(self, manifest: Manifest, *, is_local: bool) -> Resumed:
        unwritten, row = tuple(map(row_of_strict, manifest.unwritten)), row_of_strict(manifest.row)
        before = {} if manifest.inputs is msgspec.UNSET else manifest.inputs
        changed = inputs.changed_digests(before, self._node.inputs, input_rules(self._node.config))
        if changed.refused:  # the launcher finds this earlier, if the run folder has its records
            raise ConfigError(inputs.refusal_of_inputs(changed.refused, str(self._node.paths.root)))
        return Resumed(
            manifest, manifest.iteration, row, unwritten, self._local_bytes, is_local, changed.told
        )

    async def _kept(self) -> tuple[Manifest | None, list[str]]:
        """Restores the newest local commit that is newer than the store and whole on these nodes. Returns its
        manifest, if there is one, and the reasons why others were passed over."""
        config, faults = self._node.config, list[str]()
        local = LocalCommits(self._node.paths, config.run.id)
        for commit in await call_in_thread(partial(local.newer, self._checkpoints)):
            hosts: tuple[str, ...] = ()
            try:
                if not config.checkpoint.local_dir:
                    raise CheckpointError("checkpoint.local_dir is empty")
                manifest, hosts = await call_in_thread(partial(with_retries, partial(local.read, commit)))
                fault = await self._fault(manifest_name(commit), manifest, is_local=True)
            except CheckpointError as error:
                fault = str(error)
            if not fault:
                return manifest, faults
            where = f" (saved on {', '.join(hosts)})" if hosts else ""
            faults.append(f"local commit of iteration {commit.iteration}{where}: {fault}")
            self._events.emit(CheckpointSkipped(reason=faults[-1]))
        return None, faults

    def _check_presence(self) -> None:
        config, paths = self._node.config, self._node.paths
        url, limit_s = store_url(config, paths.root), config.launch.phase_timeout_s

        def check() -> None:
            check_presence(open_run_store(config, paths.root), url, paths)

        with_retries(check, limit_s=limit_s)

    async def _start_from_origin(self) -> int:
        """Restores another run's checkpoint, the same in every attempt; returns the iteration."""
        origin = self._node.config.run.from_checkpoint
        node = self._node
        stores = Stores(node.config, node.paths.root, store_sayer(self._events, node.name))
        store = await call_in_thread(partial(stores.of, is_origin=True))
        checkpoints = Checkpoints(store, 0)
        pinned = await call_in_thread(self._checkpoints.origin)
        names = (pinned,) if pinned else (await call_in_thread(checkpoints.candidates)).names
        if origin.iteration and not pinned:
            names = (await call_in_thread(checkpoints.candidates)).of_iteration(origin.iteration)
        if not names:
            raise CheckpointsMissing(
                f"run.from_checkpoint: {origin.url} had a checkpoint when the run was started and has none "
                "now. Is it mounted here?"
            )
        manifest = await self._first_whole(names, checkpoints, is_origin=True)
        name = checkpoints.name(manifest)
        await call_in_thread(partial(self._checkpoints.note_origin, name))
        self._events.emit(OriginTaken(name=name, run_id=manifest.run_id, take=origin.take))
        if origin.take == "weights":
            return 0
        if manifest.iteration >= self._node.config.trainer.total_iterations:
            raise ConfigError(
                f"run.from_checkpoint: the checkpoint is of iteration {manifest.iteration}, and its count "
                "goes on. Write a larger trainer.total_iterations, or take: weights."
            )
        return manifest.iteration

    async def _first_whole(
        self, names: tuple[str, ...], checkpoints: Checkpoints, *, is_origin: bool
    ) -> Manifest:
        faults = []
        for name in names:
            manifest, fault = await self._restored(name, checkpoints, is_origin=is_origin)
            if manifest is not None:
                return manifest
            faults.append(fault)
            self._events.emit(CheckpointSkipped(reason=fault))
        whose = "of run.from_checkpoint" if is_origin else "of this run"
        raise NoCheckpointLeft(
            f"no checkpoint {whose} can be restored, and starting over would lose it: {'; '.join(faults)}. "
            "Put the damaged files back, or start a new run with another run.dir."
        )

    async def _restored(
        self, name: str, checkpoints: Checkpoints, *, is_origin: bool
    ) -> tuple[Manifest | None, str]:
        """Returns the manifest, if all trainer nodes restored it; else None and the reason."""
        try:
            manifest = await call_in_thread(partial(checkpoints.whole, name))
        except CheckpointError as error:
            return None, str(error)
        fault = await self._fault(name, manifest, is_origin=is_origin)
        return (None, f"{name}: {fault}") if fault else (manifest, "")

    async def _fault(
        self, name: str, manifest: Manifest, *, is_origin: bool = False, is_local: bool = False
    ) -> str:
        """Makes all trainer nodes restore a checkpoint; returns the first fault, or an empty text."""
        weights_only = is_origin and self._node.config.run.from_checkpoint.take == "weights"
        order = c.RestoreTrainer(
            checkpoint=name,
            states=() if weights_only else manifest.nodes,
            is_origin=is_origin,
            weights_only=weights_only,
            is_local=is_local,
            weights=manifest_name(weights_commit(manifest)),
        )
        answers = await self._clients.ask_trainer_nodes(order)
        self._local_bytes = sum(answer.local_bytes for answer in answers)
        return next((answer.fault for answer in answers if answer.fault), "")
