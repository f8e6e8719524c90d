"""What a GenRM says, from an engine or a service."""

from collections.abc import Mapping
from dataclasses import dataclass

REFUSED = "error"
"""Finish reason of a request that cannot be answered; `error` has the reason."""

LOGPROBS_REFUSED = "refuses logprobs"
LOGPROBS_LEFT_OUT = "leaves logprobs out of its answers"
LOGPROBS_UNREADABLE = "sends logprobs that cannot be read"
"""Why a service that was asked for log-probs has given none, as the predicate of a sentence about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedToken:
    """A token of a service's answer, as text. `alternatives` are the log-probs of texts that could have stood
    in its place: its own, and the likeliest ones; at temperature 1 by most services (vLLM's server too),
    whatever was asked for. Texts of tokens need not join to the answer's: services leave out ends, and halves
    of characters have no text."""

    text: str
    alternatives: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """`finish_reason`: stop, length, abort, or `REFUSED`. `has_reasoning`: a service sent reasoning beside
    the text.

    Of an engine: `token_ids` as in `m.Completed`, and `watched`, the log-probs of watched tokens at each of
    them. Of a service that was asked for log-probs: `listed`, its tokens with alternatives, or
    `lacks_logprobs`, one of the reasons above; a text counts nevertheless.

    `thought`: text before the answer that is no part of it (`genrms[].think`), of `num_thought_tokens`
    tokens; `is_thought_cut`: at its largest length.
    """

    text: str
    finish_reason: str
    error: str = ""
    has_reasoning: bool = False
    token_ids: bytes = b""
    watched: bytes = b""
    listed: tuple[ListedToken, ...] = ()
    lacks_logprobs: str = ""
    thought: str = ""
    is_thought_cut: bool = False
    num_thought_tokens: int = 0
