"""The account of a run for `status` and the report: goodput ledger and suggested interval of saves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from yatt.adapters.run_folder import ledger
from yatt.config.schema import CheckpointSection
from yatt.core.figures.goodput import OTHER, WASTED, AttemptSpan, Now, goodput_seconds, goodput_share
from yatt.core.figures.save_interval import Suggestion, measured_saves, suggested_interval
from yatt.obs.story.spans import AttemptRecord, SpanFold, attempt_spans
from yatt.obs.story.words import duration_in_words, fine_duration
from yatt.paths import RunPaths
from yatt.records.events.log import LoggedEvent


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of a run's wall time by category, and the suggested interval of saves (None: not known)."""

    seconds: dict[str, float]
    saves: Suggestion | None

    @property
    def wall_s(self) -> float:
        """Seconds since the first start."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The effective training time ratio."""
        return goodput_share(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Returns the account for `yatt status --json`; an infinite interval is None."""
        saves = self.saves
        return {
            "goodput": {"ratio": self.ratio, "wall_s": self.wall_s, "seconds": self.seconds},
            "save_interval": saves
            and {
                "suggested_s": saves.interval_s,
                "suggested_iterations": saves.iterations,
                "present_s": saves.present_s if math.isfinite(saves.present_s) else None,
                "mtbf_s": saves.mtbf_s,
                "is_assumed": saves.is_assumed,
                "is_far": saves.is_far,
                "failures": saves.measured.failures,
                "running_s": saves.measured.running_s,
                "saves": saves.measured.num_saves,
                "stall_s": saves.measured.stall_s,
                "upload_s": saves.measured.upload_s,
                "step_s": saves.measured.step_s,
            },
        }

    def in_words(self) -> str:
        """Returns the account as one line; empty if no time has passed."""
        if self.wall_s <= 0:
            return ""
        others = {name: spent_s for name, spent_s in self.seconds.items() if name != OTHER}
        largest = sorted(others, key=lambda name: (name != WASTED, -others[name]))[:5]
        parts = [f"{name} {100 * others[name] / self.wall_s:.0f}%" for name in largest if others[name] > 0]
        return f"{100 * self.ratio:.0f}% of {duration_in_words(self.wall_s)}: {', '.join(parts)}"


def account_of(attempts: Iterable[AttemptSpan], checkpoint: CheckpointSection, now: Now | None) -> Account:
    """Returns the account of a run.

    Args:
        attempts: oldest first.
        now: None if the run is over.
    """
    spans = tuple(attempts)
    saves = suggested_interval(
        measured_saves(spans, now), every=checkpoint.save_every, every_s=60 * checkpoint.save_every_minutes
    )
    return Account(goodput_seconds(spans, now), saves)


def facts_of(paths: RunPaths) -> dict[int, AttemptRecord]:
    """Returns the recorded facts of every attempt that has started, by number."""
    return {
        each.number: AttemptRecord.of(
            each.started, each.ended, ledger.record_of_attempt(paths, each.number, ledger.COMMITTED)
        )
        for each in ledger.started_attempts(paths)
    }


def saves_in_words(saves: Suggestion) -> str:
    """Returns the suggested interval and its reasons as a sentence."""
    seen, times = saves.measured, "iteration" if saves.iterations == 1 else "iterations"
    limit = "at least" if saves.is_assumed else "about"
    is_set = math.isfinite(saves.present_s)
    present = f"now it is {fine_duration(saves.present_s)}" if is_set else "now only the end is saved"
    upload = f", its upload {fine_duration(seen.upload_s)}" if seen.upload_s else ""
    count = (
        f"{seen.failures} failure{'' if seen.failures == 1 else 's'} in {duration_in_words(seen.running_s)}"
    )
    if saves.is_assumed:
        count += f", so one per {fine_duration(saves.mtbf_s)} is assumed (95% limit)"
    return (
        f"the best interval is {limit} {fine_duration(saves.interval_s)} ({saves.iterations} {times}), "
        f"{present}; a save costs {fine_duration(seen.stall_s)}{upload}; {count}"
    )


@dataclass(slots=True)
class AccountFold:
    """Collects what the account needs, event by event, so that a long log is read once."""

    folds: dict[int, SpanFold] = field(default_factory=dict)

    def take(self, logged: LoggedEvent) -> None:
        """Adds one event."""
        self.folds.setdefault(logged.attempt, SpanFold()).take(logged)

    def account(self, paths: RunPaths, checkpoint: CheckpointSection, now: Now | None) -> Account:
        """Returns the account of the run in this folder."""
        return account_of(attempt_spans(self.folds, facts_of(paths)).values(), checkpoint, now)
