"""Reads what a service behind a URL answers, in the form of OpenAI's chat completions. Pure.

Answers are data of a stranger: of any shape, and with any text. One with the log-probs of 20 alternatives at
each token is long (1.6 kB a token) and is read in the event loop, so its parts have types: that is eight
times as fast as `json.loads`, which reads what the typed decoder does not take.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from yatt.records.judged import LOGPROBS_LEFT_OUT, LOGPROBS_UNREADABLE, ListedToken, Said

MOST_ALTERNATIVES = 20
"""Likeliest tokens at each place that a service is asked for; further ones are not read."""

MOST_LOGPROB = 1e-3
"""Log-probs may be above 0 by rounding, and not by more."""

_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Logprob = float | None
"""None: minus infinity, which JSON does not have."""


class _Alternative(msgspec.Struct, gc=False):
    token: _Text
    logprob: _Logprob


class _Entry(msgspec.Struct, gc=False):
    token: _Text
    logprob: _Logprob = None
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(msgspec.Struct):
    """In the form of chat completions, `content`, or in that of completions, which some services have in
    both."""

    content: list[_Entry] | None = None
    tokens: list[_Text] | None = None
    token_logprobs: list[_Logprob] | None = None
    top_logprobs: list[dict[_Text, _Logprob] | None] | None = None


class _Choice(msgspec.Struct):
    message: Any
    finish_reason: Any = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)
_LOGPROBS = msgspec.json.Decoder(_Logprobs | None)
_MALFORMED = (ValueError, RecursionError, LookupError, TypeError, AttributeError)


def read_answer(content: bytes, *, wants_logprobs: bool = False) -> Said | None:
    """Returns the first choice of a chat completion; None if it is none."""
    try:
        choice = _first_choice(content)
        text, reason = choice.message["content"], choice.finish_reason
        has_reasoning = any(choice.message.get(key) for key in ("reasoning_content", "reasoning"))
    except _MALFORMED:
        return None
    if not isinstance(text, str | None):
        return None
    listed, lacks = _listed_tokens(choice.logprobs) if wants_logprobs else ((), "")
    return Said(
        text=(text or "").encode(errors="replace").decode(),  # without halves of characters
        finish_reason="length" if reason == "length" else "stop",
        has_reasoning=has_reasoning,
        listed=listed,
        lacks_logprobs=lacks,
    )


def _first_choice(content: bytes) -> _Choice:
    try:
        return _ANSWER.decode(content).choices[0]
    except (msgspec.DecodeError, RecursionError):  # also halves of characters, and numbers that are none
        choice = json.loads(content)["choices"][0]
    found = _Choice(choice["message"], choice.get("finish_reason"))
    if choice.get("logprobs") is not None:
        again = json.dumps(choice["logprobs"], ensure_ascii=False).replace("-Infinity", "null")
        found.logprobs = msgspec.Raw(again.encode(errors="replace"))
    return found


def _listed_tokens(raw: msgspec.Raw) -> tuple[tuple[ListedToken, ...], str]:
    """Returns the tokens of a choice with their alternatives, or why there are none."""
    try:
        found = _LOGPROBS.decode(raw)
        tokens = tuple(_tokens(found)) if found is not None else ()
    except _MALFORMED:
        return (), LOGPROBS_UNREADABLE
    if not any(len(token.alternatives) > 1 for token in tokens):
        return (), LOGPROBS_LEFT_OUT
    return tokens, ""


def _tokens(found: _Logprobs) -> Iterator[ListedToken]:
    """Raises ValueError if lists do not fit, or a log-prob is none."""
    if found.content is not None:
        for entry in found.content:
            pairs = ((each.token, each.logprob) for each in entry.top_logprobs or ())
            yield _listed_token(entry.token, entry.logprob, pairs)
        return
    texts, own = found.tokens or [], found.token_logprobs or []
    for text, logprob, top in zip(texts, own, found.top_logprobs or [None] * len(texts), strict=True):
        yield _listed_token(text, logprob, (top or {}).items())


def _listed_token(text: str, logprob: _Logprob, pairs: Iterable[tuple[str, _Logprob]]) -> ListedToken:
    alternatives: dict[str, float] = {}
    for _, (other, its_logprob) in zip(range(MOST_ALTERNATIVES), pairs, strict=False):
        value = _checked(its_logprob)
        alternatives[other] = max(value, alternatives.get(other, value))  # halves of characters look alike
    alternatives.setdefault(text, _checked(logprob))
    return ListedToken(text=text, alternatives=alternatives)


def _checked(logprob: _Logprob) -> float:
    if logprob is None:
        return -math.inf
    if logprob > MOST_LOGPROB:
        raise ValueError("no log-prob")
    return min(logprob, 0.0)


def refuses_logprobs(content: bytes) -> bool:
    """Whether an error names log-probs as what the service does not take. A service may also quote the
    request, which names them in any case: that is not looked at."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return b"logprobs" in content
    texts = _error_texts(found) if isinstance(found, dict) else ()
    return any(isinstance(text, str) and "logprobs" in text for text in texts)


def _error_texts(found: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what an error says in the forms of OpenAI, of FastAPI, and of services with a text alone."""
    error, detail = found.get("error"), found.get("detail")
    yield error
    for each in (found, error):
        if isinstance(each, dict):
            yield from (each.get("param"), each.get("message"))
    for each in detail if isinstance(detail, list) else [{"msg": detail}]:
        if isinstance(each, dict):
            yield each.get("msg")
            yield from each["loc"] if isinstance(each.get("loc"), list) else ()
