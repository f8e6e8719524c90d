"""The state of a run after its events: one fold for the terminal, `yatt status` and the report. Pure.

Each part keeps what belongs together and returns what it has to tell the user; events whose sentence depends
on nothing else are told by `yatt.obs.story.sentences`. Events of a stale attempt are ignored.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from yatt.core.figures.alarms import Alarm
from yatt.core.samples.reasons import cause_of
from yatt.obs.story.sentences import sentence_of
from yatt.obs.story.slabs_now import SlabsNow
from yatt.records.events import attempts, groups, processes, saves
from yatt.records.events.event import Event
from yatt.records.events.log import LoggedEvent

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
class SavesNow:
    """Checkpoints.

    Attributes:
        committed: the newest iteration with a commit in the store; 0: none.
        uploading: the iteration whose save is in flight; 0: none.
        kept: the newest iteration with a local commit that is newer than `committed`; 0: none.
        num_failed: saves in a row that failed.
        error: of the last of them.
        waits: maps each process that waits for the store to its error.
    """

    committed: int = 0
    uploading: int = 0
    kept: int = 0
    num_failed: int = 0
    error: str = ""
    waits: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Handles the begin of an attempt."""
        self.waits = {}

    def take(self, event: Event) -> str:
        """Adds one event; returns what it tells."""
        match event:
            case attempts.AttemptStarted():
                self.uploading = 0
            case attempts.AttemptResumed(iteration=iteration, is_local=is_local):
                self.kept = iteration if is_local else 0
            case processes.WorkerEnded(worker=worker):
                self.waits.pop(worker, None)
            case saves.StoreAwaited():
                return self._wait(event)
            case _:
                self._save(event)
        return ""

    def _save(self, event: Event) -> None:
        match event:
            case saves.CheckpointBegan(iteration=iteration):
                self.uploading = iteration
            case saves.CheckpointCommitted(iteration=iteration):
                self.committed, self.uploading, self.kept = iteration, 0, 0
                self.num_failed, self.error = 0, ""
            case saves.CheckpointFailed(error=error):
                self.uploading, self.num_failed, self.error = 0, self.num_failed + 1, error
            case saves.CheckpointGivenUp():
                self.uploading = 0
            case saves.CheckpointKeptLocally(iteration=iteration):
                self.uploading, self.kept = 0, iteration

    def _wait(self, event: saves.StoreAwaited) -> str:
        had_waited = bool(self.waits)
        if event.error:
            self.waits[event.who] = event.error
            return "" if had_waited else f"{event.who} waits for the checkpoint store: {event.error}"
        was_waiting = self.waits.pop(event.who, None) is not None
        return "no process waits for the checkpoint store now" if was_waiting and not self.waits else ""


@dataclass(slots=True)
class ProcessesNow:
    """Worker processes. `states` maps each worker to its state in words; `num_killed` counts reward calls
    that were killed at their time limit."""

    states: dict[str, str] = field(default_factory=dict)
    num_killed: int = 0
    _has_told_kill: bool = False
    _is_over: bool = False

    def begin(self) -> None:
        """Handles the begin of an attempt."""
        self.states, self._has_told_kill, self._is_over = {}, False, False

    def take(self, event: Event) -> str:
        """Adds one event; returns what it tells."""
        match event:
            case processes.WorkerStarted(worker=worker, pid=pid):
                self.states[processes.worker_name(worker)] = f"pid {pid}"
            case processes.WorkerDelayed(worker=worker, error=error) if self._may_start(worker):
                self.states[processes.worker_name(worker)] = DELAYED
                return f"{worker} cannot be started: {error}"
            case processes.WorkerEnded(worker=worker, how=how):
                self.states[processes.worker_name(worker)] = f"ended: {how}"
                return "" if how == "exit code 0" or self._is_over else f"{worker} ended: {how}"
            case attempts.NodeExcluded(node=node):
                its = re.compile(rf"-n{node}([rs]\d+(e\d+)?)?$")
                self.states = {name: state for name, state in self.states.items() if not its.search(name)}
            case attempts.AttemptEnded():
                self._is_over = True
            case processes.RewardCallKilled():
                return self._killed(event)
        return ""

    def _may_start(self, worker: str) -> bool:
        return self.states.get(processes.worker_name(worker)) != DELAYED

    def _killed(self, event: processes.RewardCallKilled) -> str:
        self.num_killed += 1
        has_told, self._has_told_kill = self._has_told_kill, True
        return (
            ""
            if has_told
            else (
                f"{event.worker} was killed: a reward call took more than {event.limit_s:g} s. "
                "`yatt status` shows the number of killed calls"
            )
        )


