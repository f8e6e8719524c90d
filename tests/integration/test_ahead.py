"""One batch ahead in whole runs: the tracks overlap, every prompt is used once, a stop loses nothing."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.bench.overlap import BATCH, run_of
from tests.bench.oversampling import balance_of
from tests.runs import RunFile, living, rows, start, wait_for, yatt

ITERATIONS = 6
pytestmark = pytest.mark.slow


def events_of(run: RunFile) -> list[dict[str, Any]]:
    return rows(run.run_dir / "events.jsonl")


def check_prompts(run: RunFile, iterations: int) -> None:
    """Each prompt is trained on once, in whole batches."""
    events = events_of(run)
    accepted = [event["number"] for event in events if event["kind"] == "rollout.group.accept"]
    assert len(set(accepted)) == len(accepted) >= BATCH * iterations
    assert sorted(accepted) == list(range(len(accepted)))
    metrics = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    assert [row["training/global_step"] for row in metrics] == list(range(1, iterations + 1))
    assert all(row["rollout/groups"] == BATCH for row in metrics)


def test_the_next_batch_is_sampled_while_one_is_trained(tmp_path: Path) -> None:
    """Two batches ahead; the run that is stopped, below, has one."""
    ahead = 2
    run = run_of(tmp_path, ahead, ITERATIONS, seconds_per_step=0.02, tokens=24, layers=6)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    check_prompts(run, ITERATIONS)
    found = balance_of(run)
    assert found.sampled == found.trained and not found.left and not found.restarted
    assert found.ages[0] == 0 and 0 < max(found.ages) <= ahead
    events = events_of(run)
    began = {e["iteration"]: e["t"] for e in events if e["kind"] == "batch.begin"}
    trains = {e["iteration"]: e["t"] for e in events if e["kind"] == "phase.end" and e["phase"] == "train"}
    assert sorted(began) == list(range(1, ITERATIONS + 1))
    overlaps = [i for i in range(1, ITERATIONS) if began[i + 1] < trains[i]]
    assert len(overlaps) >= 2, "a batch is begun while the one before is trained on"
    checks = [e for e in events if e["kind"] == "weights.check"]
    assert [e["policy_version"] for e in checks] == sorted(e["policy_version"] for e in checks)


def test_a_run_that_is_stopped_in_the_middle_of_both_tracks_goes_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, ITERATIONS, seconds_per_step=0.05, tokens=24)
    run.settings["checkpoint"] = {"save_every": 1}
    process = start("run", str(run.write()))
    wait_for(
        lambda: [e for e in events_of(run) if e["kind"] == "batch.begin" and e["iteration"] == 3],
        timeout_s=120, what="the third batch",
    )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 75
    wait_for(lambda: not living(run.run_dir), what="no process")
    done = yatt("run", str(run.run_dir / "config.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    check_prompts(run, ITERATIONS)
    assert max(balance_of(run).ages) <= 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"placement": {"mode": "colocated"}}, "take turns on the same GPUs"),
        ({"run": {"deterministic": True}}, "run.deterministic"),
        ({"rollout": {"ahead": 2, "max_policy_age": 1}}, "rollout.max_policy_age is 1"),
        ({"rollout": {"ahead": 1, "max_policy_age": 1, "oversample": 1.5}}, "rollout.oversample"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    run = run_of(tmp_path, 1, 1, seconds_per_step=0.0)
    for section, values in settings.items():
        run.settings[section] = {**run.settings.get(section, {}), **values}
    if settings.get("placement"):
        run.settings["placement"] = settings["placement"]
    done = yatt("run", str(run.write()))
    assert done.returncode == 2
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
