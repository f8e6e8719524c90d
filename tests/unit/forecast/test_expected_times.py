"""Expected seconds: operations by counting, and what more or faster hardware changes."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.bench.recipes import FOLDER, ROOT, recipe_of
from tests.runs import HANG_S
from tests.unit.forecast.test_memory_plan import config_of
from yatt.config.schema import PlacementSection
from yatt.config.sections.judges import ThinkSection
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.forecast.memory.fit import memory_plan
from yatt.forecast.memory.times import (
    HardwareRates,
    TimeInputs,
    engine_speed,
    iteration_times,
    num_engines,
    reading_speed,
    swapped_bytes,
    train_s,
)
from yatt.forecast.time.figures import RunFigures
from yatt.models.model import read_model


def recipe(name: str):
    return recipe_of(FOLDER / f"{name}.yaml")


def times(found, **inputs):
    return iteration_times(found.config, found.models, found.plan, TimeInputs(**({"tokens": 1024} | inputs)))


def test_passes_and_gpus_count():
    config = config_of("trainer.mini_batch_size=128", "trainer.tensor_model_parallel_size=2")
    model, rates = read_model(config.model.path), HardwareRates()
    once = train_s(config, model, 4096, rates)
    assert train_s(config, model, 4096, replace(rates, utilization=0.6)) == pytest.approx(once / 2)
    plain = train_s(config_of("trainer.mini_batch_size=128", "trainer.recompute=none"), model, 4096, rates)
    assert plain == pytest.approx(once * 3 / 4)
    two_steps = train_s(config_of("trainer.mini_batch_size=64"), model, 4096, rates)
    assert two_steps == pytest.approx(once * 5 / 4)  # log-probs before the first step
    assert train_s(config_of("trainer.mini_batch_size=128", "launch.nodes=2"), model, 4096, rates) == once / 2


def test_turns_of_policy_and_critic_bring_the_policy_once_more():
    """Beside what the trainer's sleep costs; the critic comes and goes once with either."""
    found = recipe("qwen3-8b-ppo")
    swapped = replace(found.config, critic=replace(found.config.critic, swap=True))
    plan = memory_plan(swapped, found.models)
    both, turns = times(found), iteration_times(swapped, found.models, plan, TimeInputs(tokens=1024))
    more_bytes = found.plan.worst.weights + found.plan.worst.optimizer
    assert turns.total_s - both.total_s == pytest.approx(more_bytes / HardwareRates().link_bytes_per_s)
    known = replace(swapped, algorithm=replace(swapped.algorithm, kl_in="loss", kl_coef=0.01))
    with_it = memory_plan(known, found.models).worst  # a reference leaves with the policy
    assert swapped_bytes(known, with_it) - swapped_bytes(swapped, plan.worst) == with_it.others.reference > 0


def test_a_decoding_step_reads_weights_and_sequences():
    found = recipe("qwen3-8b-rule")
    engine, rates = found.plan.engines[0], HardwareRates(memory_bytes_per_s=1e12, memory_share=0.5)
    speed = engine_speed(engine, found.models["rollout"], 1e5, rates)
    assert speed == EngineSpeed(engine.weights / 5e11, 1e5 * engine.kv.token / 5e11)


@pytest.mark.parametrize(("name", "role"), [("distill", "genrm:teacher"), ("rlhf", "genrm:preference")])
def test_an_engine_that_writes_nothing_reads_each_text_once(name, role):
    """As fast as a forward pass of training: two operations a parameter and token, and attention."""
    found = recipe(f"qwen3-8b-{name}")
    said, engines = times(found), num_engines(found.config, role)
    numel = sum(row.num_rows * (row.width or 1) for row in found.models[role].rows)
    tokens, gpus = 1024 * (512 + 1024 + 0.5), engines * (2 if name == "distill" else 1)
    assert said.verdict_tokens == {role: 1.0}
    assert said.verdicts_s == pytest.approx(2 * numel * tokens / (gpus * 0.3 * 989e12), rel=0.15)
    slow = times(found, rates=HardwareRates(utilization=0.15))
    assert slow.verdicts_s == pytest.approx(2 * said.verdicts_s, rel=0.05)


def test_thoughts_are_tokens_of_verdicts():
    found = recipe("qwen3-8b-genrm")
    (judge,) = found.config.genrms
    thinking = replace(judge, think=ThinkSection(budget=3 * judge.max_tokens))
    plain, thinks = times(found), times(replace(found, config=replace(found.config, genrms=(thinking,))))
    assert thinks.verdict_tokens["genrm:judge"] == 4 * plain.verdict_tokens["genrm:judge"]
    assert thinks.verdicts_s > 3 * plain.verdicts_s


def test_a_teacher_has_a_head_of_tokens_and_a_scalar_model_none():
    found, rates = recipe("qwen3-8b-distill"), HardwareRates()
    engine, model = found.plan.engines[1], found.models["genrm:teacher"]
    with_head, without = (
        reading_speed(engine, model, 1000, rates, is_teacher=is_teacher).sequence_s
        for is_teacher in (True, False)
    )
    assert with_head - without == pytest.approx(2 * 5120 * 151_936 * 1000 / (2 * 0.3 * 989e12))


def test_verdicts_are_beside_the_rollout_where_they_have_gpus():
    found = recipe("qwen3-8b-genrm")
    placement = PlacementSection(mode="partial", genrm_gpu_sets=4)
    found = replace(found, config=replace(found.config, placement=placement))
    beside = times(found)
    assert beside.total_s == max(beside.rollout_s, beside.verdicts_s) + beside.train_s + beside.switch_s
    after = replace(beside, is_colocated=True)
    assert after.total_s == beside.rollout_s + beside.verdicts_s + beside.train_s + beside.switch_s
    assert (num_engines(found.config, "rollout"), num_engines(found.config, "genrm:judge")) == (4, 4)


def test_figures_of_a_run_replace_rates():
    found = recipe("qwen3-8b-rule")
    figures = RunFigures(speeds={"rollout": EngineSpeed(1.0, 0.0)}, train_gpu_s=0.5, switch_s=3.0)
    measured = times(found, measured=figures)
    assert (measured.train_s, measured.switch_s) == (0.5 * 1024 / 8, 3.0)
    assert measured.rollout_s == pytest.approx(1024)  # 128 sequences in each of eight engines
    assert times(found).rollout_s < 100


def test_the_command_for_the_simulator_works(tmp_path):
    path = FOLDER / "qwen3-8b-genrm.yaml"
    plan = [sys.executable, "-m", "yatt.cli.main", "plan", str(path)]
    said = subprocess.run(plan, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S, check=True).stdout
    words = shlex.split(said.partition("yatt simulate CONFIG ")[2].splitlines()[0])
    command = [sys.executable, "-m", "yatt.cli.main", "simulate", str(path), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"] == "given on the command line"


@pytest.mark.parametrize("option", [["--mfu", "2"], ["--gpu-gib", "0"], ["--tokens", "-1"], ["--mfu", "nan"]])
def test_a_number_out_of_range_is_refused(option):
    command = [sys.executable, "-m", "yatt.cli.main", "plan", str(FOLDER / "qwen3-8b-rule.yaml"), *option]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 2
    assert f"{option[0]} {float(option[1]):g}: write a number from" in done.stderr