@dataclass(slots=True)
class JudgingNow:
    """Prompt groups, judges and alarms.

    Attributes:
        alarms: active ones by name.
        silent: maps each GenRM service that is waited for, and the node that waits, to the error.
        in_vain: the newest example of a GenRM's answer without a verdict.
        drop_reasons: how often each reason for a dropped group came, without the places; the first ones only.
        evaluated: of an evaluation, prompts that are done and all of them, by the GenRMs that score them
            (none: sampled) and node.
    """

    alarms: dict[str, ActiveAlarm] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    in_vain: str = ""
    drop_reasons: Counter[str] = field(default_factory=Counter)
    evaluated: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Handles the begin of an attempt."""
        self.alarms, self.silent, self.evaluated = {}, {}, {}

    def take(self, event: Event, node: int) -> str:
        """Adds one event of a node; returns what it tells."""
        match event:
            case groups.AlarmBegan(alarm=alarm, since=since, message=message):
                last = f" The last: {self.in_vain}." if self.in_vain else ""
                is_about_judges = alarm == Alarm.JUDGE_UNREADABLE.value
                self.alarms[alarm] = ActiveAlarm(alarm, since, message + (last if is_about_judges else ""))
            case groups.AlarmEnded(alarm=alarm, iteration=iteration):
                was_there = self.alarms.pop(alarm, None) is not None
                return f"alarm {alarm} ended at iteration {iteration}" if was_there else ""
            case groups.VerdictUnreadable(genrm=genrm, number=number, why=why):
                self.in_vain = f"GenRM '{genrm}', prompt {number}: {why}"
            case groups.GroupDropped(reason=reason):
                self._drop(cause_of(reason))
            case groups.PromptsEvaluated(genrms=genrms, done=done, total=total):
                self.evaluated[", ".join(genrms), node] = done, total
            case groups.JudgeAwaited() | groups.JudgeRefreshed() | groups.JudgeNotRefreshed():
                return self._judge(event, node)
        return ""

    def _judge(
        self, event: groups.JudgeAwaited | groups.JudgeRefreshed | groups.JudgeNotRefreshed, node: int
    ) -> str:
        who = f"GenRM '{event.genrm}'"
        match event:
            case groups.JudgeAwaited(error=error):
                return self._wait(f"{who} (node {node})", error)
            case groups.JudgeRefreshed(iteration=iteration, source=source):
                return f"{who} has the weights of checkpoint {source} from iteration {iteration} on"
            case groups.JudgeNotRefreshed(iteration=iteration, why=why):
                return f"{who} keeps its weights in iteration {iteration}: {why}"

    def prompts_evaluated(self) -> dict[str, list[int]]:
        """Prompts that are done and all of them, over all nodes, by the GenRMs that score them."""
        found = dict[str, list[int]]()
        for (genrms, _), (done, total) in self.evaluated.items():
            before = found.get(genrms, [0, 0])
            found[genrms] = [before[0] + done, before[1] + total]
        return found

    def why_dropped(self) -> str:
        """Returns the most frequent cause of dropped groups, and its count; empty if none is known."""
        return "".join(f"{count} of them: {reason}" for reason, count in self.drop_reasons.most_common(1))

    def _drop(self, cause: str) -> None:
        self.drop_reasons[cause] += 1
        if len(self.drop_reasons) > MOST_REASONS:  # one of the rarest goes, perhaps the new one
            del self.drop_reasons[min(self.drop_reasons, key=self.drop_reasons.__getitem__)]

    def _wait(self, who: str, error: str) -> str:
        if error:
            self.silent[who] = error
            return f"{who} is down, and is waited for: {error}"
        return f"{who} is not waited for any more" if self.silent.pop(who, None) is not None else ""


@dataclass(slots=True)
class RunStory:
    """A run after its events.

    Attributes:
        ended: how the newest attempt ended; empty: it has not.
        num_late: times that events and metrics were written late.
        num_lost: lines that were lost then.
    """

    attempt: int = 0
    phase: str = "starting"
    iteration: int = 0
    ended: str = ""
    num_late: int = 0
    num_lost: int = 0
    slabs: SlabsNow = field(default_factory=SlabsNow)
    saves: SavesNow = field(default_factory=SavesNow)
    processes: ProcessesNow = field(default_factory=ProcessesNow)
    judging: JudgingNow = field(default_factory=JudgingNow)

    def take(self, logged: LoggedEvent) -> list[str]:
        """Adds one event; returns what it tells."""
        if logged.attempt < self.attempt:
            return []
        if logged.attempt > self.attempt:
            self._begin(logged.attempt)
        return [sentence for sentence in self._told(logged) if sentence]

    def _begin(self, attempt: int) -> None:
        """Resets the state for a new attempt, whose start event may be in a deleted segment of the log."""
        self.attempt, self.phase, self.ended = attempt, "join", ""
        for part in (self.slabs, self.saves, self.processes, self.judging):
            part.begin()

    def _told(self, logged: LoggedEvent) -> Iterator[str]:
        event = logged.event
        match event:
            case attempts.PhaseBegan(phase=phase, iteration=iteration):
                # The iteration of a new attempt is 0 until it has resumed.
                self.phase, self.iteration = phase, iteration or self.saves.committed
            case attempts.AttemptEnded(exit_code=code):
                self.phase, self.ended = "ended", {0: "finished", 75: "stopped"}.get(code, "failed")
            case attempts.TelemetryLate(lost=lost):
                self.num_late, self.num_lost = self.num_late + 1, self.num_lost + lost
        yield self.slabs.take(event)
        yield self.saves.take(event)
        yield self.processes.take(event)
        yield self.judging.take(event, logged.node)
        yield sentence_of(logged)
