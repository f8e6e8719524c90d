"""A judge behind a URL, with OpenAI's chat completions API: rate limit, retries, Retry-After.

A request that fails for a passing reason (network, 429, 5xx) is repeated; while the service is down, for
`api.outage_s` (`yatt.core.requests.outage`). One that the service refuses (400, 413, 422) concerns only its
text. 401, 403 and 404 are mistakes in the run file, and are told as such. The key is read from the
environment and is in no message. Answers are data: only the text of the first choice counts.

Pictures go into the body while it is sent, from the files of the node's media process, so that a controller
never holds a body with its pictures. They are in no message either, though a service may quote them.
"""

import asyncio
import base64
import email.utils
import itertools
import json
import os
import random
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from yatt import clock
from yatt.config.schema import GenRMSection
from yatt.core.requests.outage import Outage
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m
from yatt.records.judged import REFUSED, Said

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 4 << 20
"""Longest answer that is read."""

MOST_WAIT_S = 300.0
"""Longest wait before a retry, whatever the service asks for."""

MISTAKES = {401: "check api.key_env", 403: "check api.key_env", 404: "check api.url and model"}
"""Status codes of mistakes in the run file."""

PASSING = frozenset({408, 409, 425, 429})
"""Status codes, beside 5xx, after which the same request may succeed."""

BUSY = frozenset({408, 429, 502, 503, 504, *range(520, 528), 529, 530})
"""Status codes of a service that is down or takes no more requests, or of a proxy before it. Another 5xx may
concern only its text."""

NOT_TAKEN = {
    400: "if it takes no pictures, write sees: none", 413: "lower api.most_bytes or media.most_per_prompt",
    415: "if it takes no pictures, write sees: none", 422: "if it takes no pictures, write sees: none",
}  # fmt: skip
"""Status codes that a question may have because of its pictures."""

Content = str | Sequence[str | None]
"""A question: text, or pieces of text with None in place of each picture."""

OpenPictures = Callable[[], Awaitable[Sequence[memoryview]]]
"""Gives the JPEG files of a question's pictures; called for each try, so that none is held between them."""

SLICE_BYTES = 3 << 16
"""Bytes of a picture that are encoded at once: a multiple of three."""

LEAST_QUOTE = 32
_LETTERS = re.compile(rf"[A-Za-z0-9+/]{{{LEAST_QUOTE},}}={{0,2}}")
"""What may be quoted of a picture in base64."""

MOST_QUOTES = 64
"""Quotes of an answer that are looked up in pictures; of one with more, all are taken for quotes."""

MOST_DOUBLINGS = 6

_SHOWN_CHARACTERS = 300


def check_api(genrm: GenRMSection, key: str) -> None:
    """Checks what can be known before the run.

    Raises:
        ConfigError: the key is not in the environment, or verdict.choices, which the API does not have.
    """
    if genrm.api.key_env and not _key(genrm):
        raise ConfigError(
            f"{key}.key_env: the environment has no {genrm.api.key_env}; export it before yatt starts."
        )
    _check_key(genrm, key)
    if genrm.verdict.choices:
        raise ConfigError(f"{key}: the API has no choices; write verdict.pattern or verdict.json_schema.")


def _key(genrm: GenRMSection) -> str:
    return os.environ.get(genrm.api.key_env, "") if genrm.api.key_env else ""


