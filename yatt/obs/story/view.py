"""The current state of a run from its event log and metrics: for the terminal, `status` and the report.

Reads only the run folder, so it works on any machine that sees the folder, during the run and after it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from yatt.adapters.files.lines import Tail
from yatt.adapters.files.segments import SegmentTail
from yatt.adapters.run_folder.ledger import run_is_finished
from yatt.obs.metrics import STEP, amount_in, as_row
from yatt.obs.story.rows_seen import RowsSeen
from yatt.obs.story.story import RunStory
from yatt.paths import RunPaths
from yatt.records.events.log import LoggedEvent, logged_event


@dataclass(slots=True)
class RunView:
    """The current state of a run. Call `refresh`, then read the fields.

    Attributes:
        news: sentences for the user from the last refresh.
        also: gets each event too, also those of stale attempts.
    """

    paths: RunPaths
    total_iterations: int
    story: RunStory = field(default_factory=RunStory)
    seen: RowsSeen = field(default_factory=RowsSeen)
    news: list[str] = field(default_factory=list)
    also: Callable[[LoggedEvent], None] | None = None
    _events: SegmentTail[LoggedEvent] = field(init=False)
    _metrics: Tail[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._events = SegmentTail(self.paths.events, logged_event)
        self._metrics = Tail(self.paths.metrics, as_row)

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete."""
        return run_is_finished(self.paths)

    @property
    def state(self) -> str:
        """The run's state in a word."""
        return "finished" if self.is_finished else self.story.ended or "running"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics, oldest first."""
        return self.seen.rows

    @property
    def unreadable(self) -> int:
        """Number of unreadable lines of events and metrics, including an incomplete last line."""
        return self._events.unreadable + self._metrics.skipped + self._metrics.has_torn_end

    def refresh(self) -> list[dict[str, Any]]:
        """Reads new events and metrics; returns the new metrics rows."""
        self.news = []
        for events in self._events.batches():
            for logged in events:
                self.news += self.story.take(logged)
                if self.also is not None:
                    self.also(logged)
        rows, fresh = self._metrics.read()
        return self.seen.take(rows, is_fresh=fresh)

    def eta_s(self) -> float | None:
        """Returns the seconds left at the pace of the last iterations; None before the first."""
        found = (amount_in(row, "timing_s/step") for row in self.rows[-10:] if row[STEP])
        steps = [step_s for step_s in found if step_s > 0]
        if not steps:
            return None
        done = int(max(row[STEP] for row in self.rows))
        left_s = (self.total_iterations - done) * (sum(steps) / len(steps))
        return left_s if math.isfinite(left_s) else None

    def summary(self) -> dict[str, Any]:
        """Returns the contents of `yatt status`. Metrics keep their recorded values, also not finite ones."""
        last, story = self.rows[-1] if self.rows else {}, self.story
        return {
            "run": str(self.paths.root),
            "state": self.state,
            "attempt": story.attempt,
            "phase": story.phase,
            "iteration": story.iteration,
            "total_iterations": self.total_iterations,
            "reward": last.get("critic/rewards/mean"),
            "throughput": last.get("perf/throughput"),
            "step_s": last.get("timing_s/step"),
            "eta_s": self.eta_s(),
            "committed": story.saves.committed,
            "uploading": story.saves.uploading,
            "kept_locally": story.saves.kept,
            "failed_saves": story.saves.num_failed,
            "save_error": story.saves.error,
            "holders": dict(sorted(story.slabs.holders.items())),
            "workers": dict(sorted(story.processes.states.items())),
            "unreadable_lines": self.unreadable,
            "waits": dict(sorted(story.saves.waits.items())),
            "silent_judges": dict(sorted(story.judging.silent.items())),
            "alarms": [asdict(alarm) for alarm in story.judging.alarms.values()],
            "dropped_groups": int(self.seen.num_dropped),
            "dropped_why": story.judging.why_dropped(),
            "evaluated": story.judging.prompts_evaluated(),
            "late_writes": story.num_late,
            "lost_lines": story.num_lost,
            "killed_reward_calls": story.processes.num_killed,
            **story.slabs.as_json(),
        }


def counter_lines(num_late: int, num_lost: int, num_killed: int) -> list[str]:
    """Returns sentences about the counters that are not zero."""
    found = []
    if num_late:
        lost = f"; {num_lost} lines were lost" if num_lost else ""
        found.append(f"{_times(num_late, 'write', 'writes')} of telemetry {_were(num_late)} late{lost}")
    if num_killed:
        found.append(f"{_times(num_killed, 'reward call', 'reward calls')} {_were(num_killed)} killed")
    return found


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
