"""The leader's part of GenRMs that take the weights of another run (`genrms[].refresh`).

Weights are written as a Hugging Face folder in the run folder, in a thread, while the iteration before is
sampled and trained on. A choice is recorded when its iteration begins, before any question is asked with it.
A checkpoint that cannot be used costs nothing but its news: the GenRM keeps the weights that it has.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from yatt.adapters.files.files import make_within
from yatt.adapters.files.patience import with_retries
from yatt.adapters.net.deadline import while_moving
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.adapters.run_folder.judge_weights import (
    folder_of_choice,
    read_choice,
    record_choice,
    recorded_choices,
)
from yatt.checkpoint.commit.manifest import Candidates, Checkpoints
from yatt.checkpoint.commit.manifest_format import commit_of
from yatt.checkpoint.convert.export import export_as_hf
from yatt.checkpoint.convert.hf_folder import remove_partial_folders
from yatt.checkpoint.store.store import open_store
from yatt.config.schema import GenRMSection
from yatt.control.leader.node_clients import NodeClients
from yatt.control.node import Node
from yatt.core.attempts.checkpoint_names import named_commit
from yatt.core.phases.judge_weights import (
    choice_in_force,
    is_choice_due,
    is_weights_folder,
    needed_folders,
    record_name,
    weights_folder,
)
from yatt.errors import WorkerFailed, YattError, words_of
from yatt.models.folder import ModelFolder
from yatt.models.model import read_model
from yatt.obs.story.events import EventLog
from yatt.records.events.groups import JudgeNotRefreshed, JudgeRefreshed
from yatt.records.weights import ChosenWeights, UseJudges

PRUNE_S = 30.0
"""Longest wait for the run's own store before weights that nobody needs are removed."""

TRIES = 3
"""How often weights are read: the other run may remove a checkpoint meanwhile."""

_LOG = logging.getLogger(__name__)


