"""What a judge that learns from labels is rewarded for, on the quickstart's own rows."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

score = runpy.run_path(str(ROOT / "tools" / "agreement.py"))["compute_score"]


def test_the_rows_ask_what_the_judge_is_asked_and_know_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "tools" / "arithmetic.py"), run_name="__main__")
    examples = (tmp_path / "judge_sft.jsonl").read_text().splitlines()
    rows = (tmp_path / "judge_rl.jsonl").read_text().splitlines()
    assert len(rows) == 20_000
    for line, example_line in zip(rows, examples, strict=False):
        row, example = json.loads(line), json.loads(example_line)
        truth, shown = row["reward_model"]["ground_truth"], row["extra_info"]
        assert row["prompt"] == example["prompt"]
        assert score("judge", example["completion"], truth, shown)["score"] == 1.0, "the right answer"


@pytest.mark.parametrize(
    ("said", "label", "found"),
    [
        ("640Y.", "Y", (1, 1)),
        ("641Y.", "Y", (1, 0)),  # by chance
        ("641N.", "N", (1, 1)),
        ("640N.", "N", (1, 0)),
        ("641N.", "Y", (0, 1)),
        ("", "Y", (0, 1)),
        (".", "N", (0, 1)),
    ],
)
def test_a_verdict_counts_that_is_the_label_and_follows(
    said: str, label: str, found: tuple[int, int]
) -> None:
    got = score("judge", said, label, {"shown": "640"})
    agrees, follows = found
    assert (got["agrees"], got["follows"], got["score"]) == (agrees, follows, agrees and follows)
