"""docs/metrics.md is true: it names what runs write; and the numbers agree with the recorded samples."""

import itertools
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.integration.test_recorded_rollouts import recorded, recording
from tests.runs import ROOT, rows, yatt
from yatt.obs.metrics import STEP

pytestmark = pytest.mark.slow
ALWAYS, SOMETIMES = (
    part.partition("|---|")[2] for part in (ROOT / "docs" / "metrics.md").read_text().split("| metric |")[1:]
)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = sum(c in "abcdefghijklm" for c in solution_str) / 8
    return {"score": score, "pred": solution_str[:1], "length": len(solution_str)}
"""


def names(table: str) -> list[str]:
    """Every name of a table's first column, with the alternatives in braces written out."""
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    found = []
    for name in itertools.chain.from_iterable(re.findall(r"`([^`]+)`", cell) for cell in cells):
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        found += ["".join(chosen) for chosen in itertools.product(*parts)]
    return found


def matches(name: str, key: str) -> bool:
    """Whether the page's name, with its words in uppercase, is a name for the key."""
    pattern = re.sub(r"\\?[A-Z]+", ".+", re.escape(name))
    return re.fullmatch(pattern, key) is not None


def test_the_page_names_what_a_run_writes_and_the_numbers_are_those_of_its_samples(tmp_path: Path) -> None:
    run = recording(
        tmp_path,
        trainer={"total_iterations": 3, "train_batch_size": 32},
        validation={"reward": "digits", "every": 1, "n": 4, "max_prompts": 3},
        data={"val_files": [str(tmp_path / "train.jsonl")]},
        algorithm={"kl_in": "loss", "kl_coef": 0.01},
    )
    (tmp_path / "reward.py").write_text(REWARD)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    first, *written = rows(run.run_dir / "metrics.jsonl")
    assert [row[STEP] for row in (first, *written)] == [0, 1, 2, 3]
    assert [row["training/epoch"] for row in written] == [0, 0, 1]
    for row in written:
        check_names(row)
        check_samples(row, recorded(run, row[STEP]).samples)
    lines = [line for line in done.stdout.splitlines() if line.startswith("iteration ")]
    assert [len(re.findall(r"  validation sum \d", line)) for line in lines] == [1, 1, 1, 1], (
        "only the mean is shown"
    )


def check_names(row: dict[str, Any]) -> None:
    every = names(ALWAYS) + names(SOMETIMES)
    assert not [key for key in row if not any(matches(name, key) for name in every)]
    assert not [name for name in names(ALWAYS) if not any(matches(name, key) for key in row)]
    best = [
        row["val-core/sum/digits/mean@4"],
        row["val-aux/sum/digits/best@2"],
        row["val-core/sum/digits/best@4"],
    ]
    assert best == sorted(best) and best[0] < best[2]
    assert 0 <= row["val-core/sum/digits/maj@4"] <= best[2]
    assert "critic/score/digits/pred/mean" not in row, "a text is no metric"
    assert row["val-aux/sum/digits/length/mean@4"] > 0


def check_samples(row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Means and extremes of the row, and times per token, from the recorded samples."""
    columns = {
        "critic/score": [sample["reward"] for sample in samples],
        "critic/rewards": [sample["reward"] for sample in samples],
        "response_length": [sample["num_tokens"] for sample in samples],
        "prompt_length": [sample["num_prompt_tokens"] for sample in samples],
    }
    for name, values in columns.items():
        told = [row[f"{name}/{part}"] for part in ("mean", "max", "min")]
        assert told == pytest.approx([mean(values), max(values), min(values)], abs=1e-6)
    sampled = sum(columns["response_length"])
    whole = sampled + sum(columns["prompt_length"])
    assert row["perf/total_num_tokens"] == whole
    for part, tokens in {"gen": sampled, "ref": whole, "adv": whole, "old_log_prob": whole}.items():
        told = row[f"timing_per_token_ms/{part}"] * tokens
        assert told == pytest.approx(row[f"timing_s/{part}"] * 1000)
    assert row["perf/time_per_step"] == row["timing_s/step"]
