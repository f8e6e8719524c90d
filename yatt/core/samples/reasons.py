"""Reasons why a completion has no score: what is the same in many of them. Pure."""

import re

MOST_CAUSE = 300
"""Longest cause, in characters."""

NO_VERDICT = "no readable verdict"
CUT = ", which was cut"
REASONING = ", beside which there was reasoning"
AFTER_THOUGHT = ", after the thought"

_PLACE = re.compile(r"\bprompt \d+(?:, sample \d+)?: ")
_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_EXAMPLE = re.compile(
    rf"(?<={NO_VERDICT})(?: about samples [\d, ]+)? in {_QUOTED}({CUT} \([^)]*\)|{REASONING})?"
    rf"(?:({AFTER_THOUGHT}) {_QUOTED}({CUT} \([^)]*\))?)?; the question was {_QUOTED}"
)


def cause_of(reason: str) -> str:
    """Returns a reason without the place, and without the question and the answer that it shows: they differ
    from completion to completion."""
    return without_examples(_PLACE.sub("", reason))[:MOST_CAUSE]


def without_examples(text: str) -> str:
    """Returns a text without the questions to GenRMs, and their answers, that it shows."""
    return _EXAMPLE.sub(lambda found: "".join(part for part in found.groups() if part), text)
