"""Calls reward functions and the environment on a few rows before a run starts or is queued.

A function that fails on every row would cost a queue wait and the first iteration; one that gives an empty
text what it gives the truth trains nothing.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yatt.adapters.processes.trial import TrialProcess, trial_process
from yatt.config.load import resolved_text
from yatt.config.schema import RunConfig
from yatt.core.attempts.exits import describe_exit
from yatt.errors import ConfigError, Finding, cut_line
from yatt.printable import printable
from yatt.records.episode import ENVIRONMENT
from yatt.reward.tried import CALLS, TriedCall, tried_keys

CALL_S = 20.0
"""Longest wait for a call, and for the process to begin the first one."""

LOOK_S = 0.1
KINDS = ("truth", "empty")


@dataclass(frozen=True, slots=True)
class TriedFunction:
    """What one function has given."""

    key: str
    calls: tuple[TriedCall, ...]

    @property
    def failed(self) -> tuple[TriedCall, ...]:
        """Samples without a result."""
        return tuple(call for call in self.calls if call.error)

    @property
    def is_broken(self) -> bool:
        """Whether every sample failed, by an error that would come again for any completion, anywhere."""
        return bool(self.calls) and all(call.error and call.is_mistake for call in self.calls)

    def in_words(self) -> str:
        """Returns one line with its results."""
        words = []
        for shown in KINDS:
            if found := [_result(self.key, call) for call in self.calls if call.shown == shown]:
                words.append(f"{'ground truth' if shown == 'truth' else 'empty text'}: {' '.join(found)}")
        return f"{self.key}: {'; '.join(words)}{self._doubt()}"

    def failures(self) -> Finding:
        """Returns how many samples failed, and the first failure."""
        first = self.failed[0]
        if not first.shown:
            return Finding(key=self.key, says=f"was not tried: {first.error}", has_colon=False)
        what = "the ground truth" if first.shown == "truth" else "an empty text"
        count = f"all {len(self.calls)}" if len(self.failed) == len(self.calls) else str(len(self.failed))
        of = "" if count.startswith("all") else f" of {len(self.calls)}"
        says = f"{count}{of} trial calls failed; the first, with {what} as completion of {first.place}"
        return Finding(key=self.key, says=f"{says}: {first.error}")

    def mistake(self) -> Finding:
        """Returns that every sample failed."""
        found = self.failures()
        cure = f"Mend the function or the rows; {self.key}.trial: false starts without a trial."
        return replace(found, says=f"{found.says}.", cure=cure)

    def _doubt(self) -> str:
        """What is odd in the scores."""
        means = []
        for shown in KINDS:
            scores = [call.score for call in self.calls if call.shown == shown and call.score is not None]
            means.append(sum(scores) / len(scores) if scores else None)
        truth, empty = means
        if truth is None or empty is None or truth > empty:
            return ""
        return (
            " (the ground truth scores no higher than an empty text: is data.ground_truth_key right, or does "
            "the function want another form?)"
        )


def _result(key: str, call: TriedCall) -> str:
    if call.error:
        return "failed"
    if key == ENVIRONMENT:
        return "ends" if call.answer is None else "answers"
    return "-" if call.score is None else f"{call.score:.3g}"


def try_scores(config: RunConfig) -> list[TriedFunction]:
    """Calls each function whose `trial` is true; writes a note about each that fails on some rows.

    Returns:
        The functions that were called.

    Raises:
        ConfigError: one fails at every call by an error that comes for any completion.
    """
    calls = _calls(config)
    keys = dict.fromkeys(call.function for call in calls)
    tried = [TriedFunction(key, tuple(call for call in calls if call.function == key)) for key in keys]
    if broken := [each for each in tried if each.is_broken]:
        raise ConfigError(findings=[each.mistake() for each in broken])
    for each in tried:
        if each.failed:
            sys.stderr.write(f"yatt: note: {printable(cut_line(each.failures().in_words()))}\n")
    return tried


def _calls(config: RunConfig) -> list[TriedCall]:
    """Calls the functions; after a call that has ended its process, the later ones in another process."""
    keys, calls = tried_keys(config), []
    without: list[str] = []
    while len(without) < len(keys):
        with trial_process("yatt.reward.tried_calls", [resolved_text(config), without]) as trial:
            how = _wait(trial)
            found, open_call = _read(trial.folder / CALLS)
            calls += found
            if trial.found.exists():
                break
            if open_call is None:
                sys.stderr.write(f"yatt: note: functions were not tried: {how or 'no call began in time'}\n")
                break
            calls.append(_ended(open_call, how, trial))
        without = keys[: keys.index(open_call["begins"]) + 1]
    return calls


def _wait(trial: TrialProcess) -> str:
    """Waits for the end of the process, or ends it if a call takes too long; returns how it ended."""
    size, since_s = -1, time.monotonic()
    while True:
        try:
            return describe_exit(trial.process.wait(LOOK_S))
        except subprocess.TimeoutExpired:
            file = trial.folder / CALLS
            now = file.stat().st_size if file.exists() else 0
        if now != size:
            size, since_s = now, time.monotonic()
        if time.monotonic() - since_s > CALL_S:
            trial.end()
            return ""


def _read(file: Path) -> tuple[list[TriedCall], dict[str, Any] | None]:
    """Returns the results, and the call that has begun and has none."""
    calls: list[TriedCall] = []
    open_call: dict[str, Any] | None = None
    for line in file.read_text().splitlines() if file.exists() else ():
        content = json.loads(line)
        if "begins" in content:
            open_call = content
        else:
            calls.append(TriedCall(**content))
            open_call = None
    return calls, open_call


def _ended(call: dict[str, Any], how: str, trial: TrialProcess) -> TriedCall:
    """The result of a call that ended its process, or was ended with it."""
    says = (
        f"the call ended its process ({how}){trial.last_words()}" if how else f"no answer within {CALL_S:g} s"
    )
    return TriedCall(function=call["begins"], shown=call["shown"], place=call["place"], error=says)
