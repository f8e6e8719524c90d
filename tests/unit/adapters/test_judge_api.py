"""A judge behind a URL: what a slow, failing, lying or limiting service costs. The server is a real one."""

import asyncio
import base64
import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.runs import HANG_S
from yatt.adapters.net import judge_api
from yatt.adapters.net.judge_api import SLICE_BYTES, JudgeApi, check_api, retry_after_s
from yatt.config.sections.scoring import ApiSection, GenRMSection, VerdictSection
from yatt.core.requests.answers import read_answer
from yatt.core.requests.bodies import without_quotes
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m
from yatt.records.judged import LOGPROBS_LEFT_OUT, LOGPROBS_REFUSED, LOGPROBS_UNREADABLE, REFUSED, Said

KEY = "sk-very-secret"
Answer = tuple[int, dict[str, str], bytes]


def says(text: str, reason: str = "stop") -> Answer:
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
    return 200, {}, json.dumps(body).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Service:
    """An HTTP server that answers each request by `answer(its number)`, and keeps what it got."""

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        self.got: list[tuple[float, dict[str, Any], dict[str, str]]] = []
        self.refuses: dict[str, Answer] = {}  # by the text of the message
        self.most_at_once = self._at_once = 0
        lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(service.got)
                    service.got.append((time.monotonic(), body, {**self.headers, "path": self.path}))
                    service._at_once += 1
                    service.most_at_once = max(service.most_at_once, service._at_once)
                text = body["messages"][0]["content"]
                status, headers, content = service.refuses.get(str(text)) or answer(number)
                with lock:
                    service._at_once -= 1
                if status == 0:
                    self.connection.close()
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[int], Answer]], Service]]:
    made: list[Service] = []

    def start(answer: Callable[[int], Answer]) -> Service:
        made.append(Service(answer))
        return made[-1]

    yield start
    for service in made:
        service.close()


def judge(url: str, **api: Any) -> GenRMSection:
    """A service; without `outage_s`, an outage is not waited for."""
    return GenRMSection(
        name="judge", model="big-model", template="{completion}", verdict=VerdictSection(pattern="([0-9])"),
        stop=("END",), api=ApiSection(url=url, **{"retries": 2, "outage_s": 0.0, **api}),
    )  # fmt: skip


ASK = m.Ask(genrm="judge", text="", seed=11, max_tokens=64, temperature=0.5)


