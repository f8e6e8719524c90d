"""Reward functions that ship with yatt, with verl's signature: `path: builtin:NAME`."""

import re
from collections.abc import Callable
from typing import Any

_FINAL_ANSWER = re.compile(r"####\s*([^\n]+)")


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """1 if the last `#### answer` of the completion equals the ground truth; numbers compare by value."""
    answers = _FINAL_ANSWER.findall(solution_str)
    return float(bool(answers) and _normalised(answers[-1]) == _normalised(_last_answer(str(ground_truth))))


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """1 if the completion, without surrounding whitespace, equals the ground truth."""
    return float(solution_str.strip() == str(ground_truth).strip())


BUILTINS: dict[str, Callable[..., float]] = {"gsm8k": gsm8k, "exact": exact}


def _last_answer(ground_truth: str) -> str:
    """Extracts the final answer. GSM8K's own answer column has the whole solution; verl's has the number."""
    answers = _FINAL_ANSWER.findall(ground_truth)
    return answers[-1] if answers else ground_truth


def _normalised(answer: str) -> str:
    """Normalises an answer: `$1,234.00.` and `1234` are equal."""
    text = answer.strip().replace(",", "").replace("$", "").rstrip(".%")
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)
