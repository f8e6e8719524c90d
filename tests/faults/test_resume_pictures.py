"""A run with pictures that is killed at any moment, also in its media process, ends as one that never was.

Completions depend on every patch of the prepared pictures, and the scripted trainer's state on every sample.
"""

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from tests.faults.test_resume_exact import (
    ENVIRONMENT,
    ITERATIONS,
    NUM_KILLS,
    VICTIMS,
    final_state,
    finish_under_fire,
    metrics,
)
from tests.runs import RunFile, living, rows, yatt
from tests.tiny_vision import make_vision_model

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def with_pictures(folder: Path) -> RunFile:
    """Each prompt has one or two pictures, some of them several prompts' own; room for a few at a time."""
    make_vision_model(folder / "policy", "qwen3_vl")
    (folder / "policy" / "scripted.json").write_text("{}")
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(24):
        draw = random.Random(number)
        size = draw.randrange(32, 70), draw.randrange(32, 70)
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(pictures / f"{number}.png")
    lines = []
    for number in range(64):
        names = [f"{number % 24}.png", f"{number * 7 % 24}.png"][: 1 + number % 2]
        row = {"prompt": "<image>" * len(names) + f"{number} is", "images": names}
        lines.append(json.dumps(row | {"extra_info": {"index": number}, "data_source": "sum"}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "environment.py").write_text(ENVIRONMENT)
    return RunFile(
        folder,
        {
            "trainer": {"total_iterations": ITERATIONS},
            "run": {"max_attempts_without_progress": 50},
            "data": {"media_root": str(pictures), "max_prompt_tokens": 64},
            "model": {"trainer": "scripted"},
            "media": {"cache_bytes": 100_000},
            "environment": {"path": str(folder / "environment.py"), "max_turns": 3},
            "rollout": {"max_response_tokens": 48},
        },
    )


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFile, list[str]]:
    calm = with_pictures(tmp_path_factory.mktemp("calm"))
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout + done.stderr
    disturbed = with_pictures(tmp_path_factory.mktemp("disturbed"))
    victims = (*VICTIMS, *["yatt.media"] * 5)
    hits = finish_under_fire(disturbed, NUM_KILLS, seed=2, settle_s=(0.1, 3.0), victims=victims)
    return calm, disturbed, hits


def test_pictures_were_prepared_and_shared(twins: tuple[RunFile, RunFile, list[str]]) -> None:
    """A whole run and its twin: nothing smaller has controllers, engines and a media process."""
    calm, _, hits = twins
    samples = [row for row in rows(calm.run_dir / "samples.jsonl") if row.get("kind") == "sample"]
    assert {len(row["media"]) for row in samples} == {1, 2}
    assert "yatt.media" in hits


def test_kills_change_no_state_and_no_metric(twins: tuple[RunFile, RunFile, list[str]]) -> None:
    """A whole run and its twin, as above."""
    calm, disturbed, hits = twins
    assert len(hits) >= NUM_KILLS, f"only {hits}"
    assert final_state(disturbed) == final_state(calm)
    assert metrics(disturbed) == metrics(calm)
    assert [row["training/global_step"] for row in metrics(calm)] == list(range(1, ITERATIONS + 1))


def test_no_picture_and_no_process_is_left_behind(twins: tuple[RunFile, RunFile, list[str]]) -> None:
    """A whole run and its twin, as above."""
    _, disturbed, _ = twins
    assert living(disturbed.run_dir) == {}
    assert disturbed.leftovers() == []
