"""The current state of a run from its event log and metrics: for the terminal, `status` and the report.

Reads only the run folder, so it works on any machine that sees the folder, during the run and after it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from yatt.adapters.files.lines import Tail
from yatt.adapters.files.segments import SegmentTail
from yatt.adapters.run_folder.ledger import run_is_finished
from yatt.core.samples.reasons import cause_of
from yatt.obs.metrics import STEP, amount_in, as_row
from yatt.obs.story.events import UNREADABLE, as_event
from yatt.obs.story.rows_seen import RowsSeen
from yatt.obs.story.sentences import sentence_of
from yatt.obs.story.slabs_now import SlabsNow
from yatt.paths import RunPaths

DELAYED = "cannot be started yet"
MOST_REASONS = 100
"""Number of different causes for dropped groups that are counted."""


@dataclass(frozen=True, slots=True)
class ActiveAlarm:
    """An active alarm: its name, the first iteration that showed it, and what to do."""

    name: str
    since: int
    message: str


@dataclass(slots=True)
class RunView:
    """The current state of a run. Call `refresh`, then read the fields."""

    paths: RunPaths
    total_iterations: int
    phase: str = "starting"
    iteration: int = 0
    attempt: int = 0
    nodes: int = 0
    seen: RowsSeen = field(default_factory=RowsSeen)
    holders: dict[str, str] = field(default_factory=dict)
    slabs: SlabsNow = field(default_factory=SlabsNow)
    committed: int = 0
    uploading: int = 0
    """The iteration whose save is in flight; 0: none."""

    kept: int = 0
    """The newest iteration with a local commit that is newer than `committed`; 0: none."""

    failed_saves: int = 0
    """Number of saves in a row that failed."""

    save_error: str = ""
    workers: dict[str, str] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    """Sentences for the user from the last refresh."""

    ended: str = ""
    waits: dict[str, str] = field(default_factory=dict)
    """Maps each process that waits for the checkpoint store to its error."""

    silent_judges: dict[str, str] = field(default_factory=dict)
    """Maps each GenRM service that is waited for, and the node that waits, to the error."""

    alarms: dict[str, ActiveAlarm] = field(default_factory=dict)
    """Active alarms by name."""

    judged_in_vain: str = ""
    """The newest example of a GenRM's answer without a verdict."""

    drop_reasons: Counter[str] = field(default_factory=Counter)
    """How often each reason for a dropped prompt group came, without the places; the first ones only."""

    num_late: int = 0
    """Number of times that events and metrics were written late."""

    num_lost: int = 0
    """Number of lines that were lost then."""

    num_killed: int = 0
    """Number of reward function calls that were killed at their time limit."""

    has_told_kill: bool = False
    """Whether a sentence of this attempt was about such a call."""

    also: Callable[[dict[str, Any]], None] | None = None
    """Gets each event too, also those of stale attempts."""

    _events: SegmentTail = field(init=False)
    _metrics: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._events = SegmentTail(self.paths.events, as_event)
        self._metrics = Tail(self.paths.metrics, as_row)

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete."""
        return run_is_finished(self.paths)

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
            for event in events:
                self.fold(event)
                if self.also is not None:
                    self.also(event)
        rows, fresh = self._metrics.read()
        return self.seen.take(rows, is_fresh=fresh)

    def fold(self, event: dict[str, Any]) -> None:
        """Applies one event; adds sentences for the user to `news`. Events of a stale attempt are ignored."""
        if event["attempt"] < self.attempt:
            return
        if event["attempt"] > self.attempt:
            self._begin(event["attempt"])
        self.slabs.take(event)
        if (change := _FOLDS.get(event["kind"])) is not None:
            change(self, event)
        if sentence := sentence_of(event):
            self.news.append(sentence)

    def _begin(self, attempt: int) -> None:
        """Resets the state for a new attempt, whose start event may be in a deleted segment of the log."""
        self.attempt, self.nodes, self.phase, self.ended = attempt, 0, "join", ""
        self.holders, self.workers, self.alarms, self.waits = {}, {}, {}, {}
        self.silent_judges, self.has_told_kill = {}, False
        self.slabs.begin()

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
        last = self.rows[-1] if self.rows else {}
        return {
            "run": str(self.paths.root),
            "state": "finished" if self.is_finished else self.ended or "running",
            "attempt": self.attempt,
            "phase": self.phase,
            "iteration": self.iteration,
            "total_iterations": self.total_iterations,
            "reward": last.get("critic/rewards/mean"),
            "throughput": last.get("perf/throughput"),
            "step_s": last.get("timing_s/step"),
            "eta_s": self.eta_s(),
            "committed": self.committed,
            "uploading": self.uploading,
            "kept_locally": self.kept,
            "failed_saves": self.failed_saves,
            "save_error": self.save_error,
            "holders": dict(sorted(self.holders.items())),
            "workers": dict(sorted(self.workers.items())),
            "unreadable_lines": self.unreadable,
            "waits": dict(sorted(self.waits.items())),
            "silent_judges": dict(sorted(self.silent_judges.items())),
            "alarms": [asdict(alarm) for alarm in self.alarms.values()],
            "dropped_groups": int(self.seen.num_dropped),
            "dropped_why": self._why_dropped(),
            "late_writes": self.num_late,
            "lost_lines": self.num_lost,
            "killed_reward_calls": self.num_killed,
            **self.slabs.as_json(),
        }

    def _why_dropped(self) -> str:
        """Returns the most frequent cause of dropped groups, and its count; empty if none is known."""
        if not self.drop_reasons:
            return ""
        ((reason, count),) = self.drop_reasons.most_common(1)
        return f"{count} of them: {reason}"


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


def _start(view: RunView, event: dict[str, Any]) -> None:
    view.nodes, view.uploading = event["nodes"], 0


def _end(view: RunView, event: dict[str, Any]) -> None:
    view.ended = {0: "finished", 75: "stopped"}.get(event["exit_code"], "failed")
    view.phase = "ended"


def _phase(view: RunView, event: dict[str, Any]) -> None:
    # The iteration of a new attempt is 0 until it has resumed.
    view.phase, view.iteration = event["phase"], event["iteration"] or view.committed


def _grant(view: RunView, event: dict[str, Any]) -> None:
    view.holders[event["slab"]] = event["holder"]


def _release(view: RunView, event: dict[str, Any]) -> None:
    view.holders.pop(event["slab"], None)


def _expire(view: RunView, event: dict[str, Any]) -> None:
    view.holders.pop(event.get("slab", ""), None)


def _quarantine(view: RunView, event: dict[str, Any]) -> None:
    view.holders[event["slab"]] = "QUARANTINED"


def _node_lost(view: RunView, event: dict[str, Any]) -> None:
    index = event["node"]
    view.holders = {
        slab: role for slab, role in view.holders.items() if not slab.startswith(f"n{index}s")
    }  # fmt: skip
    its = re.compile(rf"-n{index}([rs]\d+(e\d+)?)?$")
    view.workers = {name: state for name, state in view.workers.items() if not its.search(name)}


def _worker_start(view: RunView, event: dict[str, Any]) -> None:
    view.workers[event["worker"].rpartition(".")[0]] = f"pid {event['pid']}"


def _worker_delay(view: RunView, event: dict[str, Any]) -> None:
    if view.workers.get(name := event["worker"].rpartition(".")[0]) != DELAYED:
        view.workers[name] = DELAYED
        view.news.append(f"{event['worker']} cannot be started: {event['error']}")


def _worker_end(view: RunView, event: dict[str, Any]) -> None:
    view.waits.pop(event["worker"], None)
    view.workers[event["worker"].rpartition(".")[0]] = f"ended: {event['how']}"
    if event["how"] != "exit code 0" and view.phase != "ended":
        view.news.append(f"{event['worker']} ended: {event['how']}")


def _commit(view: RunView, event: dict[str, Any]) -> None:
    view.committed, view.uploading, view.failed_saves = event["iteration"], 0, 0
    view.save_error, view.kept = "", 0


def _save_begins(view: RunView, event: dict[str, Any]) -> None:
    view.uploading = event["iteration"]


def _save_fails(view: RunView, event: dict[str, Any]) -> None:
    view.uploading, view.failed_saves = 0, view.failed_saves + 1
    view.save_error = event["error"]


def _given_up(view: RunView, _: dict[str, Any]) -> None:
    view.uploading = 0


def _kept(view: RunView, event: dict[str, Any]) -> None:
    view.uploading, view.kept = 0, event["iteration"]


def _store_wait(view: RunView, event: dict[str, Any]) -> None:
    had_waited = bool(view.waits)
    if event["error"]:
        view.waits[event["who"]] = event["error"]
        if not had_waited:
            view.news.append(f"{event['who']} waits for the checkpoint store: {event['error']}")
    elif view.waits.pop(event["who"], None) is not None and not view.waits:
        view.news.append("no process waits for the checkpoint store now")


def _judge_wait(view: RunView, event: dict[str, Any]) -> None:
    who = f"GenRM '{event['genrm']}' (node {event.get('node', 0)})"
    if event["error"]:
        view.silent_judges[who] = event["error"]
        view.news.append(f"{who} is down, and is waited for: {event['error']}")
    elif view.silent_judges.pop(who, None) is not None:
        view.news.append(f"{who} is not waited for any more")


def _resume(view: RunView, event: dict[str, Any]) -> None:
    view.kept = event["iteration"] if event.get("is_local") is True else 0


def _alarm(view: RunView, event: dict[str, Any]) -> None:
    message = event["message"]
    if event["alarm"] == UNREADABLE and view.judged_in_vain:
        message += f" The last: {view.judged_in_vain}."
    view.alarms[event["alarm"]] = ActiveAlarm(event["alarm"], event["since"], message)


def _alarm_over(view: RunView, event: dict[str, Any]) -> None:
    if view.alarms.pop(event["alarm"], None) is not None:
        view.news.append(f"alarm {event['alarm']} ended at iteration {event['iteration']}")


def _split_failed(view: RunView, event: dict[str, Any]) -> None:
    if view.slabs.num_failed == 1:  # it may fail each second
        view.news.append(
            f"the policy of the split failed, and GPU sets stay where they are: {event['error']}"
        )


def _late(view: RunView, event: dict[str, Any]) -> None:
    view.num_late += 1
    view.num_lost += event["lost"]


def _unreadable(view: RunView, event: dict[str, Any]) -> None:
    view.judged_in_vain = f"GenRM '{event['genrm']}', prompt {event['number']}: {event['why']}"


def _drop(view: RunView, event: dict[str, Any]) -> None:
    view.drop_reasons[cause_of(event["reason"])] += 1
    if len(view.drop_reasons) > MOST_REASONS:  # one of the rarest goes, perhaps the new one
        del view.drop_reasons[min(view.drop_reasons, key=view.drop_reasons.__getitem__)]


def _reward_kill(view: RunView, event: dict[str, Any]) -> None:
    view.num_killed += 1
    if not view.has_told_kill:
        view.has_told_kill = True
        view.news.append(
            f"{event['worker']} was killed: a reward call took more than {event['limit_s']:g} s. "
            "`yatt status` shows the number of killed calls"
        )


_FOLDS = {
    "attempt.start": _start,
    "attempt.end": _end,
    "attempt.resume": _resume,
    "phase.begin": _phase,
    "lease.grant": _grant,
    "lease.release": _release,
    "lease.expire": _expire,
    "engine.expire": _expire,
    "lease.quarantine": _quarantine,
    "node.lost": _node_lost,
    "worker.start": _worker_start,
    "worker.delay": _worker_delay,
    "worker.end": _worker_end,
    "store.wait": _store_wait,
    "judge.wait": _judge_wait,
    UNREADABLE: _unreadable,
    "rollout.group.drop": _drop,
    "ckpt.begin": _save_begins,
    "ckpt.commit": _commit,
    "ckpt.fail": _save_fails,
    "ckpt.given_up": _given_up,
    "ckpt.kept": _kept,
    "alarm.begin": _alarm,
    "alarm.end": _alarm_over,
    "split.failed": _split_failed,
    "telemetry.late": _late,
    "reward.kill": _reward_kill,
}
