"""What a GenRM says, from an engine or a service."""

from dataclasses import dataclass

REFUSED = "error"
"""Finish reason of a request that cannot be answered; `error` has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """`finish_reason`: stop, length, abort, or `REFUSED`. `has_reasoning`: a service sent reasoning beside
    the text."""

    text: str
    finish_reason: str
    error: str = ""
    has_reasoning: bool = False
