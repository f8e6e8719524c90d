"""Alternatives of a config, their comparison and the recommendation."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from yatt.config.check import broken_relations
from yatt.config.load import load_command
from yatt.config.schema import RunConfig
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.errors import ConfigError
from yatt.forecast.time import alternatives as a
from yatt.forecast.time.alternatives import Alternative, resized_config
from yatt.forecast.time.comparing import SettingsComparison
from yatt.forecast.time.figures import (
    RunFigures,
    even_lengths,
    log_normal,
    mean_length,
    missing_figures,
    train_gpu_s,
)
from yatt.forecast.time.picture import picture_of
from yatt.forecast.time.recommending import Recommendation, recommended_setting, setup_of

JUDGE = "genrm:judge"
RUN: dict[str, Any] = {
    "run": {"dir": "runs/x"},
    "launch": {"nodes": 8, "gpus_per_node": 1},
    "data": {"train_files": ["a.jsonl"], "max_prompt_tokens": 64},
    "model": {"path": "policy"},
    "rollout": {"n": 4, "max_response_tokens": 2048, "max_num_seqs": 32},
    "genrms": [{"name": "judge", "model": "judge", "template": "{prompt}{completion}?",
                "verdict": {"pattern": "([0-9])"}, "max_num_seqs": 32}],
    "placement": {"mode": "partial", "genrm_gpu_sets": 1},
    "optimizer": {"lr": 1.0e-6},
    "trainer": {"total_iterations": 100, "train_batch_size": 16, "mini_batch_size": 8},
}  # fmt: skip


def config_of(folder: Path, *settings: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return load_command(path, settings)


def figures(config: RunConfig, **changes: Any) -> RunFigures:
    given = {
        "lengths": log_normal(500.0, 0.8, 2048), "verdicts": {JUDGE: 300.0}, "switch_s": 2.0,
        "speeds": {ROLLOUT: EngineSpeed(0.01, 0.001), JUDGE: EngineSpeed(0.01, 0.001)},
        "train_gpu_s": train_gpu_s(10.0, config),
    }  # fmt: skip
    return RunFigures(**{**given, **changes})


def comparison_of(config: RunConfig, known: RunFigures, num_iterations: int = 4) -> SettingsComparison:
    return SettingsComparison(setup_of(config, known, num_iterations=num_iterations, seed=1))


def test_the_recommendation_is_the_setting_with_the_least_predicted_time(tmp_path):
    config = config_of(tmp_path)
    found = recommended_setting(comparison_of(config, figures(config)))
    assert found.own.alternative.config == config
    assert found.best.iteration_s == min(each.iteration_s for each in found.results)
    assert found.gain(found.best) > 0.2  # one slab of eight for the GenRM is far too few
    assert found.best_as_young.most_age <= found.own.most_age
    again = recommended_setting(comparison_of(config, figures(config)))
    assert [each.iteration_s for each in again.results] == [each.iteration_s for each in found.results]


def test_every_alternative_is_allowed_and_its_settings_lead_from_the_config_to_it(tmp_path):
    config = config_of(tmp_path)
    found = recommended_setting(comparison_of(config, figures(config), 3))
    for result in found.results:
        alternative = result.alternative
        assert not broken_relations(alternative.config)
        settings = alternative.settings(config)
        assert config_of(tmp_path, *settings) == alternative.config, settings
    kinds = {
        (each.alternative.config.placement.mode, each.alternative.config.rollout.ahead)
        for each in found.results
    }
    assert kinds == {("partial", 0), ("colocated", 0), ("disaggregated", 0), ("disaggregated", 1)}
    assert any(each.alternative.is_dynamic for each in found.results)
    assert any(each.alternative.config.rollout.oversample == 1.25 for each in found.results)


def test_a_dynamic_split_of_the_config_is_simulated_within_its_limits(tmp_path):
    dynamic = ("placement.split=dynamic", "placement.min_gpu_sets={rollout: 2}",
               "placement.max_gpu_sets={'genrm:judge': 3}")  # fmt: skip
    config = config_of(tmp_path, *dynamic)
    found = recommended_setting(comparison_of(config, figures(config)))
    assert found.own.alternative.is_dynamic
    assert found.own.moves > 0
    free = config_of(tmp_path, dynamic[0], "placement.min_gpu_sets={rollout: 1}")
    known = figures(free, verdicts={JUDGE: 3000.0})
    assert comparison_of(free, known).result(Alternative(free)).split[JUDGE] > 3
    assert comparison_of(config, known).result(Alternative(config)).split[JUDGE] == 3
    others = [each.alternative for each in found.results if not each.alternative.is_dynamic]
    assert others and all(not broken_relations(each.config) for each in others)
    for each in others:
        assert each.removed(config) == ["placement.min_gpu_sets", "placement.max_gpu_sets"]
        assert "placement.split=fixed" in each.settings(config)


def test_a_dynamic_split_takes_turns_where_a_switch_is_short_and_no_role_has_a_limit(tmp_path):
    dynamic, even = "placement.split=dynamic", tuple([500.0] * 4)
    split = {}
    for switch_s, limits in ((0.5, ""), (60.0, ""), (0.5, "{rollout: 1}")):
        config = config_of(tmp_path, dynamic, *([f"placement.min_gpu_sets={limits}"] if limits else []))
        known = figures(config, lengths=even, verdicts={JUDGE: 400.0}, switch_s=switch_s)
        comparison = comparison_of(config, known)
        found = comparison.result(Alternative(config))
        split[switch_s, limits] = found.split
        if not found.split[JUDGE]:
            turns = comparison.result(a.as_colocated(config))
            assert found.iteration_s == pytest.approx(turns.iteration_s, rel=0.02)
            picture = picture_of(comparison, found)
            assert {JUDGE, ROLLOUT} <= {span.state for _, spans in picture.rows for span in spans}
    assert split[0.5, ""] == {ROLLOUT: 8, JUDGE: 0}
    assert split[60.0, ""][JUDGE] > 0 and split[0.5, "{rollout: 1}"][JUDGE] > 0


def test_moves_cost_a_switch_on_nodes_of_their_own_too_but_a_batch_ends_without_one(tmp_path):
    own = ("placement.mode=disaggregated", "placement.trainer_nodes=2", "placement.genrm_gpu_sets=1")
    config = config_of(tmp_path, *own, "placement.split=dynamic", "trainer.train_batch_size=32")
    slow, fast = (
        comparison_of(config, figures(config, switch_s=each)).result(Alternative(config))
        for each in (60.0, 0.0)
    )
    assert slow.switch_s == fast.switch_s == 0
    assert fast.moves > 0
    assert slow.moves < fast.moves


def test_engines_on_a_slab_follow_from_the_config(tmp_path):
    config = config_of(tmp_path, "launch.gpus_per_node=4", "rollout.tp_size=2")
    engines = {
        role: each.engines for role, each in comparison_of(config, figures(config)).setup.roles().items()
    }
    assert engines == {ROLLOUT: 1, JUDGE: 2}


def test_a_deterministic_run_is_offered_neither_ahead_nor_oversampling(tmp_path):
    config = config_of(tmp_path, "run.deterministic=true")
    found = recommended_setting(comparison_of(config, figures(config), 3))
    assert len(found.results) > 4
    assert {each.alternative.config.rollout.ahead for each in found.results} == {0}
    assert {each.alternative.config.rollout.oversample for each in found.results} == {1.0}


def test_where_nodes_differ_no_alternative_has_another_number_of_gpus(tmp_path):
    config = config_of(
        tmp_path, "launch.gpus_per_node=2", "launch.engine_gpus_per_node=1", "placement.mode=disaggregated",
        "placement.trainer_nodes=2", "placement.genrm_gpu_sets=2",
    )  # fmt: skip
    found = recommended_setting(comparison_of(config, figures(config), 3))
    assert {a.num_gpus(each.alternative.config) for each in found.results} == {10}
    assert {each.alternative.config.rollout.ahead for each in found.results} == {0, 1}


def test_without_genrm_there_is_no_partial_placement(tmp_path):
    config = config_of(tmp_path, "genrms=[]", "placement.mode=colocated", "placement.genrm_gpu_sets=0",
                       "rewards=[{name: rule, path: 'builtin:exact'}]")  # fmt: skip
    found = recommended_setting(comparison_of(config, figures(config, verdicts={})))
    assert {each.alternative.config.placement.mode for each in found.results} == {
        "colocated",
        "disaggregated",
    }
    assert all(set(each.idle) <= {ROLLOUT, TRAINER} for each in found.results)


def by_hand(tmp_path: Path) -> tuple[RunConfig, RunFigures]:
    """One completion of 100 tokens, a verdict of 50, engines that make a token a second, training of 60 s on
    one node."""
    one = ("launch.nodes=4", "rollout.n=1", "trainer.train_batch_size=1", "trainer.mini_batch_size=1")
    config = config_of(tmp_path, *one, "algorithm.adv_estimator=reinforce_plus_plus")
    speeds = {role: EngineSpeed(1.0, 0.0) for role in (ROLLOUT, JUDGE)}
    return config, figures(
        config, lengths=(100.0, 100.0), verdicts={JUDGE: 50.0}, speeds=speeds, train_gpu_s=60.0
    )


def test_times_and_idle_shares_of_shared_gpus_are_those_computed_by_hand(tmp_path):
    config, known = by_hand(tmp_path)
    result = comparison_of(config, known).result(a.as_partial(config, 1))
    assert result.iteration_s == pytest.approx(150 + 2 + 60 / 4)
    assert result.idle == pytest.approx({ROLLOUT: 1 - 100 / (3 * 150), JUDGE: 1 - 50 / 150})
    assert result.tokens_per_s == pytest.approx(100 / result.iteration_s)
    turns = comparison_of(config, known).result(a.as_colocated(config))
    assert turns.iteration_s == pytest.approx(150 + 2 * 2 + 60 / 4)
    assert turns.idle == pytest.approx({ROLLOUT: 1 - 1 / 4, JUDGE: 1 - 1 / 4})


@pytest.mark.parametrize(("ahead", "iteration_s", "age"), [(0, 150 + 30, 0), (1, 150, 1)])
def test_nodes_of_their_own_wait_for_each_other_unless_sampling_is_ahead(tmp_path, ahead, iteration_s, age):
    config, known = by_hand(tmp_path)
    result = comparison_of(config, known).result(a.as_disaggregated(config, 2, 1, ahead))
    assert (result.iteration_s, result.most_age) == (pytest.approx(iteration_s), age)
    shares = {ROLLOUT: 1 - 100 / iteration_s, JUDGE: 1 - 50 / iteration_s, TRAINER: 1 - 30 / iteration_s}
    assert result.idle == pytest.approx(shares)


def test_at_another_size_the_ratio_of_roles_and_samples_for_each_gpu_stay(tmp_path):
    limits = ("placement.split=dynamic", "placement.min_gpu_sets={rollout: 2}")
    assert resized_config(config_of(tmp_path, *limits), 64).placement.min_gpu_sets == {ROLLOUT: 16}
    config = resized_config(config_of(tmp_path, "placement.genrm_gpu_sets=3"), 64)
    assert (config.launch.nodes, config.placement.genrm_gpu_sets) == (64, 24)
    assert (config.trainer.train_batch_size, config.trainer.mini_batch_size) == (128, 64)
    assert resized_config(config, 8).trainer.train_batch_size == 16


@pytest.mark.parametrize(
    ("gpus", "settings", "says"),
    [
        (0, (), "write 1 to 16384"),
        (20_000, (), "write 1 to 16384"),
        (
            7,
            ("placement.mode=disaggregated", "placement.trainer_nodes=4", "placement.genrm_gpu_sets=2"),
            "multiple of 2",
        ),
        (12, ("launch.gpus_per_node=8",), "write a multiple of 8"),
        (1, (), "each GenRM needs at least one GPU set and rollout at least one; use more nodes"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_what_to_write(tmp_path, gpus, settings, says):
    config = config_of(tmp_path, *settings)
    with pytest.raises(ConfigError, match=says):
        resized_config(config, gpus)


def test_a_share_of_a_large_system_takes_about_as_long_as_the_whole(tmp_path):
    config = resized_config(config_of(tmp_path, "trainer.train_batch_size=32"), 512)
    comparison = comparison_of(config, figures(config))
    alternative = a.as_partial(config, 192)
    assert comparison.setup.share == 4
    whole_s, part_s = comparison.check_of_share(alternative)
    assert part_s == pytest.approx(whole_s, rel=0.06)
    small = comparison_of(config_of(tmp_path), figures(config))
    assert small.setup.share == 1
    assert small.check_of_share(a.as_partial(config_of(tmp_path), 3)) is None


def test_what_is_missing_is_named_with_the_option_that_gives_it(tmp_path):
    config = config_of(tmp_path)
    says = "\n".join(missing_figures(RunFigures(), config))
    for option in ("--lengths", "--speed rollout=", "--speed genrm:judge=", "--verdict-tokens judge=",
                   "--switch-s", "--train-s"):  # fmt: skip
        assert option in says
    assert missing_figures(figures(config), config) == []
    given = RunFigures(switch_s=9.0).over(figures(config))
    assert (given.switch_s, missing_figures(given, config)) == (9.0, [])


def test_log_normal_lengths_have_their_mean_and_are_cut():
    assert mean_length(log_normal(1000.0, 0.5, 1e6)) == pytest.approx(1000.0, rel=0.01)
    assert max(log_normal(1000.0, 2.0, 4096)) == 4096
    assert even_lengths((1.0, 3.0, 11.0), 5) == [1.0, 2.0, 3.0, 7.0, 11.0]


@pytest.mark.parametrize("mode", ["partial", "colocated", "disaggregated"])
def test_a_picture_covers_the_iteration_of_every_slab(tmp_path, mode):
    config = config_of(tmp_path)
    alternative = {
        "partial": a.as_partial(config, 2, is_dynamic=True), "colocated": a.as_colocated(config),
        "disaggregated": a.as_disaggregated(config, 2, 2, 1),
    }[mode]  # fmt: skip
    comparison = comparison_of(config, figures(config))
    picture = picture_of(comparison, comparison.result(alternative))
    assert len(picture.rows) == {"disaggregated": 6 + 1}.get(mode, 8)
    for name, spans in picture.rows:
        assert spans[0].begin_s == 0, name
        assert spans[-1].end_s == pytest.approx(picture.seconds), name
        assert all(one.end_s == pytest.approx(two.begin_s) for one, two in itertools.pairwise(spans))
    states = {span.state for _, spans in picture.rows for span in spans}
    assert {ROLLOUT, JUDGE, TRAINER} <= states
    assert ("switch" in states) is (mode != "disaggregated")
    assert {curve.role for curve in picture.curves} == {ROLLOUT, JUDGE}


def test_of_equal_settings_the_config_is_recommended(tmp_path):
    config = config_of(tmp_path)
    comparison = comparison_of(config, figures(config))
    own = comparison.result(Alternative(config))
    assert Recommendation((own, own)).best is own