def _check_key(genrm: GenRMSection, key: str) -> None:
    """Refuses a key that no HTTP header can have: libraries quote the headers that they refuse."""
    if not all("!" <= letter <= "~" for letter in _key(genrm)):
        raise ConfigError(
            f"{key}.key_env: {genrm.api.key_env} has a line break, a space or a character outside of ASCII."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What came of a request.

    Attributes:
        said: the answer, or that the service refuses; None: neither, and `why` has the reason.
        wait_s: how long the service asks to wait.
        is_silent: the service itself was not heard, or takes no more requests.
        is_timeout: there was no answer in time, which may be because of the text.
    """

    said: Said | None = None
    why: str = ""
    wait_s: float = 0.0
    is_silent: bool = False
    is_timeout: bool = False


class JudgeApi:
    """Client of one service, for one node.

    Args:
        num_nodes: nodes that share the rate limit.
        say: called with the error when a service goes down, and with "" when it recovers.

    Raises:
        ConfigError: the key is one that no request can have.
    """

    def __init__(
        self, genrm: GenRMSection, num_nodes: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._genrm, api, self._say = genrm, genrm.api, say
        self._outage, self._is_waited_for = Outage(api.outage_s), False
        self._requests = itertools.count(1)
        self._url = f"{api.url.rstrip('/')}/chat/completions"
        per_minute = api.requests_per_minute / num_nodes
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._next_s = 0.0
        self._room = asyncio.Semaphore(api.max_concurrency)
        _check_key(genrm, f"genrms[{genrm.name}].api")
        self._secret = _key(genrm)
        self._client = self._make_client()

    def _make_client(self) -> "httpx.AsyncClient":
        """Reads certificates: not for an event loop."""
        import httpx

        headers = {"Accept-Encoding": "identity"}  # a compressed answer may be of any length
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        limits = httpx.Limits(max_connections=self._genrm.api.max_concurrency)
        # A proxy would read plain http, and the key in it; https goes through as a tunnel.
        is_private = self._url.startswith("https://")
        return httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=is_private)

    async def complete(
        self, content: Content, ask: m.Ask, structure: str, pictures: OpenPictures | None = None
    ) -> Said:
        """Returns the service's answer to one user message.

        Args:
            structure: as in `m.SampleRequest.structure`.
            pictures: those that stand in the content.

        Raises:
            WorkerFailed: there was none, after the retries.
        """
        mark = secrets.token_hex(16)
        body, tries, begun_s = self._body(content, mark, ask, structure), 0, list[float]()
        request = next(self._requests)
        while True:
            async with self._room:
                await self._turn()
                files = await pictures() if pictures is not None else ()
                begun_s = [*begun_s[-1:], clock.monotonic_s()]
                tried = await self._try(body, mark, files)
                del files
            self._note(tried, begun_s[-1], request)
            if tried.said is not None:
                return tried.said
            tries += 1
            if tries > self._genrm.api.retries and not self._waits(tried, begun_s[0]):
                self._end_wait()
                raise WorkerFailed(f"GenRM '{self._genrm.name}' did not answer ({tries} tries): {tried.why}")
            await asyncio.sleep(self._pause_s(tries - 1, tried.wait_s))

    def _note(self, tried: "_Tried", began_s: float, request: int) -> None:
        """Notes whether the service is up."""
        if tried.is_silent:
            self._outage.unanswered(began_s, request, is_down=not tried.is_timeout)
            return
        self._outage.answered(clock.monotonic_s())
        self._end_wait()

    def _end_wait(self) -> None:
        if self._is_waited_for:
            self._is_waited_for = False
            self._say("")

    def _waits(self, tried: "_Tried", since_s: float) -> bool:
        """Whether the request is repeated because the service is down."""
        waits = self._outage.is_waited_for(since_s, clock.monotonic_s())
        if waits and not self._is_waited_for:
            self._is_waited_for = True
            self._say(tried.why)
        return waits

    def _body(self, content: Content, mark: str, ask: m.Ask, structure: str) -> dict[str, Any]:
        """Returns the body, with `mark` in place of each picture's bytes."""
        message = {"role": "user", "content": _message_content(content, mark)}
        body: dict[str, Any] = {
            "model": self._genrm.model, "messages": [message],
            "max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.seed,
        }  # fmt: skip
        if self._genrm.stop:
            body["stop"] = list(self._genrm.stop)
        if structure:
            schema = {"name": "verdict", "schema": json.loads(structure)["json"], "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body |= self._genrm.api.body_fields
        return {key: value for key, value in body.items() if value is not None}

    async def _turn(self) -> None:
        """Waits until the rate limit allows one more request."""
        now_s = clock.monotonic_s()
        at_s = max(now_s, self._next_s)
        self._next_s = at_s + self._interval_s
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)

    async def _try(self, body: dict[str, Any], mark: str, files: Sequence[memoryview]) -> "_Tried":
        import httpx

        try:
            async with asyncio.timeout(self._genrm.api.timeout_s):
                status, headers, content = await self._post(body, mark, files)
        except TimeoutError:
            why = f"no answer within api.timeout_s {self._genrm.api.timeout_s:g}"
            return _Tried(why=why, is_silent=True, is_timeout=True)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            why = f"{type(error).__name__}; check api.url and api.key_env"  # its text may quote the key
            return _Tried(said=Said(text="", finish_reason=REFUSED, error=why))
        except (httpx.HTTPError, OSError) as error:
            # A service may end the connection before it has read a body that it refuses.
            hint = f"; if it takes no such bodies: {NOT_TAKEN[413]}" if files else ""
            why = self._without_key(f"{type(error).__name__}: {error}{hint}")
            return _Tried(why=why, is_silent=True)
        except ValueError as error:
            return _Tried(why=self._without_key(f"{type(error).__name__}: {error}"))
        return self._read(status, headers.get("retry-after", ""), content, files)

    def _read(self, status: int, retry_after: str, content: bytes, files: Sequence[memoryview]) -> "_Tried":
        """What an answer says."""
        if status == 200:
            said = read_answer(content)
            if said is None:
                return _Tried(why="the answer is no chat completion")
            return _Tried(said=replace(said, text=self._cleaned(said.text, files)))
        text = content.decode(errors="replace").replace("\\/", "/")  # as JSON may have it
        why = f"HTTP {status}: {_shown(self._cleaned(text, files))}"
        if status in PASSING or status >= 500:
            return _Tried(why=why, wait_s=retry_after_s(retry_after), is_silent=status in BUSY)
        hints = {**(NOT_TAKEN if files else {}), **MISTAKES}
        hint = f"; {hints[status]}" if status in hints else ""
        return _Tried(said=Said(text="", finish_reason=REFUSED, error=f"{why}{hint}"))

    async def _post(
        self, body: dict[str, Any], mark: str, files: Sequence[memoryview]
    ) -> tuple[int, "httpx.Headers", bytes]:
        """Returns status, headers and content.

        Raises:
            ValueError: the content is longer than `MOST_BYTES`.
        """
        sent: dict[str, Any] = {"json": body}
        if files:
            pieces = json.dumps(body, allow_nan=False, ensure_ascii=False).encode().split(mark.encode())
            size = sum(map(len, pieces)) + sum(4 * (-(-len(file) // 3)) for file in files)
            headers = {"Content-Type": "application/json", "Content-Length": str(size)}
            sent = {"content": _with_files(pieces, files), "headers": headers}
        async with self._client.stream("POST", self._url, **sent) as response:
            content = b""
            async for part in response.aiter_raw():
                content += part
                if len(content) > MOST_BYTES:
                    raise ValueError(f"the answer is longer than {MOST_BYTES >> 20} MiB")
            return response.status_code, response.headers, content

    def _cleaned(self, text: str, files: Sequence[memoryview]) -> str:
        """What a service says, without the key, and without what it quotes of pictures."""
        return self._without_key(without_quotes(text, files) if files else text)

    def _without_key(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text

    def _pause_s(self, retry: int, wait_s: float) -> float:
        """Time before the next try. What the service asks for also holds for requests that come later."""
        own_s = min(60.0, 2.0 ** min(retry, MOST_DOUBLINGS)) * random.uniform(0.5, 1.0)
        pause_s = min(MOST_WAIT_S, max(own_s, wait_s))
        if wait_s:
            self._next_s = max(self._next_s, clock.monotonic_s() + pause_s)
        return pause_s


def _message_content(content: Content, mark: str) -> str | list[dict[str, Any]]:
    """Returns the content of a message, as OpenAI's API has it."""
    if isinstance(content, str):
        return content
    picture = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{mark}"}}
    found: list[dict[str, Any]] = []
    for part in content:
        if part is None:
            found.append(picture)
        elif found and found[-1] is not picture:
            found[-1]["text"] += part  # one part: some services put a line break between parts
        else:
            found.append({"type": "text", "text": part})
    return found


async def _with_files(pieces: Sequence[bytes], files: Sequence[memoryview]) -> AsyncIterator[bytes]:
    """Yields a body in slices: its pieces, with a file in base64 between each two."""
    for piece, file in zip_longest(pieces, files, fillvalue=memoryview(b"")):
        yield bytes(piece)
        for at in range(0, len(file), SLICE_BYTES):
            yield base64.b64encode(file[at : at + SLICE_BYTES])


def without_quotes(text: str, files: Sequence[memoryview]) -> str:
    """Returns a text with "..." in place of what it quotes of these files in base64."""
    quotes = sum(1 for _ in islice(_LETTERS.finditer(text), MOST_QUOTES + 1))
    if not quotes:
        return text
    whole = [base64.b64encode(file).decode() for file in files] if quotes <= MOST_QUOTES else []

    def shown(found: re.Match[str]) -> str:
        quote = found.group().rstrip("=")
        ends = quote[:LEAST_QUOTE], quote[-LEAST_QUOTE:]
        return found.group() if whole and not any(end in each for each in whole for end in ends) else "..."

    return _LETTERS.sub(shown, text)


def read_answer(content: bytes) -> Said | None:
    """Returns the first choice of a chat completion; None if it is none."""
    try:
        choice = json.loads(content)["choices"][0]
        message = choice["message"]
        text, reason = message["content"], choice.get("finish_reason")
        has_reasoning = any(message.get(key) for key in ("reasoning_content", "reasoning"))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str | None):
        return None
    whole = (text or "").encode(errors="replace").decode()  # without halves of characters
    end = "length" if reason == "length" else "stop"
    return Said(text=whole, finish_reason=end, has_reasoning=has_reasoning)


def retry_after_s(header: str) -> float:
    """Returns the seconds of a Retry-After header, which may also be a date; 0 if there is none."""
    if header.strip().isdecimal():
        return min(MOST_WAIT_S, float(header))
    try:
        at = email.utils.parsedate_to_datetime(header)
    except (TypeError, ValueError):
        return 0.0
    return min(MOST_WAIT_S, max(0.0, at.timestamp() - time.time()))


def _shown(text: str) -> str:
    return text[:_SHOWN_CHARACTERS].replace("\n", " ")
