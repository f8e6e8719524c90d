"""Facts about a key, declared beside it: its values, which the loader checks, and whether it may change.

    lr: Annotated[float, between(0, 1)]
    dir: Annotated[str, LINE]
    save_every: Annotated[int, COUNT, OPERATIONAL]

Every number of the run file, the site file and the SFT file has a `Range`, and every text a `Text`. Rules
between keys are elsewhere: in a section's ``__post_init__``, or in `yatt.config.check`.
"""

import math
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Literal

MOST = 2**31 - 1
"""Largest count that every library accepts."""

_BREAKS = ("Cc", "Zl", "Zp")
"""Unicode categories: control characters, line separators, paragraph separators."""

MOST_BYTES = 2**50
MOST_S = 10 * 365 * 86400.0
"""Longest time; ten years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers from `low` to `high`, and `also`, an extra value with a special meaning.

    Attributes:
        low_open: `low` itself is not allowed.
        high_open: `high` itself is not allowed.
        also_means: the meaning of `also`, for messages.
    """

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    also: float | None = None
    also_means: str = ""

    def __contains__(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.also is not None and value == self.also:
            return True
        above_low = self.low < value if self.low_open else self.low <= value
        below_high = value < self.high if self.high_open else value <= self.high
        return above_low and below_high

    def __str__(self) -> str:
        low, high = _number(self.low), _number(self.high)
        if self.high >= MOST:
            shown = f"above {low}" if self.low_open else f"{low} or more"
        elif not self.low_open and not self.high_open:
            shown = f"{low} to {high}"
        else:
            lower = f"above {low}" if self.low_open else f"{low} or more"
            shown = f"{lower} and {'below' if self.high_open else 'at most'} {high}"
        return shown if self.also is None else f"{_number(self.also)} ({self.also_means}), or {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text without NUL and lone surrogates, and optionally with more rules.

    Attributes:
        is_line: forbids newlines and other control characters.
        without: forbidden characters.
        is_filled: forbids the empty text.
    """

    is_line: bool = False
    without: str = ""
    is_filled: bool = False

    def fault(self, value: str) -> str:
        """Returns the rule that `value` breaks, as the end of a sentence; empty if it is valid."""
        if self.is_filled and not value:
            return "is empty; delete it, or write what it is for"
        if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            return "contains a lone surrogate, which is not valid text; delete it"
        if "\0" in value:
            return "contains a NUL character; delete it"
        if self.is_line and any(unicodedata.category(c) in _BREAKS for c in value):
            return "contains a line break or another control character; delete it"
        for forbidden in self.without:
            if forbidden in value:
                return f"contains '{forbidden}', which Slurm replaces in file names; remove it"
        return ""


def at_least(low: float, *, most: float = MOST) -> Range:
    """Returns the range of `low` or more."""
    return Range(low=low, high=most)


def range_above(low: float, *, most: float = MOST) -> Range:
    """Returns the range above `low`."""
    return Range(low=low, high=most, low_open=True)


def range_between(low: float, high: float) -> Range:
    """Returns the range from `low` to `high`, both included."""
    return Range(low=low, high=high)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e18 else f"{value:g}"


Kind = Literal["operational", "layout", "mathematical"]


@dataclass(frozen=True, slots=True)
class Changing:
    """Whether a resumed run may have another value of a key, or of the keys of a section. A key without it is
    *mathematical*: it decides what is trained, or which run it is.

    Attributes:
        kind: *operational* keys do not affect what is trained: limits of time, saves, logs, the number of
            iterations. *Layout* keys change only in which order numbers are added, where, and with how much
            memory; with `run.deterministic` they may not change, because a resumed run would no longer be
            bit-equal.
        is_size: of an engine's memory or speed: samples differ in their rounding only.
    """

    kind: Kind
    is_size: bool = False


OPERATIONAL, LAYOUT, ENGINE_SIZE = Changing("operational"), Changing("layout"), Changing("layout", True)

COUNT = at_least(1)
COUNT_OR_NONE = at_least(0)
SECONDS = range_above(0, most=MOST_S)
SIZE_BYTES = at_least(0, most=MOST_BYTES)
FINITE = range_between(-1e9, 1e9)
"""Any finite number that float32 arithmetic on rewards and losses can hold."""

SEED = range_between(0, 2**63 - 1)
SHARE = Range(low=0.0, high=1.0, low_open=True)
LINE = Text(is_line=True)
FREE = Text()
FILLED = Text(is_filled=True)
FILE = Text(is_line=True, without="%\\")
"""A path that becomes part of a batch script and of file names that Slurm expands."""
BETA = Range(low=0.0, high=1.0, high_open=True)
"""Decay of a running mean; below 1."""

Free = Annotated[str, FREE] | int | Annotated[float, FINITE] | bool
"""A value that is passed on to other libraries."""

EngineValue = Free | tuple[Free, ...] | dict[str, Free | tuple[Free, ...]]
"""An option of an engine's library."""
