"""Reads what a user's reward function has returned."""

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from yatt.printable import printable, value_in_words

MOST_SCORE = 1e9
"""Maximum absolute score. Above it, sums of rewards and their squares may not be finite in float32."""

MOST_PRED = 1000
"""Characters of an answer that are compared."""


MOST_NAME = 100
"""Characters of a measurement's name."""


@dataclass(frozen=True, slots=True)
class Result:
    """One sample's result. `score` None: the function has none for this sample. `pred`: the answer that the
    function read in the completion, for a majority vote; empty if it does not say."""

    score: float | None
    extra: dict[str, float] = field(default_factory=dict)
    pred: str = ""


def read_one(result: Any) -> Result:
    """Reads a number, or a dict with `score`, other numbers, and verl's `pred`.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(result, dict):
        return Result(_finite(result))
    if "score" not in result:
        raise ValueError(f"its dict has no 'score' (it has: {', '.join(map(str, result))})")
    result = {name: _plain(value) for name, value in result.items()}
    extra = {
        printable(encodable_text(str(name)))[:MOST_NAME]: float(value)
        for name, value in result.items()
        if name != "score" and _is_measure(value)
    }
    return Result(_finite(result["score"]), extra, _pred(result.get("pred")))


def _plain(value: Any) -> Any:
    """Returns a scalar of numpy or torch as Python's; all else unchanged."""
    if not hasattr(value, "item") or not hasattr(value, "dtype"):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError, TypeError):  # more than one number
        return value


def _pred(value: Any) -> str:
    """Returns an answer as text; empty for None and for what is neither a text nor a number."""
    return encodable_text(str(value))[:MOST_PRED] if isinstance(value, str | int | float) else ""


def read_list(result: Any, size: int) -> list[Result]:
    """Reads one result per sample; None is allowed for samples that the function does not apply to.

    Raises:
        ValueError: it is no list of this length, or an entry is no result.
    """
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != size:
        what = "one number for one completion" if size == 1 else f"{size} numbers for {size} completions"
        raise ValueError(f"it must give a list of {what}, not {result!r:.200}")
    return [Result(None) if each is None else read_one(each) for each in result]


def encodable_text(text: str) -> str:
    """Replaces each lone surrogate (half a character) in `text` by ?, because messages are UTF-8."""
    return text.encode(errors="replace").decode()


def _is_measure(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an int larger than any float
        return False


def _finite(value: Any) -> float:
    """Converts a score to a finite float; scalars of numpy and torch are accepted."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its score is {value_in_words(value)}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"its score is {number}")
    if abs(number) > MOST_SCORE:
        raise ValueError(f"its score is {number:g}; more than {MOST_SCORE:g} is no reward")
    return number
