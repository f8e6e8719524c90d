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
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from yatt import clock
from yatt.config.schema import GenRMSection
from yatt.core.requests.answers import MOST_ALTERNATIVES, read_answer, refuses_logprobs
from yatt.core.requests.bodies import Content as Content, message_content, without_quotes
from yatt.core.requests.outage import Outage
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m
from yatt.records.judged import LOGPROBS_REFUSED, LOGPROBS_UNREADABLE, REFUSED, Said

if TYPE_CHECKING:
    import httpx

MOST_BYTES, LISTED_BYTES, MOST_LISTED_BYTES = 4 << 20, 4096, 32 << 20
"""Longest answer that is read; what log-probs add to it for each token, and its most with them."""

MOST_WAIT_S = 300.0
"""Longest wait before a retry, whatever the service asks for."""

MISTAKES = {401: "check api.key_env", 403: "check api.key_env", 404: "check api.url and model"}
"""Status codes of mistakes in the run file."""

PASSING = frozenset({408, 409, 425, 429})
"""Status codes, beside 5xx, after which the same request may succeed."""

BUSY = frozenset({408, 429, 502, 503, 504, *range(520, 528), 529, 530})
"""Status codes of a service that is down or takes no more requests, or of a proxy before it. Another 5xx may
concern only its text."""

NOT_GIVEN = frozenset({400, 403, 404, 405, 415, 422, 501})
"""Status codes that a service without log-probs may have for a request for them."""

NOT_TAKEN = {
    400: "if it takes no pictures, write sees: none", 413: "lower api.most_bytes or media.most_per_prompt",
    415: "if it takes no pictures, write sees: none", 422: "if it takes no pictures, write sees: none",
}  # fmt: skip
"""Status codes that a question may have because of its pictures."""

OpenPictures = Callable[[], Awaitable[Sequence[memoryview]]]
"""Gives the JPEG files of a question's pictures; called for each try, so that none is held between them."""

SLICE_BYTES = 3 << 16
"""Bytes of a picture that are encoded at once: a multiple of three."""

MOST_DOUBLINGS = 6

_SHOWN_CHARACTERS = 300


def check_api(genrm: GenRMSection, key: str) -> None:
    """Checks what can be known before the run.

    Raises:
        ConfigError: the key is not in the environment, or verdict.choices, which the API does not have.
    """
    if genrm.api.key_env and not _key(genrm):
        says = f"the environment has no {genrm.api.key_env}; export it before yatt starts."
        raise ConfigError(says, key=f"{key}.key_env")
    _check_key(genrm, key)
    if genrm.verdict.choices:
        raise ConfigError("the API has no choices; write verdict.pattern or verdict.json_schema.", key=key)


def _key(genrm: GenRMSection) -> str:
    return os.environ.get(genrm.api.key_env, "") if genrm.api.key_env else ""


