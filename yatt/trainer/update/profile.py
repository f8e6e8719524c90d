"""Profiles of the update on this rank: a trace, the history of device memory, ranges for nsys.

A profile never changes results, and a fault of it costs only this profile and the later ones of this rank.
When a trace ends, torch's profiler holds Python's lock for microseconds per event, and meanwhile the rank
cannot renew its lease. So a trace has few micro-batches: the last ones of the update, and the optimizer step.
"""

import contextlib
import gzip
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity

from yatt.adapters.files.files import make_within, write_atomically
from yatt.adapters.files.writer import BackgroundWriter
from yatt.clock import monotonic_s
from yatt.config.schema import RunConfig
from yatt.config.sections.profile import ProfileSection
from yatt.paths import RunPaths

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
EVENTS_PER_MODULE = 300
"""Upper estimate of a trace's events per module of the model and micro-batch: up to 125 were counted on CPU,
where an operation has one or two; on a GPU the launch of its kernel and the kernel are two more."""

EVENTS_PER_S = 100_000
"""Events per second that the end of a trace processes: 180,000 were measured on a slow CPU."""

SHARE_OF_TTL = 0.5
"""Part of `lease.ttl_s` for which the end of a trace may stop the rank."""

MOST_HISTORY = 20_000
"""Largest number of allocations in a history of device memory; older ones are dropped."""

WRITE_S = 10.0
"""Longest time for which the rank waits until a profile is in the run folder; later it goes on meanwhile."""


def recorded_micro_batches(wanted: int, *, num_modules: int, ttl_s: float) -> int:
    """Returns the number of micro-batches in a trace, whose end must not cost the lease; 0 if one is too
    large.

    Args:
        num_modules: of this rank's part of the model.
        ttl_s: time without a renewal after which the lease is lost.
    """
    most_events = int(SHARE_OF_TTL * ttl_s * EVENTS_PER_S)
    return min(wanted, most_events // (EVENTS_PER_MODULE * num_modules))


class ProfileFiles:
    """Writes profiles to the run folder, in a thread that begins with the first one.

    Args:
        root: the run folder.
        folder: where profiles are; made if it is missing.
        rank: global rank, part of the names.
    """

    def __init__(self, root: Path, folder: Path, rank: int) -> None:
        self._root, self._folder, self._rank = root, folder, rank
        self._writer: BackgroundWriter | None = None

    def put(self, kind: str, iteration: int, data: bytes) -> None:
        """Writes a profile; a name that ends with .gz is compressed. Waits for at most `WRITE_S`."""
        path = self._folder / f"iteration{iteration}-rank{self._rank}.{kind}"
        if self._writer is None:
            self._writer = BackgroundWriter()
        self._writer.call(partial(self._write, path, data))
        if not self._writer.flush(WRITE_S):
            _LOG.warning("profile: %s is not written after %g s; the run continues", path, WRITE_S)

    def _write(self, path: Path, data: bytes) -> None:
        make_within(self._root, self._folder)
        write_atomically(path, gzip.compress(data) if path.suffix == ".gz" else data)

    def close(self) -> None:
        """Ends the thread."""
        if self._writer is not None:
            self._writer.close(WRITE_S)


def profiler_of(
    config: RunConfig, models: Sequence[nn.Module], device: torch.device, *, attempt: int, scratch: Path
) -> "RankProfiler":
    """The profiler of this rank, which does nothing if the rank is not one of those chosen.

    Args:
        models: this rank's part of the policy.
        scratch: a local folder.
    """
    section, rank, paths = config.profile, dist.get_rank(), RunPaths(Path(config.run.dir))
    if rank not in section.ranks:
        section = ProfileSection()
    num_modules = sum(1 for model in models for _ in model.modules())
    files = ProfileFiles(paths.root, paths.profiles(attempt), rank)
    num = recorded_micro_batches(section.micro_batches, num_modules=num_modules, ttl_s=config.lease.ttl_s)
    return RankProfiler(section, device, num_micro_batches=num, files=files, scratch=scratch)


class RankProfiler:
    """The profiles of one rank.

    Args:
        section: with the kinds that this rank makes; without any, it does nothing.
        num_micro_batches: in a trace.
        files: takes the profiles.
        scratch: an existing local folder, for a trace of some MB until it is read.
    """

    def __init__(
        self,
        section: ProfileSection,
        device: torch.device,
        *,
        num_micro_batches: int,
        files: ProfileFiles,
        scratch: Path,
    ) -> None:
        self._section, self._device, self._files, self._scratch = section, device, files, scratch
        self._num_micro_batches = num_micro_batches
        self._kinds = frozenset(kind for kind in section.kinds if self._can(kind))
        self._active: frozenset[str] = frozenset()
        self._trace: Any = None

    def _can(self, kind: str) -> bool:
        if kind == "torch":
            lacks = (
                "" if self._num_micro_batches else "one micro-batch has more events than lease.ttl_s allows"
            )
        else:
            lacks = "" if self._device.type == "cuda" else "it needs CUDA"
        if lacks:
            _LOG.warning("profile: there is no profile of kind %s: %s", kind, lacks)
        return not lacks

    @contextlib.contextmanager
    def of_iteration(self, iteration: int) -> Iterator[None]:
        """Makes the profiles of this iteration while it is trained, if it is one of those chosen."""
        if iteration not in self._section.iterations or not self._kinds:
            yield
            return
        self._active = self._kinds
        if "memory" in self._active:
            self._safely(self._begin_history)
        try:
            with self.part(f"iteration {iteration}"):
                yield
        finally:
            if self._trace is not None:
                self._safely(partial(self._end_trace, iteration))
            if "memory" in self._active:
                self._safely(partial(self._end_history, iteration))
            self._active = frozenset()

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A range with this name around a part of the update, for nsys."""
        return self._range(name) if "nvtx" in self._active else contextlib.nullcontext()

    def before_last(self, tick: Callable[[], None], num_ticks: int) -> Callable[[], None]:
        """Returns `tick`, which is called before each of `num_ticks` micro-batches of the update; a trace
        begins with the last ones."""
        if "torch" not in self._active:
            return tick
        left = num_ticks

        def begin_late() -> None:
            nonlocal left
            if left <= self._num_micro_batches and self._trace is None and "torch" in self._active:
                self._safely(self._begin_trace)
            left -= 1
            tick()

        return begin_late

    def close(self) -> None:
        """Ends the thread that writes."""
        self._files.close()

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - whatever a profiler meets must not cost the run
            _LOG.exception("profile: failed; this rank makes no more profiles, and the run continues")
            self._active = self._kinds = frozenset()
            self._trace = None

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _begin_trace(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        trace = torch.profiler.profile(activities=activities)
        trace.start()
        self._trace = trace

    def _end_trace(self, iteration: int) -> None:
        trace, self._trace = self._trace, None
        trace.stop()
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:  # in-memory files cannot be named
            path = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(path))
            data = path.read_bytes()
        self._files.put("trace.json.gz", iteration, data)

    def _begin_history(self) -> None:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MOST_HISTORY)

    def _end_history(self, iteration: int) -> None:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            path = Path(folder) / "memory"
            try:
                torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            finally:
                torch.cuda.memory._record_memory_history(None)
            data = path.read_bytes()
        self._files.put("memory.pickle", iteration, data)


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of the parts of an update. Each part is a range in a profile."""

    profiler: RankProfiler
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, part: str, work: Callable[[], Result]) -> Result:
        """Does a part's work, and returns its result."""
        begin_s = monotonic_s()
        with self.profiler.part(part):
            result = work()
        self.seconds[part] = monotonic_s() - begin_s
        return result