class JudgeRefresh:
    """Which weights the refreshed GenRMs have.

    Args:
        checkpoints: this run's.
    """

    def __init__(self, node: Node, clients: NodeClients, checkpoints: Checkpoints, events: EventLog) -> None:
        self._node, self._clients, self._checkpoints, self._events = node, clients, checkpoints, events
        self._genrms = [genrm for genrm in node.config.genrms if genrm.refresh.url]
        self._now: dict[str, ChosenWeights] = {}
        self._reading: dict[str, asyncio.Future[ChosenWeights]] = {}

    def metrics(self) -> dict[str, float]:
        """The iteration of the other run whose weights each of them has, for the row; 0: those of its
        model."""
        return {f"genrm/{name}/refreshed_to": float(chosen.source) for name, chosen in self._now.items()}

    async def choose_first(self) -> None:
        """Chooses weights before any engine is built, in a run that has not chosen yet.

        Raises:
            OSError: the run folder cannot be read or written.
        """
        for genrm in self._genrms:
            if not await _patiently(partial(recorded_choices, self._place(genrm))):
                await self._in_force(genrm, 1)

    async def begin(self, iteration: int) -> None:
        """Has all engines use the weights that are in force in an iteration, which is sampled next.

        Raises:
            WorkerFailed: a record in the run folder is damaged.
            OSError: the run folder cannot be read or written.
        """
        if not self._genrms:
            return
        for genrm in self._genrms:
            self._now[genrm.name] = await self._in_force(genrm, iteration)
        paths, now = self._node.paths, self._now
        folders = {g.name: folder_of_choice(paths, g.name, now[g.name], g.model) for g in self._genrms}
        self._clients.judges = folders
        await self._clients.ask_all(UseJudges(folders=folders))
        is_last = iteration >= self._node.config.trainer.total_iterations
        for genrm in () if is_last else self._genrms:
            recorded = await _patiently(partial(recorded_choices, self._place(genrm)))
            if is_choice_due(iteration + 1, genrm.refresh.every, recorded):
                self._read_ahead(genrm, iteration + 1)

    async def _in_force(self, genrm: GenRMSection, iteration: int) -> ChosenWeights:
        """Returns the choice that holds in an iteration, after it was made if it is due."""
        place, paths = self._place(genrm), self._node.paths
        recorded = await _patiently(partial(recorded_choices, place))
        if not is_choice_due(iteration, genrm.refresh.every, recorded):
            chosen: ChosenWeights = await _patiently(
                partial(read_choice, place, choice_in_force(iteration, recorded))
            )
            await self._check_there(genrm, chosen)
            return chosen
        self._read_ahead(genrm, iteration)
        found = await self._reading.pop(genrm.name)
        await _patiently(partial(check_newest, paths, self._node.attempt))
        chosen = await _patiently(partial(record_choice, paths, genrm.name, replace(found, begins=iteration)))
        await self._prune(place)
        before = self._now.get(genrm.name)
        if chosen.folder and (before is None or before.folder != chosen.folder):
            self._events.emit(JudgeRefreshed(genrm=genrm.name, iteration=iteration, source=chosen.source))
        return chosen

    def _read_ahead(self, genrm: GenRMSection, iteration: int) -> None:
        if genrm.name not in self._reading:
            self._reading[genrm.name] = asyncio.ensure_future(self._read(genrm, iteration))

    async def _read(self, genrm: GenRMSection, iteration: int) -> ChosenWeights:
        """Writes the newest weights as a folder; returns the choice of an iteration, not recorded yet. If
        that is not possible, it is the choice before."""
        limit_s, why = self._node.config.launch.phase_timeout_s, ""
        for _ in range(TRIES):
            reading = _Reading(asyncio.get_running_loop())
            try:
                work = call_in_thread(partial(self._newest, genrm, iteration, reading))
                return await while_moving(work, limit_s, reading.num_moved)
            except TimeoutError:
                reading.is_over, why = True, f"{genrm.refresh.url} did not answer within {limit_s:g} s"
                break
            except (YattError, OSError) as error:
                why = words_of(error)
        _LOG.warning("GenRM '%s' keeps its weights: %s", genrm.name, why)
        self._events.emit(JudgeNotRefreshed(genrm=genrm.name, iteration=iteration, why=why))
        return await self._as_before(genrm, iteration)

    async def _as_before(self, genrm: GenRMSection, iteration: int) -> ChosenWeights:
        place = self._place(genrm)
        recorded = [b for b in await _patiently(partial(recorded_choices, place)) if b < iteration]
        before = ChosenWeights(begins=1, attempt=self._node.attempt)
        if recorded:
            before = await _patiently(partial(read_choice, place, recorded[-1]))
        return ChosenWeights(
            begins=iteration, folder=before.folder, source=before.source, attempt=self._node.attempt
        )

    def _newest(self, genrm: GenRMSection, iteration: int, reading: "_Reading") -> ChosenWeights:
        """Writes the weights of the newest checkpoint, unless they are there already. Blocks.

        Raises:
            YattError, OSError: there is none, or it cannot be used.
        """
        section = self._node.config.checkpoint
        store = open_store(genrm.refresh.url, section.storage_options, section.stall_s)
        checkpoints, attempt = Checkpoints(store, 0), self._node.attempt
        names = checkpoints.candidates().names
        if not names:
            raise WorkerFailed(f"{genrm.refresh.url} has no checkpoint yet")
        manifest, commit = checkpoints.read(names[0]), named_commit(names[0])
        place, name = self._place(genrm), weights_folder(commit, manifest.run_id)
        if not (place / name).is_dir():
            make_within(self._node.paths.root, place)
            model = ModelFolder(path=Path(genrm.model), model=read_model(genrm.model))
            export_as_hf(checkpoints, names[0], model, place / name, reading.tick)
        return ChosenWeights(
            begins=iteration, folder=name, source=commit_of(manifest).iteration, attempt=attempt
        )

    async def _check_there(self, genrm: GenRMSection, chosen: ChosenWeights) -> None:
        folder = self._place(genrm) / chosen.folder
        if chosen.folder and not await _patiently(folder.is_dir):
            raise WorkerFailed(
                f"{folder} is gone: the weights that genrms[{genrm.name}] had from iteration "
                f"{chosen.begins} on. Put it back; or remove {folder.parent / record_name(chosen.begins)}, "
                "and weights are chosen anew, which makes other scores than before."
            )

    async def _prune(self, place: Path) -> None:
        """Removes weights that no attempt can need again. What cannot be removed now is removed later."""
        with contextlib.suppress(YattError, OSError, TimeoutError):
            async with asyncio.timeout(PRUNE_S):
                found: Candidates = await call_in_thread(self._checkpoints.candidates)
            saved = sorted(named_commit(name).iteration for name in found.names)
            before = saved[-2:] or [0]  # of two, since the newest save may turn out to be damaged
            await call_in_thread(partial(_remove_unneeded, place, before[0] + 1))

    def _place(self, genrm: GenRMSection) -> Path:
        return self._node.paths.judge_weights(genrm.name)


class _Reading:
    """Weights that are being written in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._moved, self.is_over = loop, 0, False

    def num_moved(self) -> int:
        """Pieces so far."""
        return self._moved

    def tick(self, _: int) -> None:
        """Counts a piece.

        Raises:
            CancelledError: nobody waits for them any more.
        """
        self._moved += 1
        if self.is_over or self._loop.is_closed():
            raise CancelledError


def _remove_unneeded(place: Path, oldest: int) -> None:
    folders = {begins: read_choice(place, begins).folder for begins in recorded_choices(place)}
    needed = needed_folders(folders, oldest)
    for entry in place.iterdir():
        if is_weights_folder(entry.name) and entry.name not in needed:
            shutil.rmtree(entry, ignore_errors=True)
        hidden = entry.name.removeprefix(".").rsplit(".", 2)[0]
        if entry.name.startswith(".") and is_weights_folder(hidden):
            remove_partial_folders(place / hidden)


async def _patiently(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread, with retries."""
    return await call_in_thread(partial(with_retries, work))
