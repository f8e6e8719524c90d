"""A trainer rank without a model: the scripted engine's counterpart (`yatt.engine.scripted`), without torch.

It takes every order, joins the run's key-value service, has real segments, writes real shards of the sizes
that the real trainer's have, and publishes weights; but its weights are no model's. What an update does to
its state (`yatt.trainer.scripted.state`) depends on every bit of the iteration: all facts, the plan, and all
samples, wherever their ranks are. So a run that was disturbed ends bit-equal only if nothing was lost, made
twice or mixed up. It starts in 0.3 s: for rehearsals of a job on a site, and for tests of everything but
the learning.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.model_family import model_of_run
from yatt.adapters.net.curve import CurveKeys
from yatt.adapters.net.key_value import LONGEST_PARK_S, KeyValueClient, KeyValueServer
from yatt.adapters.node_local.host_segment import (
    STATE,
    WEIGHTS,
    SegmentWriter,
    Stamp,
    aligned_size,
    plan_path,
    segment_path,
    weight_plan_path,
)
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.pieces import FILE_BYTES, in_files
from yatt.checkpoint.local.local_first import Ranges
from yatt.checkpoint.store.store import Store
from yatt.clock import monotonic_s
from yatt.config.schema import RunConfig
from yatt.core.figures.fact_metrics import fact_metrics
from yatt.engine.script import scripted_logprobs
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.models.cuts import engine_cuts
from yatt.models.model import Model
from yatt.models.rows import WeightRow
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.weights import WeightPlan
from yatt.trainer.orders import ArrivedSamples, carried_out
from yatt.trainer.scripted.layout import ElementRun, ModelShare, laid_out
from yatt.trainer.scripted.state import (
    MOMENTS,
    STATE_BYTES,
    saved_state,
    state_after,
    state_elements,
    write_folder,
)
from yatt.trainer.state.restoring import CheckpointSource


class ScriptedMeeting:
    """The ranks' key-value service, by which they exchange what each knows of an iteration."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._server: KeyValueServer | None = None
        self._client: KeyValueClient | None = None
        self.rank, self.world_size = 0, 1
        self._read = ""

    def open_store(self, host: str) -> int:
        """Starts the service, once; returns its port."""
        if self._server is None:
            self._server = KeyValueServer(host, self._keys())
        return self._server.port

    def join(self, order: m.Join) -> None:
        """Meets all other ranks; a second call does nothing."""
        if self._client is not None:
            return
        self.rank, self.world_size = order.global_rank, order.world_size
        self._client = KeyValueClient(order.host, order.port, self._keys())
        self.gathered("join", b"", self._config.launch.start_timeout_s)

    def gathered(self, name: str, own: bytes, limit_s: float) -> bytes:
        """Returns a digest of what all ranks give under this name. The first rank makes it.

        Raises:
            DeadlineExceeded: a rank gives nothing.
        """
        assert self._client is not None, "Join comes first"
        self._client.call("set", f"{name}/{self.rank}", value=own)
        if self.rank == 0:
            keys = [f"{name}/{rank}" for rank in range(self.world_size)]
            self._client.call("set", name, value=_joined([self._got(key, limit_s) for key in keys]))
            for key in (*keys, self._read):  # each rank has read the one before, or it would not have given
                self._client.call("delete", key)
            self._read = name
        return self._got(name, limit_s)

    def leave(self) -> None:
        """Closes the client and the service."""
        for part in (self._client, self._server):
            if part is not None:
                part.close()

    def _got(self, key: str, limit_s: float) -> bytes:
        assert self._client is not None
        until_s = monotonic_s() + limit_s
        while not self._client.call("check", key, park_s=LONGEST_PARK_S).found:
            if monotonic_s() > until_s:
                raise DeadlineExceeded(f"no rank gave {key} within {limit_s:g} s")
        return self._client.call("get", key).value

    def _keys(self) -> CurveKeys:
        return CurveKeys(RunPaths(Path(self._config.run.dir)).keys)


def _joined(given: list[bytes]) -> bytes:
    """A digest of all samples, in the order of their numbers: which rank has which does not matter."""
    samples = sorted(pair for raw in given if raw for pair in msgspec.msgpack.decode(raw))
    return hashlib.blake2b(msgspec.msgpack.encode(samples), digest_size=STATE_BYTES).digest()


@dataclass(slots=True)
class _Segment:
    """A segment and the runs of elements in it. `version`: of its content, -1 before the first."""

    writer: SegmentWriter
    runs: list[ElementRun]
    version: int = -1

    def bring(self, stamp: Stamp, state: bytes, tick: Callable[[], None]) -> None:
        """Fills it with a state, unless it is of this version already."""
        if self.version == stamp.version:
            return
        self.writer.invalidate()
        for run in self.runs:
            at = run.at
            for block in state_elements(run.key, run.dtype, state, run.first, run.count):
                self.writer.data[at : at + len(block)] = block
                at += len(block)
            tick()
        self.writer.complete(stamp)
        self.version = stamp.version


