"""`yatt check --ask` puts one question to a judge behind a URL. The service is a real HTTP server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile
from tests.unit.adapters.test_judge_api import KEY, Answer, Service, says
from yatt.config.load import load
from yatt.launch.checking import check_run

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


def found(tmp_path: Path, url: str, **judge: Any) -> list[tuple[str, str]]:
    """What a check of a run with this judge says of judges."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "0 plus 3 is", "answer": "3"}\n')
    genrm = {
        "name": "j", "model": "judge-1", "api": {"url": url, "key_env": "JUDGE_KEY", "body": '{"top_k": 5}'},
        "template": "Q: {prompt} T: {ground_truth} A: {completion}.", "verdict": {"pattern": "([0-9])"},
        "max_tokens": 4, **judge,
    }  # fmt: skip
    run = RunFile(
        tmp_path, {"run": {"deterministic": False}, "genrms": [genrm], "data": {"ground_truth_key": "answer"}}
    )
    results = check_run(load([run.write()], []), asks=True)
    told = [(each.level, each.says) for each in results if each.says.startswith("genrms[0]")]
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
        (says("so, let me th", "length"), "It was cut at genrms[0].max_tokens (4). Change"),
    ],
)
def test_an_answer_without_a_verdict_is_shown(tmp_path: Path, make: Make, answer: Answer, ends: str) -> None:
    ((level, told),) = found(tmp_path, make(answer).url)
    assert level == "note" and "but no verdict can be read in" in told and ends in told


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, {}, f"bad key {KEY}".encode()), "HTTP 401: bad key ***; check api.key_env"),
        ((404, {}, b"no such model"), "HTTP 404: no such model; check api.url and model"),
        ((400, {}, b"unknown field top_k"), "HTTP 400: unknown field top_k"),
        ((503, {}, b"come back later"), "HTTP 503: come back later"),
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
        "judging": "listwise",
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


def test_without_a_service_nothing_is_asked(tmp_path: Path) -> None:
    results = check_run(load([RunFile(tmp_path).write()], []), asks=True)
    assert ("skip", "no judge was asked: none has api.url") in [(each.level, each.says) for each in results]
