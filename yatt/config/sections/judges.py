"""How a GenRM's answer becomes a score, and judges behind URLs."""

import json
import urllib.parse
from dataclasses import dataclass, field
from typing import Annotated, Any

from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILLED,
    FINITE,
    FREE,
    LINE,
    MOST_S,
    SECONDS,
    range_between,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSection:
    """How a GenRM's text is parsed into a score: by pattern, choices or json_schema.

    Pointwise, the verdict is the score. Pairwise, it is the share of the comparison, 0 to 1, that the
    completion shown first has won. Listwise, it is the numbers of all completions, the best first.
    """

    pattern: Annotated[str, FREE] = ""
    """Regular expression; the *last* match counts, and its group 1 is the verdict."""

    choices: tuple[Annotated[str, FILLED], ...] = ()
    """The engine can only write one of these texts (vLLM's structured output)."""

    json_schema: Annotated[str, FREE] = ""
    """The engine can only write JSON of this schema, itself written as JSON (vLLM's structured output)."""

    json_key: Annotated[str, LINE] = "score"
    """Key of the verdict in that JSON."""

    scores: dict[str, Annotated[float, FINITE]] = field(default_factory=dict)
    """Maps verdicts to scores. Empty: the verdict itself is a plain decimal number."""

    minimum: Annotated[float, FINITE] = -1000.0
    """A number below this is not a valid verdict."""

    maximum: Annotated[float, FINITE] = 1000.0
    """A number above this is not a valid verdict."""

    timeout_s: Annotated[float, SECONDS] = 5.0
    """Time limit of the pattern search in one text."""

    def __post_init__(self) -> None:
        rule(self.minimum <= self.maximum, f"minimum {self.minimum:g} is above maximum {self.maximum:g}.")
        kinds = [name for name in ("pattern", "choices", "json_schema") if getattr(self, name)]
        rule(len(kinds) < 2, f"{' and '.join(kinds)} are alternatives; write one of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSection:
    """A judge behind a URL, with OpenAI's chat completions API. It needs no GPU of the run."""

    url: Annotated[str, LINE] = ""
    """Base URL, for example https://api.openai.com/v1. `model` is then the name of a model there."""

    key_env: Annotated[str, LINE] = ""
    """Environment variable that has the API key. Empty: no key is sent."""

    requests_per_minute: Annotated[int, COUNT_OR_NONE] = 0
    """Most requests a minute of the whole run; the nodes have equal shares. 0: no limit."""

    max_concurrency: Annotated[int, COUNT] = 16
    """Most requests at the same time, per node."""

    timeout_s: Annotated[float, SECONDS] = 120.0
    """Time limit of one request."""

    retries: Annotated[int, COUNT_OR_NONE] = 5
    """Retries of a request that failed for a passing reason (429, 5xx, network). The server's Retry-After is
    respected."""

    outage_s: Annotated[float, range_between(0, MOST_S)] = 900.0
    """Longest outage of the service that is waited for: while no request of a node has an answer, requests
    that have used their retries are repeated. 0: none."""

    body: Annotated[str, FREE] = ""
    """Fields of each request's body, as a JSON object: further ones, or instead of those that yatt sends
    (model, max_tokens, temperature, seed, stop, response_format); null takes one out. For example
    `{"max_completion_tokens": 512, "max_tokens": null, "reasoning_effort": "low"}`."""

    most_pixels: Annotated[int, COUNT] = 1 << 20
    """Most pixels of a picture that the service is shown (`sees`); larger ones are made smaller."""

    most_bytes: Annotated[int, range_between(1024, 64 << 20)] = 1 << 20
    """Most bytes of such a picture, a JPEG file. Its quality, then its size is lowered until it fits."""

    @property
    def body_fields(self) -> dict[str, Any]:
        """The fields of `body`."""
        found: dict[str, Any] = json.loads(self.body) if self.body else {}
        return found

    def __post_init__(self) -> None:
        rule(_is_body(self.body), "body is not a JSON object, or has messages or stream, which are yatt's.")
        rule(not self.body or bool(self.url), "body has no effect without url; write it, or remove body.")
        rule(
            not self.url or self.url.startswith(("https://", "http://")),
            "url must begin with https:// or http://.",
        )
        rule(
            bool(self.url) or not (self.key_env or self.requests_per_minute),
            "key_env and requests_per_minute have no effect without url; write it, or remove them.",
        )
        rule(
            not set(self.url) & set("?# ") and not self.url.rstrip("/").endswith("/completions"),
            "url is the beginning that /chat/completions is added to; write it without that, ? and #. A "
            "service that has only /completions is no judge.",
        )
        rule(not self.url or _is_whole(self.url), "url has no host, a wrong port, or a user name in it.")
        rule(
            not self.key_env or self.url.startswith("https://") or _is_local(self.url),
            "key_env: a key is sent over https only, or to this machine.",
        )


def _is_body(text: str) -> bool:
    try:
        found = json.loads(text) if text else {}
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # among these: half a character
        return False
    return isinstance(found, dict) and not {"messages", "stream"} & found.keys()


def _is_whole(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and parts.username is None
    except ValueError:
        return False


def _is_local(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
