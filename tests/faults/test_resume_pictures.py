"""A run with pictures that is killed at any moment, also in its media process, ends as one that never was.

Completions depend on every patch of the prepared pictures, and the scripted trainer's state on every sample.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.faults.test_resume_exact import (
    ITERATIONS,
    NUM_KILLS,
    VICTIMS,
    final_state,
    finish_under_fire,
    metrics,
)
from tests.runs import RunFile, living, rows, yatt
from tests.tiny_vision import make_vision_model
from tests.videos import encoded_frames, encoded_video, frames_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
SEEING_KILLS = 3
ENVIRONMENT = """
import random
from PIL import Image

def step(text, episode):
    said = "".join(text for role, text in episode.turns if role == "assistant")
    if len(said) % 3 == 0:
        return None
    draw = random.Random(said)
    size = draw.randrange(32, 70), draw.randrange(32, 70)
    view = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    return {"text": f" {episode.row['extra_info']['index']} <image> again:", "images": [view]}
"""


def with_pictures(folder: Path, **more: dict[str, Any]) -> RunFile:
    """Each prompt has one or two pictures, some of them several prompts' own; room for a few at a time.

    Args:
        more: sections in place of those of a scripted run.
    """
    make_vision_model(folder / "policy", "qwen3_vl")
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
    return RunFile(
        folder,
        {
            "run": {"max_attempts_without_progress": 50},
            "data": {"media_root": str(pictures), "max_prompt_tokens": 64},
            "media": {"cache_bytes": 100_000},
            **more,
        },
    )


def add_videos(folder: Path) -> None:
    """Gives every fourth row a video in place of a picture: a file, or pictures that are frames."""
    frames = frames_of(12, 64, 48)
    (folder / "pictures" / "film.mp4").write_bytes(encoded_video(frames, 6.0))
    for number, data in enumerate(encoded_frames(frames[:3])):
        (folder / "pictures" / f"frame-{number}.png").write_bytes(data)
    listed = {"video": [f"frame-{number}.png" for number in range(3)]}
    lines = []
    for number, line in enumerate((folder / "train.jsonl").read_text().splitlines()):
        row = json.loads(line) | {"videos": []}
        if number % 4 == 3:
            video = {"video": "film.mp4"} if number % 8 == 3 else listed
            row |= {"prompt": f"<video><image>{number} is", "images": row["images"][:1], "videos": [video]}
        lines.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


def scripted_run(folder: Path) -> RunFile:
    """With videos, an environment, scripted engines and a scripted trainer."""
    run = with_pictures(
        folder, model={"trainer": "scripted"},
        trainer={"total_iterations": ITERATIONS, "max_tokens_per_micro_batch": 192},
        environment={"path": str(folder / "environment.py"), "max_turns": 3, "images": True},
        rollout={"max_response_tokens": 64},
        data={"media_root": str(folder / "pictures"), "max_prompt_tokens": 128},
    )  # fmt: skip
    add_videos(folder)
    (folder / "policy" / "scripted.json").write_text("{}")
    (folder / "environment.py").write_text(ENVIRONMENT)
    return run


def seeing_run(folder: Path) -> RunFile:
    """With vLLM and megatron-core, a trained tower on two ranks, and a judge of another family that sees."""
    engine = {"engine": "vllm", "kv_cache_bytes": 32 << 20, "enforce_eager": True, "max_num_seqs": 32}
    judge = {
        "name": "judge", "model": make_vision_model(folder / "judge", "qwen2_5_vl", seed=1), "sees": "prompt",
        "dtype": "float32", "template": "{prompt}{completion}", "max_tokens": 6, "temperature": 1.0,
        "verdict": {"pattern": "([a-m])", "scores": {"a": 1.0, "b": 0.5}}, "on_unparsable": "score", **engine,
    }  # fmt: skip
    return with_pictures(
        folder, trainer={"total_iterations": 3 * SEEING_KILLS, "tensor_model_parallel_size": 2},
        model={"dtype": "float32"}, vision={"train": "all"}, rollout={**engine, "max_response_tokens": 6},
        genrms=[judge], placement={"mode": "partial", "genrm_gpu_sets": 1}, sync={"probe_prompts": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFile, list[str]]:
    calm = scripted_run(tmp_path_factory.mktemp("calm"))
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout + done.stderr
    disturbed = scripted_run(tmp_path_factory.mktemp("disturbed"))
    victims = (*VICTIMS, *["yatt.media"] * 5)
    hits = finish_under_fire(disturbed, NUM_KILLS, seed=2, settle_s=(0.1, 3.0), victims=victims)
    return calm, disturbed, hits


def test_pictures_were_prepared_and_shared(twins: tuple[RunFile, RunFile, list[str]]) -> None:
    """A whole run and its twin: nothing smaller has controllers, engines and a media process."""
    calm, _, hits = twins
    samples = [row for row in rows(calm.run_dir / "samples.jsonl") if row.get("kind") == "sample"]
    assert {len(row["media"]) for row in samples} == {1, 2, 3, 4}, "of the prompt, and of two answers"
    assert any("film.mp4" in row["media"] for row in samples)
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


@pytest.mark.slow
def test_real_engines_and_a_trained_tower_that_are_killed_change_nothing(tmp_path: Path) -> None:
    """A whole run: states of vLLM's encoder, of a tower over ranks, and a judge that sees, in one policy."""
    calm, disturbed = (seeing_run(tmp_path / name) for name in ("calm", "disturbed"))
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout + done.stderr
    victims = (*VICTIMS, *["yatt.media"] * 5)
    hits = finish_under_fire(disturbed, SEEING_KILLS, seed=5, settle_s=(3.0, 6.5), victims=victims)
    assert len(hits) >= SEEING_KILLS, f"only {hits}"
    assert metrics(disturbed) == metrics(calm)
    assert final_state(disturbed) == final_state(calm)
    assert not any(row.get("rollout/media_faults", 0) for row in metrics(calm))
    assert max(row["training/rollout_probs_diff_max"] for row in metrics(calm)) < 1e-5
