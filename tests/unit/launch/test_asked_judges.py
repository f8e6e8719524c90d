"""`yatt check --ask` puts one question to a judge behind a URL. The service is a real HTTP server."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.runs import RunFile
from tests.tiny_vision import make_vision_model
from tests.unit.adapters.test_judge_api import KEY, Answer, Service, says
from yatt.adapters.inputs.data_rows import prompt_text
from yatt.config.load import load_run_config
from yatt.launch.commands.checking import check_run

ROW = '{"prompt": "0 plus 3 is", "answer": "3"}'
Make = Callable[[Answer], Service]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Service] = []

    def service(answer: Answer) -> Service:
        made.append(Service(lambda _: answer))
        return made[-1]

    yield service
    for each in made:
        each.close()


def found(
    tmp_path: Path,
    *urls: str,
    row: str = ROW,
    data: dict[str, Any] | None = None,
    make_policy: Callable[[Path], str] | None = None,
    **judge: Any,
) -> list[tuple[str, str]]:
    """What a check of a run with judges at these URLs says of them."""
    (tmp_path / "train.jsonl").write_text(row + "\n")
    genrms = [
        {
            "name": f"j{number}", "model": "judge-1",
            "template": "Q: {prompt} T: {ground_truth} A: {completion}.",
            "api": {"url": url, "key_env": "JUDGE_KEY", "body": '{"top_k": 5}'},
            "verdict": {"pattern": "([0-9])"}, "max_tokens": 4, **judge,
        }
        for number, url in enumerate(urls)
    ]  # fmt: skip
    settings = {"run": {"deterministic": False}, "data": {"ground_truth_key": "answer", **(data or {})}}
    if make_policy is not None:
        settings["model"] = {"path": make_policy(tmp_path / "policy")}
    run = RunFile(tmp_path, {"genrms": genrms, **settings})
    results = check_run(load_run_config([run.write()], []), asks=True)
    told = [(each.level, each.in_words()) for each in results if each.in_words().startswith("genrms[")]
    return [each for each in told if "outage_s allow" not in each[1]]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_the_question_is_that_of_a_run_and_the_verdict_is_read(tmp_path: Path, make: Make) -> None:
    service = make(says("Good.\nScore: 7"))
    ((level, told),) = found(tmp_path, service.url)
    assert level == "call"
    assert told.startswith("genrms[0] answered in ")
    assert told.endswith(
        f"s about {tmp_path}/train.jsonl: row 1 with its ground truth: score 7 ('7'), read in "
        "'Good. Score: 7'"
    )
    ((_, body, headers),) = service.got
    assert body["messages"] == [{"role": "user", "content": "Q: 0 plus 3 is T: 3 A: 3."}]
    assert (body["model"], body["max_tokens"], body["top_k"]) == ("judge-1", 4, 5)
    assert headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (says("as good as it gets"), "'as good as it gets'. Change genrms[0].template, genrms[0].verdict or"),
        (says("Score: 7, no wait, it is", "length"), "It was cut at genrms[0].max_tokens (4). Change"),
    ],
)
def test_an_answer_without_a_verdict_is_shown(tmp_path: Path, make: Make, answer: Answer, ends: str) -> None:
    ((level, told),) = found(tmp_path, make(answer).url)
    assert level == "note" and "but a run would read no verdict in" in told and ends in told


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, {}, f"bad key {KEY}".encode()), "HTTP 401: bad key ***; check api.key_env"),
        ((404, {}, b"no such model"), "HTTP 404: no such model; check api.url and model"),
        ((400, {}, b"unknown field top_k"), "HTTP 400: unknown field top_k"),
        ((503, {}, b"come back later"), "HTTP 503: come back later"),
        ((400, {}, b'{\r\n  "error": "no"\r\n}'), 'HTTP 400: { "error": "no" }'),
    ],
)
def test_a_service_that_refuses_or_is_down_fails_the_check_at_once(
    tmp_path: Path, make: Make, answer: Answer, says: str
) -> None:
    service = make(answer)
    ((level, told),) = found(tmp_path, service.url)
    assert level == "fail" and told.startswith(f"genrms[0].api: {service.url}: ") and says in told
    assert KEY not in told and len(service.got) == 1, "one request, no retry"


def test_a_ranking_is_read_and_a_judge_of_functions_is_greeted(tmp_path: Path, make: Make) -> None:
    listwise = {
        "judging": {"by": "listwise"},
        "template": "{prompt}: {completions}",
        "verdict": {"pattern": "([0-9].*)"},
    }
    ((_, told),) = found(tmp_path, make(says("1 > 2")).url, **listwise)
    assert "ranking [1, 2], read in '1 > 2'" in told
    (tmp_path / "own.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, prompt, client, **more): return 0.0"
    )
    service, own = make(says("yes")), {"path": str(tmp_path / "own.py"), "template": "", "verdict": {}}
    ((level, told),) = found(tmp_path, service.url, **own)
    assert (level, told.partition(" s: ")[2]) == ("call", "'yes'")
    assert service.got[0][1]["messages"][0]["content"] == "Are you there? Answer yes or no."


def test_a_judge_that_sees_is_asked_with_a_small_picture(tmp_path: Path, make: Make) -> None:
    service = make(says("Score: 7"))
    ((level, told),) = found(
        tmp_path, service.url, make_policy=partial(make_vision_model, kind="qwen3_vl"), sees="prompt",
        template="{media}Q: {prompt} A: {completion}.",
    )  # fmt: skip
    assert level == "call" and "score 7" in told
    picture, text = service.got[0][1]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Q: 0 plus 3 is A: 3."}
    data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
    shown = Image.open(io.BytesIO(data))
    assert (shown.format, shown.size, shown.convert("L").getextrema()) == ("JPEG", (64, 64), (160, 160))


def test_each_judge_is_asked_whatever_becomes_of_another(tmp_path: Path, make: Make) -> None:
    """The pattern takes for ever on the answer of the second one."""
    slow = make(says("a" * 40 + "!"))
    judges = found(
        tmp_path, make((401, {}, b"no")).url, slow.url, make(says("a")).url,
        verdict={"pattern": "((?:a+)+)$", "scores": {"a": 1.0}},
    )  # fmt: skip
    assert [level for level, _ in judges] == ["fail", "fail", "call"]
    assert judges[0][1].endswith("HTTP 401: no; check api.key_env.")
    assert judges[1][1].startswith("genrms[1].verdict: reading 'aaaa") and "took longer than" in judges[1][1]
    assert "file" not in judges[1][1] and "score 1" in judges[2][1]


def test_a_chat_is_shown_as_in_a_run_and_a_row_without_truth_is_said(tmp_path: Path, make: Make) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "0 plus 3"}]
    service, row = make(says("7")), json.dumps({"prompt": chat})
    data = {"apply_chat_template": False, "ground_truth_key": ""}
    ((_, told),) = found(tmp_path, service.url, row=row, data=data, template="Q: {prompt} A: {completion}.")
    shown = prompt_text(chat)
    assert service.got[0][1]["messages"][0]["content"] == f"Q: {shown} A: ." and "system: Be brief." in shown
    assert "row 1 with an empty completion: score 7" in told


def test_without_a_service_nothing_is_asked(tmp_path: Path) -> None:
    results = check_run(load_run_config([RunFile(tmp_path).write()], []), asks=True)
    assert ("skip", "no judge was asked: none has api.url") in [
        (each.level, each.in_words()) for each in results
    ]
