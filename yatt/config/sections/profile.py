"""The run file's section about profiles of the update."""

from dataclasses import dataclass
from typing import Annotated, Literal

from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import COUNT, COUNT_OR_NONE

MOST_FILES = 64
"""Largest number of iterations times ranks that are profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSection:
    """Profiles of the update on chosen trainer ranks, in `attempts/N/profiles/` of the run folder.

    They do not change results. If one fails, the rank logs it and the run continues."""

    kinds: tuple[Literal["torch", "memory", "nvtx"], ...] = ()
    """torch: a trace of the last micro-batches and the optimizer step, for ui.perfetto.dev. memory: the
    history of device memory, for pytorch.org/memory_viz. nvtx: ranges around the parts of the update, for
    nsys. memory and nvtx need CUDA. Empty: no profiles."""

    iterations: tuple[Annotated[int, COUNT], ...] = ()
    """Iterations that are profiled. In the first ones, libraries still initialize."""

    ranks: tuple[Annotated[int, COUNT_OR_NONE], ...] = (0,)
    """Global ranks that are profiled."""

    micro_batches: Annotated[int, COUNT] = 2
    """torch: number of micro-batches of the last optimizer step in a trace. Fewer if the end of the trace
    could stop the rank for so long that it loses its lease (`lease.ttl_s`)."""

    def __post_init__(self) -> None:
        has_kinds, has_iterations = bool(self.kinds), bool(self.iterations)
        rule(has_kinds or not has_iterations, "iterations is set, but kinds is empty; write kinds: [torch].")
        rule(has_iterations or not has_kinds, "kinds is set, but iterations is empty; write some, as [3, 4].")
        rule(bool(self.ranks), "ranks is empty; write some, as [0].")
        num_files = len(self.iterations) * len(self.ranks)
        rule(
            num_files <= MOST_FILES,
            f"iterations times ranks is {num_files}; write at most {MOST_FILES}, as files get large.",
        )
