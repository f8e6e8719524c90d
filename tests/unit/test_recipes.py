"""Every recipe is a run file that loads, fits, and is checked as far as it can be without weights."""

import json
import re
from dataclasses import replace

import pytest

from tests.bench.recipes import (
    EXPECTED,
    FOLDER,
    PAGE,
    PLACEMENT_HEAD,
    ROOT,
    compared_placements,
    page,
    recipe_of,
)
from yatt.config.doubts import doubtful_settings
from yatt.config.load import load_run_config
from yatt.config.site import load_site
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.forecast.memory.advice import check_possible
from yatt.forecast.memory.fit import memory_plan
from yatt.judging.judging import judging_of
from yatt.judging.reading import check_verdict
from yatt.judging.template import check_template
from yatt.launch.checks.judge_check import check_head
from yatt.launch.checks.planned_memory import check_planned_memory, memory_doubts
from yatt.launch.checks.policy_check import check_architecture
from yatt.launch.checks.preflight import check_function, check_length, check_structured
from yatt.models.folder import decoder_config
from yatt.models.model import read_model
from yatt.reward.functions import load_function

SITE = ROOT / "configs/sites/h100.yaml"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.bench.recipes`"


def test_the_site_file_is_one() -> None:
    site = load_site(SITE)
    assert site.exclusive and site.gpu_type == "h100"


def test_every_recipe_has_expected_results() -> None:
    assert {path.stem for path in FILES} == set(EXPECTED)
    assert all(source for rows in EXPECTED.values() for _, _, source in rows)


def test_recipes_with_genrms_ship_the_faster_placement_and_say_when_the_other_one_is() -> None:
    """By the page's table, which another test compares with the simulator."""
    _, _, table = PAGE.read_text().partition("| " + " | ".join(PLACEMENT_HEAD) + " |\n")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.partition("\n\n")[0].splitlines()
    ]
    found = {row[0]: row[1:] for row in rows[1:]}
    texts = {path.stem: path.read_text() for path in FILES}
    assert found.keys() == {name for name, text in texts.items() if "\ngenrms:" in text}
    for name, (mode, switch, turns, split, turning) in found.items():
        least = 0.0 if turning == "any" else float(turning.split()[0])
        fastest = "colocated" if float(switch.split()[0]) < least else "partial"
        assert mode == fastest and (fastest == "colocated") is (
            int(turns.split()[0]) <= int(split.split()[0])
        )
        num = "}" if mode == "colocated" else f", genrm_gpu_sets: {re.findall(r'[0-9]+', split)[1]}}}"
        assert f"\nplacement: {{mode: {mode}{num}\n" in texts[name]
        assert ("whatever a switch takes" if turning == "any" else f"a switch of {turning} on") in texts[name]


def test_at_the_turning_point_both_placements_take_the_same_time() -> None:
    found = compared_placements(recipe_of(FOLDER / "qwen2.5-7b-genrm.yaml"))
    seconds = {
        each.iteration_s + (found.turning_s / found.switch_s - 1) * each.switch_s
        for each in (found.turns, found.split)
    }
    assert max(seconds) - min(seconds) < 1e-6 and found.best == "colocated"
    assert found.turns.switch_s == pytest.approx(2 * found.switch_s)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_fits_and_has_no_doubts(path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = recipe_of(path)
    model = recipe.models[ROLLOUT]
    check_architecture(recipe.config.model.path)
    check_possible(recipe.config, model)
    check_planned_memory(recipe.config, model)
    assert recipe.faults == memory_doubts(recipe.config) == doubts_beside_spans(recipe.config) == []
    assert len(recipe.models) == 1 + len(recipe.config.engine_genrms)
    assert placement_of(recipe.config).trainer_nodes
    longest = recipe.config.data.max_prompt_tokens + recipe.config.rollout.max_response_tokens
    check_length(recipe.config.model.path, "the longest sample", longest)


def doubts_beside_spans(config) -> list:
    """An engine that spans nodes is intended there."""
    return [doubt for doubt in doubtful_settings(config) if "spans" not in doubt.says]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rewards_and_judges_of_a_recipe_are_valid(path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = recipe_of(path).config
    for reward in config.rewards:
        check_function(config, reward)
    for genrm in config.genrms:
        if genrm.kind == "text":
            check_template(genrm.template, "template", judging_of(genrm).fields)
            check_verdict(genrm.verdict, "verdict", genrm.judging.by)
            check_structured(config, genrm, "genrms[0]")
        check_head(genrm, "genrms[0].model")
        check_length(genrm.model, "max_model_tokens", genrm.max_model_tokens)


def test_a_node_fetches_the_parts_of_the_model_that_its_ranks_have_not(monkeypatch) -> None:
    """64 parts: 16 ranks have a stage's experts together, in four stages; a node has eight of them. An engine
    spans two nodes, each of which needs half of every part."""
    recipe = recipe_of(FOLDER / "qwen3-235b-a22b.yaml")
    placement = replace(recipe.config.placement, send_slices=False)
    monkeypatch.chdir(ROOT)
    host = memory_plan(replace(recipe.config, placement=placement), recipe.models).hosts[0]
    assert host.fetched == pytest.approx(7 * host.weights, rel=0.02)
    assert host.given == pytest.approx(host.weights, rel=0.02)
    host, model_bytes = recipe.plan.hosts[0], 2 * 235.1e9
    assert host.fetched == pytest.approx(7 / 8 * model_bytes / 2, rel=0.01), "experts count most"
    assert host.unknown == 0
    assert host.in_shm == host.weights + host.optimizer + host.fetched
    dense = FOLDER / "qwen3-8b-rule.yaml"
    assert recipe_of(dense).plan.hosts[0].fetched == 0
    split = ["placement.mode=disaggregated", "launch.nodes=3", "placement.trainer_nodes=1"]
    config = load_run_config([dense], split)
    trainer, engine = memory_plan(config, recipe_of(dense).models).hosts
    assert engine.fetched == trainer.weights // 4 == trainer.given // 2


def test_the_models_have_the_sizes_of_their_names() -> None:
    names = {
        "Qwen2.5-7B-Instruct": 7.62, "Qwen3-32B": 32.76, "Skywork-Reward-V2-Qwen3-4B": 4.02,
        "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235.1,
        "DeepSeek-V3": 671.0, "Qwen2.5-VL-7B-Instruct": 8.29, "Qwen3-VL-30B-A3B-Instruct": 31.07,
    }  # fmt: skip
    assert set(names) == {folder.name for folder in (FOLDER / "models").iterdir() if folder.is_dir()}
    for name, billions in names.items():
        rows = read_model(str(FOLDER / "models" / name)).rows
        assert sum(row.num_rows * (row.width or 1) for row in rows) == pytest.approx(
            billions * 1e9, rel=0.003
        )
        decoder = decoder_config(json.loads((FOLDER / "models" / name / "config.json").read_text()))
        assert decoder.get("dtype", decoder.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("openai/gsm8k", "so it is\n#### 1,234", "1234", 1.0),
        ("openai/gsm8k", "so it is 1234", "1234", 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"thus \boxed{\dfrac{1}{2}}.", r"\frac{1}{2}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{3}, no: \boxed{x^{2}}", "x^{2}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{4}", "5", 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"cut \boxed{4", "4", 0.0),
        ("math_dapo", "Answer: 42", "42", 1.0),
        ("math_dapo", "it is 42", "42", 0.0),
    ],
)
def test_the_rule_reads_each_datas_own_answers(source, text, truth, score) -> None:
    function = load_function(FOLDER / "rewards.py", "compute_score", "rewards[0]")
    assert function(source, text, truth) == score
