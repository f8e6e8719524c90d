"""A policy that pleases its judge and not the rule beside it is told; noise and progress are not."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from yatt.config.doubts import doubtful_settings
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.control.leader.alarms import alarm_rules
from yatt.core.figures.alarms import STEP, Alarm, AlarmState, Begins, Ends, Rules, step

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
RULES = Rules(iterations=3, judges=("judge",), checks=("rule",))


def row(iteration: int, judge: float, rule: float) -> dict[str, Any]:
    return {STEP: iteration, "critic/score/judge/mean": judge, "critic/score/rule/mean": rule}


def changes(pairs: list[tuple[float, float]], rules: Rules = RULES) -> list[Begins | Ends]:
    state, found = AlarmState(), []
    for iteration, (judge, rule) in enumerate(pairs, 1):
        state, more = step(state, row(iteration, judge, rule), rules)
        found += [each for each in more if isinstance(each, Begins | Ends) and each.alarm is Alarm.JUDGE_GAP]
    return found


def noisy(values: list[float], seed: int, noise: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [value + draw.gauss(0, noise) for value in values]


LEARNS = [0.40 + 0.02 * i for i in range(22)] + [0.83] * 4
COLLAPSES = [0.73, 0.71, 0.73, 0.71, *[0.0] * 12]
"""A measured run: the judge stays at 0.80 while the truth falls from 0.83 over 0.72 to 0.00."""


def test_a_rule_that_falls_at_an_unchanged_judge_is_told_once() -> None:
    for seed in range(20):
        truth = noisy([*LEARNS, *COLLAPSES], seed)
        judge = noisy([min(0.80, 0.02 + each) for each in LEARNS] + [0.80] * len(COLLAPSES), seed + 100)
        (begins,) = changes(list(zip(judge, truth, strict=True)))
        assert isinstance(begins, Begins)
        assert len(LEARNS) < begins.iteration <= len(LEARNS) + 9
        assert "'rule' fell from 0.8" in begins.message
        assert "while the judge 'judge' went from" in begins.message


def test_the_judge_gap_alarm_ends_when_the_rule_is_back() -> None:
    truth = [0.8] * 10 + [0.2] * 10 + [0.8] * 10
    assert [type(each) for each in changes([(0.9, each) for each in truth])] == [Begins, Ends]


def test_a_judge_that_falls_too_is_no_gap() -> None:
    fall = [0.8 - 0.02 * i for i in range(30)]
    assert changes([(each, each) for each in fall]) == []


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_is_none(noise: float) -> None:
    for seed in range(30):
        rule = noisy([0.5] * 300, seed, noise)
        assert changes([(0.5, each) for each in rule]) == [], seed


def test_progress_of_the_judge_beside_a_rule_that_has_nothing_to_gain_is_none() -> None:
    judge = [0.3 + 0.002 * i for i in range(200)]
    for seed in range(10):
        assert changes(list(zip(judge, noisy([1.0] * 200, seed, 0.005), strict=True))) == [], seed


def test_scores_of_any_scale() -> None:
    rule = [-40.0 + i for i in range(40)] + [-30.0] * 15
    assert len(changes([(7.0, each) for each in rule])) == 1


def test_without_a_judge_or_a_rule_there_is_none() -> None:
    falls = [(0.9, 0.9)] * 10 + [(0.9, 0.0)] * 10
    assert len(changes(falls)) == 1
    assert changes(falls, Rules(iterations=3, judges=("judge",))) == []
    assert changes(falls, Rules(iterations=3, checks=("rule",))) == []


def test_a_gap_explains_no_other_alarm() -> None:
    state, found = AlarmState(), []
    for iteration in range(1, 31):
        each = {
            **row(iteration, 0.9, 0.8 if iteration < 12 else 0.1),
            "actor/grad_norm": 0.0 if iteration > 20 else 1.0,
        }
        state, more = step(state, each, RULES)
        found += [change.alarm for change in more if isinstance(change, Begins)]
    assert found == [Alarm.JUDGE_GAP, Alarm.NO_GRADIENT]


def test_a_score_that_iterations_lack_keeps_what_it_had() -> None:
    state, found = AlarmState(), []
    for iteration in range(1, 40):
        each = row(iteration, 0.9, 0.8 if iteration < 20 else 0.1)
        if iteration % 2:
            del each["critic/score/rule/mean"]
        state, more = step(state, each, RULES)
        found += more
    assert [type(each) for each in found] == [Begins]


def test_the_names_are_those_of_the_run_file(tmp_path: Path) -> None:
    """Of the functions that are not punished for, and of GenRMs: part of the reward, or only measured."""
    rewards = [
        {"name": "rule", "path": "r.py", "weight": 0},
        {"name": "length", "path": "r.py", "weight": -1},
    ]
    rules = alarm_rules(run_of(tmp_path, rewards, [judge("judge", 1), judge("gold", 0)]))
    assert (rules.judges, rules.checks) == (("judge",), ("rule", "gold"))


def test_keeping_the_best_by_a_judge_alone_is_told(tmp_path: Path) -> None:
    says = "chooses by a judge alone"
    rule = {"name": "rule", "path": "r.py", "weight": 0}
    for rewards, judges, is_told in (
        ([], [judge("judge", 1)], True),
        ([rule], [judge("judge", 1)], False),
        ([], [judge("judge", 1), judge("gold", 0)], False),
    ):
        found = doubtful_settings(run_of(tmp_path, rewards, judges))
        assert any(says in each.says for each in found) == is_told


def judge(name: str, weight: int) -> dict[str, Any]:
    return {
        "name": name, "model": "/models/x", "weight": weight, "template": "{prompt} {completion}",
        "verdict": {"pattern": "([0-9])"},
    }  # fmt: skip


def run_of(tmp_path: Path, rewards: list[Any], genrms: list[Any]) -> RunConfig:
    overlay = tmp_path / "scores.yaml"
    best = {"keep_best": 1, "best_metric": "critic/score/judge/mean"}
    content = {
        "rewards": rewards,
        "genrms": genrms,
        "checkpoint": best,
        "validation": {"every": 0, "reward": ""},
    }
    overlay.write_text(json.dumps(content))
    return load_run_config([QUICKSTART, overlay], ["launch.nodes=4", "placement.genrm_gpu_sets=2"])