def _check_key(genrm: GenRMSection, key: str) -> None:
    """Refuses a key that no HTTP header can have: libraries quote the headers that they refuse."""
    if not all("!" <= letter <= "~" for letter in _key(genrm)):
        says = f"{genrm.api.key_env} has a line break, a space or a character outside of ASCII."
        raise ConfigError(says, key=f"{key}.key_env")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request: its body, with `mark` in place of each picture's bytes, and the longest answer that is
    read."""

    body: dict[str, Any]
    mark: str
    wants_logprobs: bool
    most_bytes: int


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


@dataclass(slots=True)
class _Pace:
    """Times of requests at a rate.

    Attributes:
        interval_s: least seconds between two; 0: no limit.
        next_s: earliest time of the next one.
    """

    interval_s: float
    next_s: float = 0.0

    def take(self, now_s: float) -> float:
        """Returns the time of one more request."""
        at_s = max(now_s, self.next_s)
        self.next_s = at_s + self.interval_s
        return at_s

    def pause(self, until_s: float) -> None:
        """No request before this time."""
        self.next_s = max(self.next_s, until_s)


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
        self._pace = _Pace(60 / per_minute if per_minute else 0.0)
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
        self,
        content: Content,
        ask: m.Ask,
        structure: str,
        pictures: OpenPictures | None = None,
        *,
        wants_logprobs: bool = False,
    ) -> Said:
        """Returns the service's answer to one user message.

        Args:
            structure: as in `m.SampleRequest.structure`.
            pictures: those that stand in the content.
            wants_logprobs: the answer has `listed` tokens, or `lacks_logprobs` says why it has none.

        Raises:
            WorkerFailed: there was none, after the retries.
        """
        mark = secrets.token_hex(16)
        asked = _Asked(
            body=self._body(content, mark, ask, structure, wants_logprobs=wants_logprobs),
            mark=mark,
            wants_logprobs=wants_logprobs,
            most_bytes=MOST_BYTES + min(LISTED_BYTES * ask.max_tokens, MOST_LISTED_BYTES) * wants_logprobs,
        )
        tries, begun_s = 0, list[float]()
        request = next(self._requests)
        while True:
            async with self._room:
                await self._turn()
                files = await pictures() if pictures is not None else ()
                begun_s = [*begun_s[-1:], clock.monotonic_s()]
                tried = await self._try(asked, files)
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

    def _body(
        self, content: Content, mark: str, ask: m.Ask, structure: str, *, wants_logprobs: bool
    ) -> dict[str, Any]:
        """Returns the body, with `mark` in place of each picture's bytes."""
        message = {"role": "user", "content": message_content(content, mark)}
        body: dict[str, Any] = {
            "model": self._genrm.model, "messages": [message],
            "max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.seed,
        }  # fmt: skip
        if self._genrm.stop:
            body["stop"] = list(self._genrm.stop)
        if structure:
            schema = {"name": "verdict", "schema": json.loads(structure)["json"], "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": MOST_ALTERNATIVES}
        body |= self._genrm.api.body_fields
        return {key: value for key, value in body.items() if value is not None}

    async def _turn(self) -> None:
        """Waits until the rate limit allows one more request."""
        now_s = clock.monotonic_s()
        at_s = self._pace.take(now_s)
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)

    async def _try(self, asked: "_Asked", files: Sequence[memoryview]) -> "_Tried":
        import httpx

        try:
            async with asyncio.timeout(self._genrm.api.timeout_s):
                status, headers, content = await self._post(asked, files)
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
        if status == 200:
            said = read_answer(content, wants_logprobs=asked.wants_logprobs)
            return _Tried(said=said and self._clean_said(said, files), why="the answer is no chat completion")
        return self._failed(asked, status, headers.get("retry-after", ""), content, files)

    def _failed(
        self, asked: "_Asked", status: int, retry_after: str, content: bytes, files: Sequence[memoryview]
    ) -> "_Tried":
        """What a status code other than 200 says."""
        text = content.decode(errors="replace").replace("\\/", "/")  # as JSON may have it
        why = f"HTTP {status}: {_shown(self._cleaned(text, files))}"
        if asked.wants_logprobs and status in NOT_GIVEN and refuses_logprobs(content):
            said = Said(text="", finish_reason=REFUSED, error=why, lacks_logprobs=LOGPROBS_REFUSED)
            return _Tried(said=said)
        if status in PASSING or status >= 500:
            return _Tried(why=why, wait_s=retry_after_s(retry_after), is_silent=status in BUSY)
        hints = {**(NOT_TAKEN if files else {}), **MISTAKES}
        hint = f"; {hints[status]}" if status in hints else ""
        return _Tried(said=Said(text="", finish_reason=REFUSED, error=f"{why}{hint}"))

    async def _post(self, asked: "_Asked", files: Sequence[memoryview]) -> tuple[int, "httpx.Headers", bytes]:
        """Returns status, headers and content.

        Raises:
            ValueError: the content is too long.
        """
        sent: dict[str, Any] = {"json": asked.body}
        if files:
            whole = json.dumps(asked.body, allow_nan=False, ensure_ascii=False).encode()
            pieces = whole.split(asked.mark.encode())
            size = sum(map(len, pieces)) + sum(4 * (-(-len(file) // 3)) for file in files)
            headers = {"Content-Type": "application/json", "Content-Length": str(size)}
            sent = {"content": _with_files(pieces, files), "headers": headers}
        async with self._client.stream("POST", self._url, **sent) as response:
            content = b""
            async for part in response.aiter_raw():
                content += part
                if len(content) > asked.most_bytes:
                    raise ValueError(f"the answer is longer than {asked.most_bytes >> 20} MiB")
            return response.status_code, response.headers, content

    def _clean_said(self, said: Said, files: Sequence[memoryview]) -> Said:
        """The same without the key and what is quoted of pictures. Pieces of them could be anywhere in listed
        tokens: these are left out."""
        text, whole = self._cleaned(said.text, files), "".join(token.text for token in said.listed)
        others = "\n".join(text for token in said.listed for text in token.alternatives)
        if self._cleaned(whole, files) == whole and self._without_key(others) == others:
            return replace(said, text=text)
        return replace(said, text=text, listed=(), lacks_logprobs=LOGPROBS_UNREADABLE)

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
            self._pace.pause(clock.monotonic_s() + pause_s)
        return pause_s


async def _with_files(pieces: Sequence[bytes], files: Sequence[memoryview]) -> AsyncIterator[bytes]:
    """Yields a body in slices: its pieces, with a file in base64 between each two."""
    for piece, file in zip_longest(pieces, files, fillvalue=memoryview(b"")):
        yield bytes(piece)
        for at in range(0, len(file), SLICE_BYTES):
            yield base64.b64encode(file[at : at + SLICE_BYTES])


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
