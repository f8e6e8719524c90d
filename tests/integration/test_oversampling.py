"""Oversampling in a whole run: long completions are cut and continue, and every token is trained on once."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.oversampling import N, balance_of, lengths, run_of
from tests.runs import rows, yatt
from tests.tiny_models import make_scripted_model
from tests.unit.adapters.test_judge_api import Service, says
from yatt.core.samples.lengths import by_bucket
from yatt.core.samples.prompts import sample_seed
from yatt.engine.script import _mixed

ITERATIONS = 8
pytestmark = pytest.mark.slow


def test_no_token_is_lost_or_made_twice(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2.0, ITERATIONS, seconds_per_step=0.002)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    found = balance_of(run)
    assert found.sampled == found.trained + found.left
    assert (found.restarted, max(found.ages)) == (0, 1), "groups were cut, and none of them twice"
    events = rows(run.run_dir / "events.jsonl")
    opened = [n for event in events if event["kind"] == "rollout.group.open" for n in event["numbers"]]
    accepted = [event["number"] for event in events if event["kind"] == "rollout.group.accept"]
    assert len(set(accepted)) == len(accepted) and set(accepted) <= set(opened)
    assert opened == list(range(len(opened)))
    metrics = rows(run.run_dir / "metrics.jsonl")
    counts = by_bucket(metrics)
    assert sum(each["accepted"] for each in counts.values()) == N * len(accepted)
    assert any(each["cut"] for each in counts.values()) and not any(
        each["dropped"] for each in counts.values()
    )
    assert lengths_are_those_sampled(counts, accepted)
    page = run.run_dir / "report.html"
    assert yatt("report", str(run.run_dir)).returncode == 0
    assert "Completions by number of tokens" in page.read_text()


def test_questions_to_genrms_are_cut_too_and_cost_no_group(tmp_path: Path) -> None:
    """One GenRM is awake while the policy samples, one is a service, one the policy; two trainer nodes."""
    judge = make_scripted_model(tmp_path / "judge", mean_tokens=20, seconds_per_step=0.01)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    service = Service(lambda _: says("score: 7"))
    run = run_of(tmp_path, 1.5, ITERATIONS, seconds_per_step=0.001)
    config = run.folder / "policy" / "config.json"  # texts have more tokens than were sampled
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    run.settings["launch"]["nodes"] = 2
    run.settings["placement"] = {"mode": "partial", "genrm_gpu_sets": 1}
    read = {"template": "{completion}", "on_unparsable": "score", "unparsable_score": 0.25, "retries": 0}
    run.settings["genrms"] = [
        {"name": "near", "model": judge, "engine": "scripted", "max_model_tokens": 1024, "max_tokens": 64,
         **read, "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0, "t": 0.0}}},
        {"name": "far", "model": "big", "api": {"url": service.url}, **read,
         "verdict": {"pattern": "score: ([0-9])"}},
        {"name": "self", "model": "policy", "max_model_tokens": 2048, "max_tokens": 64, **read,
         "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0, "t": 0.0}}},
    ]  # fmt: skip
    try:
        done = yatt("run", str(run.write()))
    finally:
        service.close()
    assert done.returncode == 0, done.stdout + done.stderr
    found = balance_of(run)
    assert (found.sampled, found.restarted) == (found.trained + found.left, 0)
    events = rows(run.run_dir / "events.jsonl")
    assert not [event for event in events if event["kind"] in ("rollout.group.drop", "failure.report")]
    metrics = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    accepted = [event for event in events if event["kind"] == "rollout.group.accept"]
    for name in ("near", "self"):
        asked = sum(row[f"genrm/{name}/asked"] for row in metrics)
        assert asked > N * len(accepted), "some were asked again"


def lengths_are_those_sampled(counts: dict[int, dict[str, int]], accepted: list[int]) -> bool:
    """By the script alone: which lengths the seeds of these groups give."""
    table, keys = lengths(), sorted(lengths())
    expected: Counter[int] = Counter()
    for number in accepted:
        for index in range(N):
            length = table[keys[_mixed(0, sample_seed(0, number, index)) % len(keys)]]
            expected[1 << (length - 1).bit_length()] += 1
    return {limit: each["accepted"] for limit, each in counts.items() if each["accepted"]} == dict(expected)
