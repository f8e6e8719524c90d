"""A run with a scripted trainer: everything is as with the real one, but what is learned."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from yatt.errors import EXIT_USER_MISTAKE

pytestmark = pytest.mark.slow


def run_file(folder: Path, by: str = "scripted", **sections: Any) -> RunFile:
    return RunFile(folder, {"model": {"trainer": by, "dtype": "bfloat16"}, **sections})


def manifest_of(run: RunFile) -> dict[str, Any]:
    return json.loads(max((run.run_dir / "checkpoints" / "manifests").glob("*.json")).read_text())


def saved(run: RunFile) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Each saved tensor: dtype, shape, number of its elements that are in pieces."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for piece in (piece for file in manifest_of(run)["files"] for piece in file["tensors"]):
        _, _, count = found.get(piece["key"], ("", (), 0))
        count += math.prod(piece["local_shape"])
        found[piece["key"]] = piece["dtype"], tuple(piece["global_shape"]), count
    return found


def exported(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                tensor = file.get_slice(name)
                found[name] = tensor.get_dtype(), tuple(tensor.get_shape())
    return found


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> RunFile:
    run = run_file(tmp_path_factory.mktemp("rehearsed"))
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stderr
    return run


def test_checkpoints_and_exports_have_the_real_ones_tensors(rehearsed, tmp_path) -> None:
    real = run_file(tmp_path, "megatron")
    assert (done := yatt("run", str(real.write()))).returncode == 0, done.stderr
    assert saved(rehearsed) == saved(real)
    assert exported(rehearsed.run_dir / "model") == exported(real.run_dir / "model")
    names = {path.name for path in (real.run_dir / "model").iterdir() if path.suffix != ".safetensors"}
    assert names <= {path.name for path in (rehearsed.run_dir / "model").iterdir()}
    mine, its = (rows(run.run_dir / "metrics.jsonl")[-1] for run in (rehearsed, real))
    of_updates = ("actor/", "training/rollout", "rollout_corr/", "timing", "perf/")
    assert all(key.startswith(of_updates) for key in its.keys() - mine.keys())


def test_commands_read_its_checkpoints(rehearsed, tmp_path) -> None:
    run = str(rehearsed.run_dir)
    assert yatt("ckpt", "verify", run).returncode == 0
    assert (done := yatt("ckpt", "export", run, str(tmp_path / "model"))).returncode == 0, done.stderr
    assert exported(tmp_path / "model") == exported(rehearsed.run_dir / "model")
    for name in ("status", "report"):
        assert yatt(name, str(rehearsed.run_dir)).returncode == 0


def test_a_killed_rehearsal_ends_as_if_nothing_had_been(rehearsed, tmp_path) -> None:
    run = run_file(tmp_path)
    process = start("run", str(run.write()))
    wait_for(lambda: rows(run.run_dir / "metrics.jsonl"), timeout_s=60, what="an iteration")
    for pid in living(run.run_dir):
        kill(pid)
    process.kill()
    process.communicate()
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert final_state(run) == final_state(rehearsed) and metrics(run) == metrics(rehearsed)


def test_another_layout_restores_it(rehearsed, tmp_path) -> None:
    """Two ranks of one model on one node, instead of two copies."""
    run = run_file(
        tmp_path, launch={"nodes": 1, "gpus_per_node": 2}, trainer={"tensor_model_parallel_size": 2},
        run={"from_checkpoint": {"url": str(rehearsed.run_dir / "checkpoints")}},
    )  # fmt: skip
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert saved(run) == saved(rehearsed)


def test_a_lost_sample_or_another_reward_would_be_seen(rehearsed, tmp_path) -> None:
    run = run_file(tmp_path)
    run.write()
    text = (tmp_path / "reward.py").read_text()
    (tmp_path / "reward.py").write_text(text.replace("/ 8", "/ 8.0000001"))
    assert yatt("run", str(run.write())).returncode == 0
    mine, other = final_state(run), final_state(rehearsed)
    assert all(mine[name] != other[name] for name in mine if name.endswith(".safetensors"))


@pytest.mark.parametrize("by", ["scripted", "megatron"])
def test_the_two_trainers_refuse_each_others_checkpoints(rehearsed, tmp_path, by) -> None:
    origin = rehearsed
    if by == "scripted":
        origin = run_file(tmp_path / "real", "megatron")
        assert yatt("run", str(origin.write())).returncode == 0
    run = run_file(
        tmp_path / "run", by, run={"from_checkpoint": {"url": str(origin.run_dir / "checkpoints")}}
    )
    done = yatt("run", str(run.write()))
    assert done.returncode == EXIT_USER_MISTAKE
    other = "megatron" if by == "scripted" else "scripted"
    words = f"checkpoint 4 is of a run with model.trainer: {other}, and this run has model.trainer: {by}."
    assert words in done.stdout + done.stderr


def test_real_engines_are_refused(tmp_path) -> None:
    run = run_file(tmp_path, rollout={"engine": "transformers"})
    done = yatt("run", str(run.write()))
    assert done.returncode == EXIT_USER_MISTAKE
    words = "model.trainer: a scripted trainer publishes no weights for rollout.engine: transformers"
    assert words in done.stderr