@dataclass(slots=True)
class _Built:
    """The rank's part of the model. `state` and `version` are those of its present content."""

    model: Model
    rows: list[WeightRow]
    attempt: int
    plan: m.SavePlan
    segments: dict[str, _Segment] = field(default_factory=dict)
    state: bytes = bytes(STATE_BYTES)
    version: int = 0

    def bring(self, areas: tuple[str, ...], tick: Callable[[], None]) -> None:
        """Brings segments up to date."""
        for area in areas:
            if area in self.segments:
                self.segments[area].bring(Stamp(self.attempt, self.version), self.state, tick)

    def size_of(self, area: str) -> int:
        """Returns the bytes of a segment; 0 if this rank has no part of the model there."""
        return sum(run.size_bytes for run in self.segments[area].runs) if area in self.segments else 0


class ScriptedRank:
    """Executes the orders to a trainer rank; as `yatt.trainer.worker.TrainerRank`.

    Args:
        store: the checkpoint store.
        tick: called after each tensor.
        say: called about waits for the store of another run.
    """

    def __init__(
        self, config: RunConfig, store: Store, *, tick: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._config, self._tick = config, tick
        self._source = CheckpointSource(config, store, tick=tick, say=say)
        self._meeting = ScriptedMeeting(config)
        self._built: _Built | None = None
        self._trained: tuple[int, m.Message] | None = None
        self._arrived = ArrivedSamples()
        self._seen: set[tuple[str, tuple[int, int, int]]] = set()
        self._handlers: dict[type[m.Message], Callable[[Any], m.Message]] = {
            m.OpenStore: self._open_store,
            m.Join: self._join,
            m.Build: self._build,
            m.Restore: self._restore,
            m.Wake: lambda _: m.Done(),
            m.Sleep: self._sleep,
            c.SampleTransfer: self._arrived.receive,
            m.Train: self._train,
            m.Publish: self._publish,
            m.TakeSnapshot: self._take_snapshot,
            m.ExportHF: self._export_hf,
            m.SeePictures: self._see_pictures,
        }

    def handle(self, order: m.Message) -> m.Message:
        """Executes one order; see `carried_out`."""
        return carried_out(self._handlers, order)

    def leave(self) -> None:
        """Leaves the other ranks."""
        self._meeting.leave()

    @property
    def _ready(self) -> _Built:
        if self._built is None:
            raise WorkerFailed("this trainer rank has no model yet; Build comes first")
        return self._built

    def _open_store(self, order: m.OpenStore) -> m.Message:
        return m.StoreOpened(host=order.host, port=self._meeting.open_store(order.host))

    def _join(self, order: m.Join) -> m.Message:
        self._meeting.join(order)
        return m.Done()

    def _build(self, order: m.Build) -> m.Message:
        model = with_retries(partial(model_of_run, self._config.model))
        stem = Path(order.stem)
        share = ModelShare.of(self._meeting.rank, self._meeting.world_size, self._config.trainer)
        rows, dtype = share.rows(model.rows), self._config.model.dtype
        cuts = engine_cuts(self._config, rows, model.shape)
        runs, pieces, boxes = laid_out(rows, share, dtype, cuts)
        files = in_files(pieces, lambda piece: piece.size_bytes, FILE_BYTES)
        plan = m.SavePlan(rank=self._meeting.rank, files=tuple(map(tuple, files)))
        built = _Built(model, rows, order.attempt, plan)
        for area, its in runs.items():
            if its:
                writer = SegmentWriter(
                    segment_path(stem, area), aligned_size(its[-1].at + its[-1].size_bytes)
                )
                built.segments[area] = _Segment(writer, its)
        plan_path(stem).write_bytes(msgspec.msgpack.encode(plan))
        weights = WeightPlan(rank=self._meeting.rank, weights=tuple(boxes))
        weight_plan_path(stem).write_bytes(msgspec.msgpack.encode(weights))
        self._built, self._trained = built, None
        return m.Built(host_bytes=built.size_of(WEIGHTS) + built.size_of(STATE))

    def _restore(self, order: m.Restore) -> m.Message:
        return self._source.restored(order, partial(self._fill, order))

    def _fill(self, order: m.Restore, ranges: Ranges, manifest: Manifest) -> None:
        built = self._ready
        built.state = saved_state(ranges, manifest, built.rows, self._tick)
        built.version = 0 if order.weights_only else manifest.iteration
        for segment in built.segments.values():
            segment.version = -1

    def _sleep(self, _: m.Sleep) -> m.Message:
        if self._built is not None:
            self._built.bring((WEIGHTS, STATE), self._tick)
        return m.Done()

    def _see_pictures(self, order: m.SeePictures) -> m.Message:
        """Reads prepared files, as a rank with a tower does."""
        from yatt.adapters.node_local.prepared_media import open_prepared  # numpy: not for text

        missing = []
        for index, each in enumerate(order.pictures):
            try:
                self._seen.add((each.sha256, open_prepared(Path(order.folder), each.digest).grid))
            except FileNotFoundError:
                missing.append(index)
            self._tick()
        return m.PicturesSeen(missing=tuple(missing))

    def _train(self, order: m.Train) -> m.Message:
        """Trains once per iteration. A repeated order gets the same answer."""
        if self._trained is None or self._trained[0] != order.iteration:
            self._trained = order.iteration, self._update(self._arrived.completed(order))
        return self._trained[1]

    def _update(self, order: m.Train) -> m.Message:
        began_s, built = monotonic_s(), self._ready
        shown = {
            (each.ref.sha256, each.file_grid)
            for rollout in order.rollouts
            for turn in rollout.turns
            for each in turn.media
        }
        if missing := sorted(shown - self._seen):
            raise WorkerFailed(f"the picture {missing[0][0]} was not seen before an update that needs it")
        self._seen = set()
        digests = [
            (each.sample_id, hashlib.blake2b(msgspec.msgpack.encode(each), digest_size=16).digest())
            for each in order.rollouts
        ]
        limit_s = self._config.launch.phase_timeout_s
        given = msgspec.msgpack.encode(digests)
        samples = self._meeting.gathered(f"train/{order.iteration}", given, limit_s)
        parts = msgspec.msgpack.encode(order.facts), msgspec.msgpack.encode(order.plan), samples
        built.state = state_after(built.state, order.iteration.to_bytes(8, "little"), *parts)
        built.version = order.iteration
        self._tick()
        return m.Trained(
            metrics=self._metrics(order, built.state),
            timing_s={"update_actor": monotonic_s() - began_s},
            advantages=m.pack_floats(_advantages(order.facts)),
        )

    def _metrics(self, order: m.Train, state: bytes) -> dict[str, float]:
        """Metrics of the facts, and numbers in place of those of an update, which follow from the state."""
        advantages = _advantages(order.facts)
        numbers = [byte / 256 for byte in state]
        return fact_metrics(order.facts) | {
            "critic/advantages/mean": sum(advantages) / len(advantages),
            "critic/advantages/max": max(advantages),
            "critic/advantages/min": min(advantages),
            "actor/pg_loss": numbers[0] / 100,
            "actor/ppo_kl": numbers[1] / 1000,
            "actor/grad_norm": 0.5 + numbers[2],
            "actor/entropy": numbers[3],
            "actor/kl_loss": 0.0,
            "actor/lr": self._config.optimizer.lr,
        }

    def _publish(self, order: m.Publish) -> m.Message:
        built = self._ready
        if built.version != order.policy_version:
            raise WorkerFailed(
                f"policy version {order.policy_version} was to be published, it is {built.version}"
            )
        built.bring((WEIGHTS,), self._tick)
        probe = (scripted_logprobs(order.policy_version, m.unpack_ids(raw)) for raw in order.probe)
        return m.Published(
            size_bytes=built.size_of(WEIGHTS),
            probe_logprobs=tuple(m.pack_floats(row) for row in probe),
        )

    def _take_snapshot(self, order: m.TakeSnapshot) -> m.Message:
        built = self._ready
        if built.version != order.iteration:
            raise WorkerFailed(
                f"the state of iteration {order.iteration} was to be saved, it is of {built.version}"
            )
        built.bring((WEIGHTS, STATE), self._tick)
        common = {"step": float(order.iteration), "moments": MOMENTS, "trainer": "scripted"}
        is_first = self._meeting.rank == 0
        return m.SnapshotTaken(
            common=json.dumps(common).encode() if is_first else b"{}", size_bytes=built.plan.size_bytes
        )

    def _export_hf(self, order: m.ExportHF) -> m.Message:
        if self._meeting.rank == 0:
            built, section = self._ready, self._config.model
            written = partial(
                write_folder, Path(order.folder), section, built.model.rows, built.state, self._tick
            )
            with_retries(written)
        return m.Done()


def _advantages(facts: tuple[m.SampleFact, ...]) -> list[float]:
    """Each reward less the mean of its prompt group."""
    groups: dict[int, list[float]] = {}
    for fact in facts:
        groups.setdefault(fact.prompt_group, []).append(fact.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in groups.items()}
    return [fact.reward - means[fact.prompt_group] for fact in facts]
