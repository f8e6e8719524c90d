"""The leader's alarms: emits events for the alarms that `yatt.core.figures.alarms` finds in the metrics.

They have no saved state. A resumed attempt reads the rows that the run has so far and reports the active
alarms again, so they are those of an uninterrupted run. Rows that are missing in ``metrics.jsonl`` can only
make an alarm begin later.
"""

from collections.abc import Iterable
from typing import Any

from yatt.config.schema import RunConfig
from yatt.config.sections.algorithm import GROUP_BASELINES
from yatt.core.figures.alarms import AlarmState, Begins, Change, Dropped, Rules, step
from yatt.obs.story.events import EventLog
from yatt.records.events.groups import AlarmBegan, AlarmEnded, DropsNoted


class Alarms:
    """Watches the rows of one attempt."""

    def __init__(self, config: RunConfig, events: EventLog) -> None:
        self._rules, self._events = alarm_rules(config), events
        self._state = AlarmState()

    def resume(self, rows: Iterable[dict[str, Any]]) -> None:
        """Reads the rows of earlier attempts, oldest first."""
        for row in rows:
            self._state, _ = step(self._state, row, self._rules)
        for begin in self._state.ringing.values():
            self._emit(begin)

    def see(self, row: dict[str, Any]) -> None:
        """Reads one complete row."""
        self._state, changes = step(self._state, row, self._rules)
        for change in changes:
            self._emit(change)

    def _emit(self, change: Change) -> None:
        match change:
            case Begins():
                self._events.emit(
                    AlarmBegan(
                        alarm=change.alarm.value,
                        iteration=change.iteration,
                        since=change.since,
                        message=change.message,
                    )
                )
            case Dropped():
                self._events.emit(DropsNoted(iteration=change.iteration, message=change.message))
            case _:
                self._events.emit(AlarmEnded(alarm=change.alarm.value, iteration=change.iteration))


def alarm_rules(config: RunConfig) -> Rules:
    """Returns the rules of a run's alarms."""
    algorithm = config.algorithm
    return Rules(
        iterations=config.logging.alarm_iterations,
        compares_groups=(
            algorithm.adv_estimator in GROUP_BASELINES and config.rollout.n > 1 and not config.is_given
        ),
        may_stop=not config.rollout.ignore_eos,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        sums_tokens=algorithm.loss_agg_mode == "seq-mean-token-sum",
        judges=tuple(genrm.name for genrm in config.genrms if genrm.weight > 0),
        checks=(
            *(reward.name for reward in config.rewards if reward.weight >= 0),
            *(genrm.name for genrm in config.genrms if genrm.weight == 0),
        ),
    )
