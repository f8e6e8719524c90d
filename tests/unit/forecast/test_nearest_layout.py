"""A layout that cannot be or does not fit is refused with the nearest one that fits."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.findings import words_by_key
from tests.runs import HANG_S
from tests.unit.forecast.test_memory_plan import LONG, ROOT, config_of
from yatt.errors import ConfigError
from yatt.forecast.memory.advice import check_possible, nearest_layout
from yatt.forecast.memory.fit import GIB, memory_plan
from yatt.launch.checks.planned_memory import check_planned_memory, memory_doubts
from yatt.models.model import read_model

TP, PP = "trainer.tensor_model_parallel_size", "trainer.pipeline_model_parallel_size"


def nearest(room_gib: float, *more: str):
    config = config_of(*more)
    return config, nearest_layout(config, read_model(config.model.path), int(room_gib * GIB))


@pytest.mark.parametrize("room_gib", [26, 34, 46, 60, 72])
@pytest.mark.parametrize("more", [(), (f"{TP}=1", "trainer.recompute=none")])
def test_what_is_named_fits(room_gib, more):
    config, found = nearest(room_gib, *more)
    assert found is not None
    again = config_of(*more, *found.changes)
    assert again == found.config
    model = read_model(config.model.path)
    check_possible(again, model)
    assert memory_plan(again, {"rollout": model}).worst.peak <= room_gib * GIB


def test_a_layout_that_fits_is_its_own_nearest():
    assert nearest(72)[1].changes == ()


def test_one_doubling_is_nearer_than_two():
    assert nearest(70, f"{TP}=1")[1].changes == (f"{TP}=2", "trainer.sequence_parallel=true")


def test_recomputation_is_nearer_than_another_layout():
    assert nearest(60, "trainer.recompute=none")[1].changes == ("trainer.recompute=full",)


def test_turns_of_policy_and_critic_are_nearer_than_recomputation():
    gae = "algorithm.adv_estimator=gae"
    assert nearest(60, gae)[1].changes == ("critic.swap=true",)
    assert nearest(60, gae, "critic.swap=true")[1].changes == ()


def test_a_layout_is_named_only_if_the_critic_can_have_it_too():
    """The policy has 32 heads and the critic 28: of the sizes up to 8, only 8 divides the one alone."""
    more = "algorithm.adv_estimator=gae", f"critic.path={ROOT}/configs/recipes/models/Qwen2.5-7B-Instruct"
    changes = nearest(24, *more)[1].changes
    assert f"{TP}=8" in nearest(24, *more[:1])[1].changes and f"{TP}=8" not in changes
    wide = config_of(*more, f"{TP}=8")
    with pytest.raises(
        ConfigError, match=r"(?s)critic.path: .* does not divide 28 heads.* The nearest layout"
    ):
        check_possible(wide, read_model(wide.model.path), 80 * GIB)


def test_more_nodes_are_named_only_where_one_is_too_small():
    changes = nearest(40, "launch.gpus_per_node=1", f"{TP}=1")[1].changes
    assert changes[0].startswith("launch.nodes=")


def test_nothing_is_named_where_nothing_fits():
    assert nearest(1)[1] is None


def test_an_impossible_layout_is_refused_with_the_nearest():
    config = config_of(f"{TP}=1", "launch.gpus_per_node=3")
    wrong = replace(config.trainer, tensor_model_parallel_size=3)
    with pytest.raises(ConfigError, match="does not divide 32 heads") as caught:
        check_possible(replace(config, trainer=wrong), read_model(config.model.path))
    assert f"The nearest layout in which the trainer fits: {TP}=1 {PP}=3" in str(caught.value)


def test_what_fits_on_no_gpu_is_refused_before_a_start(tmp_path):
    config = config_of(f"{TP}=1", "launch.gpus_per_node=1")
    check_planned_memory(config, read_model(config.model.path))  # 137 GiB: some GPUs have more
    values = json.loads((Path(config.model.path) / "config.json").read_text()) | {"num_hidden_layers": 100}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="need 344 GiB of each GPU, and the largest GPUs have 288 GiB"):
        check_planned_memory(config, read_model(str(tmp_path)))
    check_planned_memory(config_of(f"{TP}=1"), read_model(str(tmp_path)))


def test_what_does_not_fit_on_usual_gpus_is_a_note():
    notes = words_by_key(memory_doubts(config_of(f"{TP}=1")))
    assert (
        "GPUs of 80 GiB" in notes["trainer"]
        and "The nearest layout in which the trainer fits" in notes["trainer"]
    )
    assert memory_doubts(config_of()) == []
    assert memory_doubts(config_of(f"{TP}=1", "launch.device=cpu")) == []


@pytest.mark.parametrize("wrong", [f"{TP}=3", "trainer.context_parallel_size=16"])
@pytest.mark.parametrize("gpu_gib", [36, 56, 80])
def test_the_layout_that_is_named_fits_by_its_own_plan(wrong, gpu_gib):
    command = [sys.executable, "-m", "yatt.cli.main", "plan", "configs/gsm8k.yaml", *LONG, wrong]
    command += ["--gpu-gib", str(gpu_gib), "rollout.gpu_memory_utilization=0.9"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert refused.returncode == 2
    changes = (
        refused.stderr.partition("The nearest layout in which the trainer fits: ")[2].split(".\n")[0].split()
    )
    assert changes
    again = subprocess.run([*command, *changes], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert again.returncode == 0, again.stdout + again.stderr


def test_an_impossible_number_of_experts_is_refused_with_the_nearest():
    command = [sys.executable, "-m", "yatt.cli.main", "plan", "configs/recipes/qwen3-30b-a3b.yaml"]
    command.append("trainer.expert_model_parallel_size=5")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 2
    assert "The nearest layout in which the trainer fits: trainer.expert_model_parallel_size=" in done.stderr


def test_sizes_that_do_not_divide_the_gpus_are_refused_with_the_nearest():
    command = [sys.executable, "-m", "yatt.cli.main", "plan", "configs/gsm8k.yaml", *LONG, f"{TP}=3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 2
    assert "does not divide the 8 GPUs" in done.stderr
    assert f"The nearest layout in which the trainer fits: {TP}=" in done.stderr