def complete(
    genrm: GenRMSection, *, structure: str = "", num_nodes: int = 1, count: int = 1,
    say: Callable[[str], None] = print, wants_logprobs: bool = False,
) -> list[Said]:  # fmt: skip
    async def run() -> list[Said]:
        api, more = JudgeApi(genrm, num_nodes, say), {"wants_logprobs": wants_logprobs}
        return await asyncio.gather(
            *(api.complete(f"text {i}", ASK, structure, **more) for i in range(count))
        )

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries after own pauses wait little; what a service asks for is waited."""
    monkeypatch.setattr(judge_api.random, "uniform", lambda _low, _high: 0.01)


def test_what_is_sent_and_what_comes_back(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    service = serve(lambda _: says("score 7"))
    (said,) = complete(judge(service.url, key_env="JUDGE_KEY"))
    assert said == Said(text="score 7", finish_reason="stop")
    _, body, headers = service.got[0]
    assert headers["path"] == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "big-model", "messages": [{"role": "user", "content": "text 0"}], "max_tokens": 64,
        "temperature": 0.5, "seed": 11, "stop": ["END"],
    }  # fmt: skip


def lists(*tokens: tuple[str, float, dict[str, float]], text: str = "") -> Answer:
    """An answer with log-probs; without `text` that of its tokens."""
    content = [
        {"token": t, "logprob": own, "top_logprobs": [{"token": o, "logprob": p} for o, p in top.items()]}
        for t, own, top in tokens
    ]
    message = {"content": text or "".join(t for t, _, _ in tokens)}
    return 200, {}, json.dumps({"choices": [{"message": message, "logprobs": {"content": content}}]}).encode()


def test_log_probs_are_asked_for_where_they_are_wanted_and_come_back(serve) -> None:
    service = serve(lambda _: lists(("score ", -0.1, {"score ": -0.1}), ("7", -0.2, {"7": -0.2, "8": -2.0})))
    (said,) = complete(judge(service.url), wants_logprobs=True)
    assert (said.text, said.lacks_logprobs) == ("score 7", "")
    assert [token.text for token in said.listed] == ["score ", "7"]
    assert said.listed[1].alternatives == {"7": -0.2, "8": -2.0}
    (plain,) = complete(judge(service.url))
    assert plain == Said(text="score 7", finish_reason="stop")
    (_, asked, _), (_, not_asked, _) = service.got
    assert asked == {**not_asked, "logprobs": True, "top_logprobs": 20}


def test_fields_of_the_body_say_how_log_probs_are_asked_for(serve) -> None:
    service = serve(lambda _: says("7"))
    fields = json.dumps({"top_logprobs": 5, "logprobs": None})
    (said,) = complete(judge(service.url, body=fields), wants_logprobs=True)
    _, body, _ = service.got[0]
    assert body["top_logprobs"] == 5 and "logprobs" not in body
    assert (said.text, said.lacks_logprobs) == ("7", LOGPROBS_LEFT_OUT), "its text counts"


@pytest.mark.parametrize("status", [400, 403, 404, 422, 501])
def test_a_service_that_refuses_log_probs_is_told_by_name_and_asked_once(serve, status: int) -> None:
    body = json.dumps({"error": {"message": "not supported", "param": "logprobs"}}).encode()
    service = serve(lambda _: (status, {}, body))
    (said,) = complete(judge(service.url), wants_logprobs=True)
    assert (said.finish_reason, said.lacks_logprobs, said.text) == (REFUSED, LOGPROBS_REFUSED, "")
    assert f"HTTP {status}: " in said.error and len(service.got) == 1
    if status < 500:
        assert complete(judge(service.url))[0].lacks_logprobs == "", "they were not asked for"
        other = serve(lambda _: (status, {}, b"too long"))
        assert complete(judge(other.url), wants_logprobs=True)[0].lacks_logprobs == ""


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_service_that_is_busy_is_asked_again_whatever_it_names(serve, status: int) -> None:
    good = lists(("7", -0.2, {"7": -0.2, "8": -2.0}))
    service = serve(lambda number: good if number else (status, {}, b"no logprobs now"))
    (said,) = complete(judge(service.url), wants_logprobs=True)
    assert said.listed and len(service.got) == 2


def test_a_key_and_a_picture_are_in_no_listed_token(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    parts = [KEY[:5], KEY[5:]]
    data = base64.b64encode(random.Random(0).randbytes(90)).decode()
    for tokens, alternatives in (
        (parts, {"8": -2.0}),
        (["7"], {KEY: -2.0, "8": -3.0}),
        ([data[:50]], {"8": -1.0}),
    ):
        listed = lists(*((token, -0.1, {token: -0.1, **alternatives}) for token in tokens), text="7")
        service, said = serve(lambda _, listed=listed: listed), list[Said]()

        async def ask(url: str = service.url, said: list[Said] = said) -> None:
            async def pictures() -> list[memoryview]:
                return [memoryview(base64.b64decode(data))]

            api = JudgeApi(judge(url, key_env="JUDGE_KEY"), 1)
            said.append(await api.complete(["a", None], ASK, "", pictures, wants_logprobs=True))

        asyncio.run(ask())
        assert said == [Said(text="7", finish_reason="stop", lacks_logprobs=LOGPROBS_UNREADABLE)]


def test_an_answer_with_log_probs_may_be_longer_by_what_its_tokens_need(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_api, "MOST_BYTES", 1 << 10)
    tokens = [("seven ", -0.1, {f"{number}": -1.0 - number for number in range(20)})] * ASK.max_tokens
    service = serve(lambda _: lists(*tokens))
    (said,) = complete(judge(service.url, retries=0), wants_logprobs=True)
    assert len(said.listed) == ASK.max_tokens
    with pytest.raises(WorkerFailed, match="the answer is longer than"):
        complete(judge(service.url, retries=0))
    endless = serve(lambda _: (200, {}, b"x" * (1 << 20)))
    with pytest.raises(WorkerFailed, match="the answer is longer than"):
        complete(judge(endless.url, retries=0), wants_logprobs=True)


def ask_with(genrm: GenRMSection, files: list[bytes]) -> tuple[Said, int]:
    """Asks a service with these pictures; returns what it says, and how often they were opened."""
    opened = 0

    async def pictures() -> list[memoryview]:
        nonlocal opened
        opened += 1
        return [memoryview(file) for file in files]

    async def run() -> Said:
        question = ["\u00e9", " ", *[None for _ in files[1:]], " and", None]
        return await JudgeApi(genrm, 1).complete(question, ASK, "", pictures)

    return asyncio.run(run()), opened


@pytest.mark.parametrize(
    "size", [1, 2, 3, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES + 5]
)
def test_pictures_stand_in_the_message_as_openai_has_them(serve, size: int) -> None:
    service, files = serve(lambda _: says("score 7")), [random.Random(size).randbytes(size), b"", b"2"]
    said, _ = ask_with(judge(service.url), files)
    assert said.text == "score 7"
    _, body, headers = service.got[0]
    urls = [f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in files]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    words = {"type": "text", "text": " and"}
    content = [{"type": "text", "text": "\u00e9 "}, *pictures[:2], words, pictures[2]]
    assert body["messages"] == [{"role": "user", "content": content}]
    assert (
        body["seed"] == 11 and body["model"] == "big-model" and headers["Content-Type"] == "application/json"
    )
    assert "Transfer-Encoding" not in headers, "its length is known"


def test_each_try_opens_the_pictures_anew_so_that_none_is_held_during_an_outage(serve) -> None:
    service = serve(lambda number: (503, {}, b"") if number < 2 else says("8"))
    said, opened = ask_with(judge(service.url), [b"one"])
    assert (said.text, opened) == ("8", 3)
    assert len({json.dumps(body["messages"]) for _, body, _ in service.got}) == 1


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        (400, "if it takes no pictures, write sees: none"),
        (413, "lower api.most_bytes or media.most_per_prompt"),
        (404, "check api.url and model"),
    ],
)
def test_a_service_that_takes_no_pictures_is_told_with_the_key(serve, status: int, cure: str) -> None:
    service = serve(lambda _: (status, {}, b"image_url is not supported"))
    said, _ = ask_with(judge(service.url), [b"one"])
    assert said.finish_reason == REFUSED
    assert said.error == f"HTTP {status}: image_url is not supported; {cure}"
    (text_only,) = complete(judge(service.url))
    assert "pictures" not in text_only.error and "most_bytes" not in text_only.error


@pytest.mark.parametrize("status", [200, 400, 500])
def test_what_a_service_quotes_of_a_picture_is_in_no_message(serve, status: int) -> None:
    file = random.Random(0).randbytes(3000)
    data = base64.b64encode(file).decode()
    escaped = data.replace("/", "\\/")
    quoted = f"got data:image/jpeg;base64,{data[:40]}\u2026 or {data[100:900]} ({escaped})"
    whole = f"I see data:image/jpeg;base64,{data}. 8"
    content = says(whole)[2] if status == 200 else quoted.encode()
    service = serve(lambda _: (status, {}, content))
    try:
        said, _ = ask_with(judge(service.url), [file])
        told = said.text + said.error
    except WorkerFailed as error:
        told = str(error)
    assert all(data[at : at + 12] not in told for at in range(0, 900, 4)), told
    assert told == "I see data:image/jpeg;base64,.... 8" if status == 200 else "or ..." in told


def test_what_a_policy_wrote_in_base64_stays_in_a_verdict(serve) -> None:
    """A planted mistake: a pattern over the JSON ate the escape of a quote, and the answer was none."""
    own = base64.b64encode(random.Random(1).randbytes(300)).decode()
    verdict = f'It wrote <img src="data:image/png;base64,{own}"> and "base64,iVBO". Final: base64,8'
    service = serve(lambda _: says(verdict))
    said, _ = ask_with(judge(service.url), [random.Random(0).randbytes(3000)])
    assert said.text == verdict


def test_an_answer_of_many_quotes_is_not_looked_up_in_pictures() -> None:
    files = [memoryview(random.Random(0).randbytes(3000))]
    words = [base64.b64encode(random.Random(n).randbytes(60)).decode() for n in range(1, 90)]
    assert without_quotes(" ".join(words[:64]), files) == " ".join(words[:64])
    assert without_quotes(" ".join(words), files) == " ".join(["..."] * len(words))
    data = base64.b64encode(files[0]).decode()
    lines = "\n".join(data[at : at + 60] for at in range(0, 600, 60))
    seen = without_quotes(f"see {lines} or {data[50:150]}x", files)
    assert seen.split() == ["see", *["..."] * 10, "or", "..."]


def test_a_key_is_in_no_answer_however_json_writes_it(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-a/b+secret")
    content = json.dumps({"choices": [{"message": {"content": "your key is sk-a/b+secret"}}]})
    for status in (200, 400):
        service = serve(lambda _, status=status: (status, {}, content.replace("/", "\\/").encode()))
        (said,) = complete(judge(service.url, key_env="JUDGE_KEY"))
        assert "secret" not in said.text + said.error and "***" in said.text + said.error


def test_fields_of_the_body_are_added_replaced_and_taken_out(serve) -> None:
    service = serve(lambda _: says("score 7"))
    fields = {"max_tokens": None, "temperature": 1, "max_completion_tokens": 64, "extra": {"thinking": False}}
    complete(judge(service.url, body=json.dumps(fields)))
    assert service.got[0][1] == {
        "model": "big-model", "messages": [{"role": "user", "content": "text 0"}], "temperature": 1,
        "seed": 11, "stop": ["END"], "max_completion_tokens": 64, "extra": {"thinking": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "[1]",
        "{",
        '{"messages": []}',
        '{"stream": true}',
        "null",
        "1" * 5000,
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
    ],
)
def test_a_body_that_is_no_object_of_fields_is_refused(body: str) -> None:
    with pytest.raises(ValueError, match="body is not a JSON object"):
        ApiSection(url="https://a.example/v1", body=body)


def test_a_schema_is_sent_as_response_format(serve) -> None:
    service = serve(lambda _: says('{"score": 3}', "length"))
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    (said,) = complete(judge(service.url), structure=json.dumps({"json": schema}))
    assert said.finish_reason == "length"
    form = service.got[0][1]["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["schema"] == schema
    assert "Authorization" not in service.got[0][2]


@pytest.mark.parametrize(
    "bad",
    [
        (429, {}, b"slow down"),
        (503, {}, b""),
        (0, {}, b""),
        (200, {}, b"<html>login</html>"),
        (200, {}, b"{}"),
    ],
    ids=["429", "503", "connection closed", "a login page", "no choices"],
)
def test_a_passing_failure_is_tried_again(serve, bad: Answer) -> None:
    service = serve(lambda number: bad if number < 2 else says("8"))
    assert complete(judge(service.url))[0].text == "8"
    assert len(service.got) == 3


def test_after_the_retries_the_service_is_the_cause(serve) -> None:
    service = serve(lambda _: (500, {}, b"\xff broken \n line"))
    with pytest.raises(WorkerFailed, match=r"GenRM 'judge' did not answer \(3 tries\): HTTP 500: .*broken"):
        complete(judge(service.url))
    with pytest.raises(WorkerFailed, match="ConnectError"):
        complete(judge("http://127.0.0.1:9/v1", retries=0))


@pytest.mark.parametrize("bad", [(0, {}, b""), (503, {}, b"maintenance"), (429, {}, b"")])
def test_a_service_that_is_down_is_waited_for_and_told_once(serve, bad: Answer) -> None:
    """Longer than the retries of a request; all requests have their answers afterwards."""
    told = list[str]()
    service = serve(lambda _: says("8") if told else bad)
    said = complete(judge(service.url, retries=1, outage_s=30.0), count=8, say=told.append)
    assert [each.text for each in said] == ["8"] * 8
    assert len(told) == 2 and told[0] and told[1] == "", told


def test_an_outage_is_waited_for_within_its_limit(serve) -> None:
    service = serve(lambda _: (503, {}, b""))
    began_s = time.monotonic()
    told = list[str]()
    with pytest.raises(WorkerFailed, match=r"HTTP 503"):
        complete(judge(service.url, retries=1, outage_s=1.0), say=told.append)
    assert told[-1] == "", "nobody waits any more"
    assert time.monotonic() - began_s >= 1.0


def test_one_question_that_takes_too_long_is_no_outage(serve) -> None:
    held, told = threading.Event(), list[str]()
    service = serve(lambda _: (held.wait(HANG_S), says("8"))[1])
    with pytest.raises(WorkerFailed, match=r"no answer within api.timeout_s 0.1"):
        complete(judge(service.url, timeout_s=0.1, retries=2, outage_s=3600.0), say=told.append)
    held.set()
    assert told == []


@pytest.mark.parametrize("status", [500, 503], ids=["refused with 500", "refused as if it were down"])
def test_a_text_that_the_service_cannot_serve_fails_while_others_are_served(serve, status: int) -> None:
    service = serve(lambda _: says("8"))
    service.refuses = {"text 3": (status, {}, b"cannot")}

    async def run() -> None:
        api, over = JudgeApi(judge(service.url, retries=3, outage_s=600.0), 1, print), asyncio.Event()

        async def others() -> None:
            while not over.is_set():
                assert (await api.complete("text", ASK, "")).text == "8"
                await asyncio.sleep(0.005)

        serving = asyncio.create_task(others())
        with pytest.raises(WorkerFailed, match=f"HTTP {status}"):
            await api.complete("text 3", ASK, "")
        over.set()
        await serving

    asyncio.run(run())


def test_retry_after_holds_for_the_request_and_for_later_ones(serve) -> None:
    service = serve(lambda number: (429, {"Retry-After": "1"}, b"") if number == 0 else says("8"))
    assert complete(judge(service.url))[0].text == "8"
    assert service.got[1][0] - service.got[0][0] >= 0.95


@pytest.mark.parametrize(("status", "hint"), [(401, "check api.key_env"), (404, "check api.url"), (400, "")])
def test_a_refusal_is_told_once_and_not_repeated(
    serve, monkeypatch: pytest.MonkeyPatch, status: int, hint: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    service = serve(lambda _: (status, {}, b"no such thing"))
    (said,) = complete(judge(service.url, key_env="JUDGE_KEY"))
    assert said.finish_reason == REFUSED and f"HTTP {status}: no such thing" in said.error
    assert hint in said.error and KEY not in said.error and len(service.got) == 1


@pytest.mark.parametrize("key", ["sk-secret\n", " sk-secret", "sk-sécret", "sk secret"])
def test_a_key_that_no_header_can_have_is_refused_and_never_quoted(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    genrm = judge("http://127.0.0.1:9/v1", key_env="JUDGE_KEY", retries=0)
    for refuse in (lambda: check_api(genrm, "genrms[0].api"), lambda: JudgeApi(genrm, 1)):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert "JUDGE_KEY has a line break, a space" in str(caught.value) and "cret" not in str(caught.value)


def test_a_service_that_echoes_the_key_leaks_nothing(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    service = serve(lambda number: (401 if number else 500, {}, f"bad key {KEY}".encode()))
    (said,) = complete(judge(service.url, key_env="JUDGE_KEY"))
    assert "bad key ***" in said.error
    with pytest.raises(WorkerFailed) as caught:
        complete(judge(serve(lambda _: (500, {}, KEY.encode())).url, key_env="JUDGE_KEY", retries=0))
    assert KEY not in str(caught.value)


def test_half_a_character_is_replaced() -> None:
    content = b'{"choices": [{"message": {"content": "nice \\ud83d score: 5"}}]}'
    said = read_answer(content)
    assert said is not None and said.text == "nice ? score: 5"


@pytest.mark.parametrize("url", ["https://", "https://h:abc/v1", "http://[::1/v1", "https://user:pw@h/v1"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url has no host, a wrong port, or a user name"):
        ApiSection(url=url)


def test_more_connections_than_the_librarys_default(serve) -> None:
    are_many = threading.Event()

    def answer(number: int) -> Answer:
        if number >= 105:  # no answer yet: all of them are under way
            are_many.set()
        are_many.wait(HANG_S)
        return says("8")

    service = serve(answer)
    complete(judge(service.url, max_concurrency=130, timeout_s=60, retries=0), count=110)
    assert service.most_at_once > 105


def test_a_slow_service_costs_its_time_limit(serve) -> None:
    held = threading.Event()
    service = serve(lambda _: (held.wait(HANG_S), says("8"))[1])
    with pytest.raises(WorkerFailed, match=r"no answer within api\.timeout_s 0\.2"):
        complete(judge(service.url, timeout_s=0.2, retries=1))
    held.set()


def test_an_endless_answer_is_cut(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_api, "MOST_BYTES", 1 << 16)
    service = serve(lambda _: (200, {}, b"x" * (1 << 20)))
    with pytest.raises(WorkerFailed, match="the answer is longer than"):
        complete(judge(service.url, retries=0))


def test_a_redirect_is_not_followed(serve) -> None:
    elsewhere = serve(lambda _: says("stolen"))
    service = serve(lambda _: (302, {"Location": elsewhere.url}, b""))
    (said,) = complete(judge(service.url))
    assert said.finish_reason == REFUSED and elsewhere.got == []


def test_the_rate_is_shared_by_the_nodes_and_concurrency_is_bounded(serve) -> None:
    service = serve(lambda _: says("8"))
    complete(judge(service.url, requests_per_minute=1200), num_nodes=2, count=6)
    times = sorted(at for at, _, _ in service.got)
    assert times[-1] - times[1] >= 4 * 0.1 * 0.8, "600 a minute here: one each 0.1 s"
    slow = serve(lambda _: (time.sleep(0.05), says("8"))[1])
    complete(judge(slow.url, max_concurrency=2), count=8)
    assert slow.most_at_once == 2


def test_what_can_be_known_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"genrms\[0\].api.key_env: the environment has no JUDGE_KEY"):
        check_api(judge("http://localhost:1/v1", key_env="JUDGE_KEY"), "genrms[0].api")
    chosen = VerdictSection(choices=("1", "2"))
    with pytest.raises(ConfigError, match="the API has no choices"):
        check_api(
            GenRMSection(
                name="j", model="m", template="{completion}", verdict=chosen, api=ApiSection(url="http://h")
            ),
            "k",
        )
    with pytest.raises(ValueError, match="https only"):
        ApiSection(url="http://far.example/v1", key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match="must begin with"):
        ApiSection(url="ftp://far.example/v1")


def test_retry_after_may_be_a_date() -> None:
    assert retry_after_s("7") == 7.0
    assert retry_after_s("1000000") == judge_api.MOST_WAIT_S
    assert 25 < retry_after_s(email.utils.formatdate(time.time() + 30, usegmt=True)) <= 30
    assert retry_after_s(email.utils.formatdate(time.time() - 30)) == 0.0
    assert [retry_after_s(text) for text in ("", "soon", "-1", "٣x")] == [0.0] * 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["choices", "message", "content", "x"]), inner)
    ),
)  # fmt: skip


@given(JSON | st.builds(lambda inner: {"choices": [{"message": inner}]}, JSON))
def test_whatever_json_a_service_sends_is_text_or_nothing(value: Any) -> None:
    said = read_answer(json.dumps(value).encode())
    assert said is None or isinstance(said.text, str)


@given(st.binary())
def test_whatever_bytes_a_service_sends_are_text_or_nothing(content: bytes) -> None:
    assert read_answer(content) is None


def test_deeply_nested_json_is_nothing() -> None:
    assert read_answer(b"[" * 200_000) is None


def test_no_proxy_gets_a_key_over_plain_http(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    proxy, service = serve(lambda _: says("from the proxy")), serve(lambda _: says("score 7"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    (said,) = complete(judge(service.url, key_env="JUDGE_KEY"))
    assert said.text == "score 7" and not proxy.got


@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_part_of_a_key_is_in_an_answer_or_a_message(
    serve, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    text = "x" * (300 - len(KEY) // 2) + KEY
    answer = (*says(text)[:2], says(text)[2]) if status == 200 else (status, {}, text.encode())
    genrm = judge(serve(lambda _: answer).url, key_env="JUDGE_KEY", retries=0)
    try:
        (said,) = complete(genrm)
        told = said.text + said.error
    except WorkerFailed as error:
        told = str(error)
    assert "xxx" in told and KEY[:6] not in told
