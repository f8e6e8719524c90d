"""`yatt judge data`: questions as a run asks them, with the verdicts that labels say."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.control.test_group_scoring import PAIR
from tests.unit.evaluation.test_judge_again import run_of, sample
from tests.unit.evaluation.test_judge_eval import ALONE, file_of
from yatt.adapters.inputs.data_rows import data_row
from yatt.cli.judging.labelling import write_judge_data
from yatt.config.schema import DataSection
from yatt.errors import ConfigError
from yatt.obs.rollouts import HEAD, compressed_file
from yatt.paths import RunPaths


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


def test_a_pair_gives_a_judge_of_completions_its_better_and_its_worse_word(tmp_path: Path) -> None:
    source = Path(file_of(tmp_path, [{"prompt": "p", "chosen": "good", "rejected": "bad"}]))
    scores = {"FINE": 7.0, "POOR": -2.0}
    genrm = {**ALONE, "verdict": {"pattern": "(FINE|POOR)", "scores": scores}}
    rows = written(tmp_path, source, "--like", like(tmp_path, **genrm))
    assert [(row["prompt"], row["completion"]) for row in rows] == [("p: good", "FINE"), ("p: bad", "POOR")]


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        ({"pattern": "([0-9]+)"}, "row 1: genrms[judge] is asked about one completion, and its verdict is a"),
        ({"pattern": "(A|B|C)", "scores": {"A": 1.0, "B": 0.5, "C": 0.0}}, "its verdict has 3 scores"),
    ],
)
def test_a_pair_says_no_place_on_a_scale(tmp_path: Path, verdict: dict[str, Any], says: str) -> None:
    source = Path(file_of(tmp_path, [{"prompt": "p", "chosen": "good", "rejected": "bad"}]))
    with pytest.raises(ConfigError) as raised:
        written(tmp_path, source, "--like", like(tmp_path, **{**ALONE, "verdict": verdict}))
    assert says in str(raised.value) and raised.value.findings[0].key == "genrms[0].verdict.scores"


def test_numbers_are_taught_with_all_their_digits(tmp_path: Path) -> None:
    labels = (1234567.25, 12345678, 0.123456789)
    rows = [{"prompt": "p", "completion": "c", "label": label} for label in labels]
    number = {**ALONE, "verdict": {"pattern": "^([0-9.]+)$", "maximum": 1e9}}
    found = written(tmp_path, Path(file_of(tmp_path, rows)), "--like", like(tmp_path, **number))
    assert [row["completion"] for row in found] == ["1234567.25", "12345678", "0.123456789"]


def test_a_label_between_the_words_of_a_judge_of_completions_is_no_tie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": label} for label in (0, 0.5, 1)]
    found = written(tmp_path, Path(file_of(tmp_path, rows)), "--like", like(tmp_path, **ALONE))
    assert len(found) == 2 and "1 questions have a label that no verdict is" in capsys.readouterr().err


@pytest.mark.parametrize("way", [ALONE, PAIR], ids=["pointwise", "pairwise"])
def test_a_completion_without_the_score_costs_its_own_questions_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: dict[str, Any]
) -> None:
    run_of(tmp_path, genrms=[{"name": "judge", "model": str(tmp_path), **way}])
    lines = [{"kind": HEAD, "attempt": 1, "num_nodes": 1}, *(sample(4, 0, index) for index in range(3))]
    lines[2]["scores"]["exact"] = None
    lines[3]["scores"]["exact"] = 0.0
    lines += [{**sample(4, 1, 0), "num_tokens": "many"}]
    path = RunPaths(tmp_path / "run").rollout_file(4, 0)
    path.write_bytes(b"".join(compressed_file(lines)))
    rows = written(tmp_path, tmp_path / "run", "--label", "exact", "--iterations", "4")
    shown = [(row["prompt"], row["completion"]) for row in rows]
    if way is ALONE:
        assert shown == [("p0: c40.0", "YES"), ("p0: c40.2", "NO")]
    else:
        assert shown == [("1:c40.0; 2:c40.2; best:", "1"), ("1:c40.2; 2:c40.0; best:", "2")]
    said = capsys.readouterr().err
    assert f"{1 if way is ALONE else 4} questions are about completions without this score" in said


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
    truth = {**PAIR, "judging": {"by": "pairwise", "pairs": "ground_truth"}}
    return {
        "no run file": ([source], "write --like RUN_FILE"),
        "a file that is there": ([source, "--out", str(folder / "there.jsonl")], "exists already"),
        "no word": ([source, "--answer", "YES"], "write {word} where the verdict stands"),
        "a rubric": ([source, "--like", like(folder, **rubric)], "is rubric: no label says"),
        "a thought": (
            [source, "--like", like(folder, "think", think={"budget": 9}, **ALONE)],
            "think.budget",
        ),
        "a folder that is not there": ([source, "--out", str(folder / "no/x.jsonl")], "there is no folder"),
        "a folder that is a file": ([source, "--out", f"{source}/x"], "there is no folder"),
        "the ground truth as another one": (
            [str(Path(like(folder, "truth", **truth)).parent / "run"), "--label", "exact"],
            "genrms[0].judging.pairs: genrms[judge] compares each completion with the ground truth",
        ),
        "no label": ([str(run)], "write --label SCORE, the score that says what is right"),
        "the judge itself": ([str(run), "--label", "judge"], "is no other score of the run"),
    }


MISTAKES = (
    "no run file",
    "a file that is there",
    "no word",
    "a rubric",
    "no label",
    "the judge itself",
    "a thought",
    "a folder that is not there",
    "a folder that is a file",
    "the ground truth as another one",
)


@pytest.mark.parametrize("mistake", MISTAKES)
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
