"""The result of an evaluation: numbers by source, the table, the files."""

import json
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from yatt.control.leader.evaluation_work import write_result
from yatt.control.rollouts.scoring.scoring import NOT_APPLICABLE
from yatt.core.figures.evaluation import EvalRequest, EvalResult, EvaluatedSample, encoded_result, result_of
from yatt.errors import ConfigError
from yatt.evaluation.request import BareModel, EvalOptions, bare_config, evaluation_settings
from yatt.evaluation.result import copy_result, result_table


def sample(prompt: int, index: int, source: str = "s", **values: object) -> EvaluatedSample:
    filled = {
        "prompt": "p", "ground_truth": "", "completion": "c", "finish_reason": "stop", "num_tokens": 4,
        "scores": {}, "no_score": {}, "extras": {}, "verdicts": {}, **values,
    }  # fmt: skip
    return EvaluatedSample(prompt_number=prompt, sample_number=index, data_source=source, **filled)  # type: ignore[arg-type]


def request(out: Path = Path("/out"), model: str = "m") -> EvalRequest:
    bare = BareModel(rewards=("builtin:exact", "builtin:gsm8k"))
    options = EvalOptions(data=("/d.jsonl",), n=2)
    base = bare_config(Path("/m"), bare, options.data)
    return evaluation_settings(base, options, (), Path("/m"), 0).request(model, None, out)


SAMPLES = [
    sample(0, 0, "math", scores={"exact": 1.0, "gsm8k": 1.0}),
    sample(0, 1, "math", scores={"exact": 0.0}, no_score={"gsm8k": "it crashed"}, finish_reason="length",
           num_tokens=8),
    sample(1, 0, "math", scores={"exact": 0.0}, no_score={"gsm8k": NOT_APPLICABLE}),
    sample(1, 1, "math", failed="too long", finish_reason=""),
    sample(2, 0, "code", scores={"exact": 1.0, "gsm8k": 0.0}),
    sample(2, 1, "code", scores={"exact": 1.0, "gsm8k": 0.0}),
]  # fmt: skip


def found() -> EvalResult:
    return result_of(request(), SAMPLES, 3)


def test_means_failures_and_pass_rates_are_those_of_their_source() -> None:
    result = found()
    math = result.sources["math"].rewards
    assert math["exact"].mean == pytest.approx(1 / 3) and math["exact"].scored == 3
    assert (math["exact"].failed, math["exact"].not_applicable) == (1, 0)
    assert (math["gsm8k"].failed, math["gsm8k"].not_applicable) == (2, 1)
    assert math["exact"].pass_at["1"].mean == pytest.approx((0.5 + 0.0) / 2)
    assert math["exact"].pass_at["2"].mean == pytest.approx(1.0), "only prompt 0 has two scores"
    assert math["exact"].pass_at["2"].prompts == 1
    assert result.sources["code"].rewards["exact"].pass_at["2"].mean == 1.0
    assert result.overall.rewards["exact"].mean == pytest.approx(3 / 5)


def test_lengths_are_those_of_completions_that_exist() -> None:
    math = found().sources["math"]
    assert (math.prompts, math.samples, math.failed) == (2, 4, 1)
    assert math.truncated == pytest.approx(1 / 3) and math.mean_tokens == pytest.approx(16 / 3)


def test_the_table_fits_into_80_columns_and_names_every_source_and_reward() -> None:
    lines = result_table(found())
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines[1:7]] == [
        ["code", "exact"], ["code", "gsm8k"], ["math", "exact"], ["math", "gsm8k"],
        ["overall", "exact"], ["overall", "gsm8k"],
    ]  # fmt: skip
    assert lines[3].split() == ["math", "exact", "0.3333", "0.2222", "1", "0.2500", "1.0000"]
    assert lines[-2].split() == ["math", "2", "4", "1", "0.3333", "5.3"]


def test_long_names_are_cut_and_numbers_are_not() -> None:
    long = [sample(0, i, "openai/gsm8k/main/test/of/2021/and/later", scores={"exact": 1.0}) for i in (0, 1)]
    lines = result_table(result_of(request(), long, 0))
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("openai/gsm8k") and "~" in lines[1]
    assert lines[1].split()[2] == "1.0000"


def test_a_single_source_has_no_second_row_with_the_same_numbers() -> None:
    lines = result_table(result_of(request(), SAMPLES[4:], 0))
    assert not any(line.startswith("overall") for line in lines)


def test_nothing_scored_is_shown_as_nothing_not_as_zero() -> None:
    lost = [sample(0, i, failed="engine") for i in (0, 1)]
    result = result_of(request(), lost, 0)
    assert result.overall.rewards["exact"].mean is None
    assert result_table(result)[1].split() == ["s", "exact", "-", "-", "2", "-", "-"]


def written(
    folder: Path, samples: Sequence[EvaluatedSample] = SAMPLES, model: str = "m", nodes: int = 1
) -> Path:
    """What the leader makes of the files of so many nodes, which have every so many prompts."""
    (folder / "nodes").mkdir(exist_ok=True)
    (folder / "nodes/evaluation.json").write_bytes(msgspec.json.encode(request(folder / "out", model)))
    files = [folder / f"nodes/{index}" for index in range(nodes)]
    for index, path in enumerate(files):
        mine = [each for each in samples if each.prompt_number % nodes == index]
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in mine))
    write_result(folder / "nodes/evaluation.json", files, 3)
    return folder / "out"


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_files_have_every_sample_and_the_result_as_printed(tmp_path: Path, nodes: int) -> None:
    out = written(tmp_path, nodes=nodes)
    lines = (out / "samples.jsonl").read_bytes().splitlines()
    assert lines == [msgspec.json.encode(each) for each in SAMPLES]
    assert json.loads((out / "result.json").read_text()) == json.loads(encoded_result(found()))


def test_a_folder_with_an_earlier_result_is_not_touched(tmp_path: Path) -> None:
    """It may be that of an attempt that ended before it could say that it has finished."""
    out = written(tmp_path)
    assert written(tmp_path, SAMPLES[:1]) == out
    with pytest.raises(ConfigError, match="exists already and is not an empty folder"):
        written(tmp_path, SAMPLES[:1], model="another")
    assert len((out / "samples.jsonl").read_text().splitlines()) == len(SAMPLES)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_full_disk_leaves_no_half_folder(tmp_path: Path, is_copy: bool) -> None:
    write: Callable[[], object] = lambda: written(tmp_path)  # noqa: E731
    if is_copy:
        (tmp_path / "there").mkdir()
        there = written(tmp_path / "there")
        write = lambda: copy_result(there, tmp_path / "out")  # noqa: E731
    with limited_files(64 if is_copy else 1000), pytest.raises(OSError, match="File too large"):
        write()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"there"} if is_copy else {"nodes"})


@contextmanager
def limited_files(most_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
