"""The leader's metrics: one row per iteration, filled in several steps and then written to the file.

A thread writes the rows. Rows that are not yet in the file are part of each checkpoint, so that a slow or
failing filesystem does not lose rows of a killed run.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from yatt import clock
from yatt.adapters.files.writer import BackgroundWriter
from yatt.control.leader.alarms import Alarms
from yatt.control.node import Node
from yatt.control.rollouts.groups.groups import is_flat
from yatt.core.figures.alarms import FLAT_GROUPS
from yatt.core.figures.efficiency import per_token_ms, update_metrics_of
from yatt.core.figures.goodput import OTHER, step_metrics
from yatt.core.phases.phases import Phase
from yatt.obs.metrics import STEP, VALIDATIONS, RowFile
from yatt.records import cluster as c
from yatt.records.usage import largest_usage

TIME_PER_STEP = "perf/time_per_step"
TIMING_NAMES = {
    Phase.ROLLOUT: "gen",
    Phase.SCORE: "reward",
    Phase.PUBLISH: "update_weights",
    Phase.SAVE: "save_checkpoint",
    Phase.VALIDATE: "testing",
}


class _IterationClock:
    """Seconds of the current iteration.

    Attributes:
        by_name: of its parts.
        is_counted: whether its row gets times: not the row of a checkpoint, since starting is no iteration's
            time.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}
        self.is_counted = True
        self._spent: dict[str, float] = {}
        self._category = OTHER
        self._began_s = self._category_began_s = clock.monotonic_s()

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds of a part."""
        self.by_name[name] = self.by_name.get(name, 0.0) + seconds

    def enter(self, category: str, now_s: float) -> None:
        """Begins time of a category of the goodput ledger, and ends that of the one before."""
        seconds = now_s - self._category_began_s
        self._spent[self._category] = self._spent.get(self._category, 0.0) + seconds
        self._category, self._category_began_s = category, now_s

    def end(self) -> dict[str, float]:
        """Ends the iteration, perhaps within a phase; returns its metrics of time, if they count."""
        now_s = clock.monotonic_s()
        self.enter(self._category, now_s)
        step_s, found = now_s - self._began_s, dict[str, float]()
        if self.is_counted:
            found = {f"timing_s/{name}": seconds for name, seconds in self.by_name.items()}
            found |= {"timing_s/step": step_s, TIME_PER_STEP: step_s, **step_metrics(self._spent, step_s)}
        self.by_name, self._spent, self._began_s = {}, {}, now_s
        return found


class MetricsRow:
    """The row of the current iteration."""

    def __init__(self, node: Node, writer: BackgroundWriter, alarms: Alarms) -> None:
        self._node, self._writer, self._alarms = node, writer, alarms
        self.values: dict[str, Any] = {STEP: 0}
        self._file: RowFile | None = None
        self._unwritten: list[dict[str, Any]] = []
        self._is_flushed = False
        self._counters: dict[str, float] = {}
        self._times = _IterationClock()

    @property
    def unwritten(self) -> tuple[dict[str, Any], ...]:
        """Complete rows that are not in the file yet, oldest first."""
        return tuple(self._unwritten)

    def resume(
        self,
        file: RowFile,
        row: dict[str, Any],
        *,
        written: Iterable[dict[str, Any]],
        unwritten: tuple[dict[str, Any], ...],
    ) -> None:
        """Resumes with the row of a checkpoint, and with the rows that its attempt had not written.

        Args:
            written: rows of the file, also later ones that it had before this resume.
        """
        self._file, self.values = file, row
        self._times.is_counted = False
        earlier_rows = {earlier[STEP]: earlier for earlier in (*written, *unwritten)}
        self._alarms.resume(earlier_rows[step] for step in sorted(earlier_rows) if step < row[STEP])
        for earlier in unwritten:
            if earlier[STEP] < row[STEP] and earlier[STEP] not in file.steps:  # `flush` writes `row` itself
                self._write(earlier)

    def count(self, counters: dict[str, float]) -> None:
        """Adds a node's counters."""
        for name, number in counters.items():
            self._counters[name] = self._counters.get(name, 0.0) + number

    def took(self, phase: Phase, seconds: float) -> None:
        """Adds an act's duration."""
        if phase is Phase.ROLLOUT and self._node.config.rollout.ahead:
            return  # see `sampled` and `waited`
        if (name := TIMING_NAMES.get(phase)) is not None:
            self._times.add(name, seconds)

    def sampled(self, seconds: float) -> None:
        """Adds the time that sampling the batch took, which with `rollout.ahead` is not that of its phase."""
        if self._node.config.rollout.ahead:
            self._times.add("gen", seconds)

    def waited(self, seconds: float) -> None:
        """Adds time for which training waited for a batch, or for the end of one."""
        if self._node.config.rollout.ahead:
            self._times.add("wait_for_samples", seconds)

    def enter(self, category: str, now_s: float) -> None:
        """Begins time of a category of the goodput ledger, and ends that of the one before."""
        self._times.enter(category, now_s)

    def fill(
        self, iteration: int, trained: list[c.TrainedNode], groups: list[c.GroupFact], update_s: float
    ) -> None:
        """Fills the iteration's row with the values that are known after training."""
        facts = [fact for group in groups for fact in group.samples]
        self.values = {STEP: iteration, **trained[0].metrics, **self._counters}
        self._is_flushed, self._times.is_counted = False, True
        self.values["rollout/groups"] = len(groups)
        if not self._node.config.is_given:
            self.values |= _sampled_metrics(groups)
        timing = self._times.by_name
        timing["update_actor"] = update_s
        for name in {name for node in trained for name in node.timing_s}:
            timing[name] = max(node.timing_s.get(name, 0.0) for node in trained)
        num_tokens = sum(fact.num_tokens for fact in facts)
        self.values["perf/total_num_tokens"] = num_tokens
        self.values |= update_metrics_of(
            largest_usage([node.usage for node in trained]),
            num_tokens=num_tokens,
            update_s=timing["update_actor"],
            num_ranks=self._node.placement.world_size,
        )
        num_sampled = sum(fact.num_completion_tokens for fact in facts)
        self.values |= per_token_ms(timing, num_sampled=num_sampled, num_tokens=num_tokens)
        self._counters = {}

    def flush(self) -> None:
        """Passes the row of the last complete iteration to the writer, once."""
        if self._is_flushed:
            return
        self._is_flushed = True
        if times := self._times.end():
            self.values |= times
            tokens = self.values.get("perf/total_num_tokens", 0)
            self.values["perf/throughput"] = tokens / times[TIME_PER_STEP] / self._node.placement.num_gpus
        if self.values[STEP] or any(key.startswith(VALIDATIONS) for key in self.values):
            self._write(dict(self.values))
            self._alarms.see(self.values)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None, "opened by BUILD, which comes first"
        self._unwritten.append(row)
        self._writer.call(partial(self._append, self._file, row))

    def _append(self, file: RowFile, row: dict[str, Any]) -> None:
        """Writes a row; runs in the writer's thread."""
        file.append(row)
        self._unwritten.remove(row)


def _sampled_metrics(groups: list[c.GroupFact]) -> dict[str, float]:
    """Metrics of groups that were sampled and scored."""
    flat = sum(is_flat([fact.reward for fact in group.samples]) for group in groups)
    found = {FLAT_GROUPS: flat / len(groups)}
    for name in sorted({name for group in groups for name in group.scores}):
        values = [group.scores[name] for group in groups if name in group.scores]
        found[f"critic/score/{name}/mean"] = sum(values) / len(values)
    ages = [age for group in groups for age in group.ages]
    return found | {"training/policy_age_mean": sum(ages) / len(ages), "training/policy_age_max": max(ages)}
