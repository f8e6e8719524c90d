"""`yatt judge data`: questions as a run asks them, with the verdicts that labels say."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.control.test_group_scoring import PAIR
from tests.unit.evaluation.test_judge_again import run_of
from tests.unit.evaluation.test_judge_eval import ALONE, file_of
from yatt.adapters.inputs.data_rows import data_row
from yatt.cli.judging.labelling import write_judge_data
from yatt.config.schema import DataSection
from yatt.errors import ConfigError


def written(folder: Path, source: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    from yatt.cli.main import command_parser

    out = folder / "out.jsonl"
    arguments = ["judge", "data", str(source), "--out", str(out), *words]
    parsed: argparse.Namespace = command_parser()[0].parse_args(arguments)
    assert write_judge_data(parsed) == code
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def like(folder: Path, name: str = "like", **genrm: Any) -> str:
    base = folder / name
    base.mkdir()
    run_of(base, genrms=[{"name": "judge", "model": str(base), **genrm}])
    return str(base / "run.yaml")


TEXTS = [
    {"prompt": "p", "completion": text, "label": label} for text, label in (("a", 1), ("b", 0), ("c", 0))
]


def test_labelled_completions_become_questions_with_their_words(tmp_path: Path) -> None:
    source = Path(file_of(tmp_path, TEXTS))
    rows = written(tmp_path, source, "--like", like(tmp_path, **ALONE))
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ("p: a", "YES"),
        ("p: b", "NO"),
        ("p: c", "NO"),
    ]
    for number, row in enumerate(rows):  # as the rows of a run with given completions are read
        assert data_row(row, f"row {number}", DataSection(train_files=("x",), form="completions")).given
    (tmp_path / "out.jsonl").unlink()
    balanced = written(tmp_path, source, "--like", like(tmp_path, "chat", chat=True, **ALONE), "--balanced")
    assert sorted(row["completion"] for row in balanced) == ["NO", "YES"]
    assert balanced[0]["prompt"] == [{"role": "user", "content": "p: a"}]


def test_pairs_become_questions_in_both_orders(tmp_path: Path) -> None:
    pairs = [{"prompt": "p", "chosen": "good", "rejected": "bad"}]
    rows = written(tmp_path, Path(file_of(tmp_path, pairs)), "--like", like(tmp_path, **PAIR))
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ("1:good; 2:bad; best:", "1"), ("1:bad; 2:good; best:", "2"),
    ]  # fmt: skip


def test_recorded_completions_are_labelled_by_another_score_of_the_run(tmp_path: Path) -> None:
    run_of(tmp_path)
    rows = written(tmp_path, tmp_path / "run", "--label", "exact", "--iterations", "5")
    assert len(rows) == 6 and {row["completion"] for row in rows} == {"YES"}
    assert rows[0]["prompt"] == "p0: c50.0"


def bracketed() -> dict[str, Any]:
    return {**ALONE, "verdict": {"pattern": r"\[(YES|NO)\]", "scores": {"YES": 1.0, "NO": 0.0}}}


def test_an_answer_in_which_the_run_would_read_another_verdict_is_refused(tmp_path: Path) -> None:
    source, file = Path(file_of(tmp_path, TEXTS)), like(tmp_path, **bracketed())
    with pytest.raises(ConfigError, match="a run reads no verdict in 'YES', not 1; write --answer"):
        written(tmp_path, source, "--like", file)
    rows = written(tmp_path, source, "--like", file, "--answer", "so [{word}]")
    assert rows[0]["completion"] == "so [YES]"


def mistakes(folder: Path) -> dict[str, tuple[list[str], str]]:
    source, run = file_of(folder, TEXTS), folder / "plain/run"
    like(folder, "plain", **ALONE)
    (folder / "there.jsonl").touch()
    rubric = {**ALONE, "template": "{completion}{criterion}", "judging": {
        "by": "rubric", "criteria": [{"name": "x", "text": "x"}],
    }}  # fmt: skip
    return {
        "no run file": ([source], "write --like RUN_FILE"),
        "a file that is there": ([source, "--out", str(folder / "there.jsonl")], "exists already"),
        "no word": ([source, "--answer", "YES"], "write {word} where the verdict stands"),
        "a rubric": ([source, "--like", like(folder, **rubric)], "is rubric: no label says"),
        "no label": ([str(run)], "write --label SCORE, the score that says what is right"),
        "the judge itself": ([str(run), "--label", "judge"], "is no other score of the run"),
    }


@pytest.mark.parametrize(
    "mistake", ["no run file", "a file that is there", "no word", "a rubric", "no label", "the judge itself"]
)
def test_a_mistake_is_told_and_nothing_is_written(tmp_path: Path, mistake: str) -> None:
    words, says = mistakes(tmp_path)[mistake]
    with pytest.raises(ConfigError) as raised:
        written(tmp_path, Path(words[0]), *words[1:])
    assert says in str(raised.value) and not (tmp_path / "out.jsonl").exists()


def test_ties_without_a_word_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {"pattern": "^([12])$", "scores": {"1": 1.0, "2": 0.0}}
    run_of(tmp_path, genrms=[{"name": "judge", "model": str(tmp_path), **PAIR, "verdict": verdict}])
    assert written(tmp_path, tmp_path / "run", "--label", "exact", code=1) == []
    assert "questions are ties, for which there is no word" in capsys.readouterr().err
