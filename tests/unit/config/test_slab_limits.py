"""Floors and ceilings of a dynamic split."""

from typing import Any

import pytest

from tests.moving_slabs import JUDGE, moving_run
from yatt.config.load import load_run_config
from yatt.errors import ConfigError


def faults(tmp_path: Any, place: str = "disaggregated", genrm_gpu_sets: int = 1, **placement: Any) -> str:
    run = moving_run(tmp_path, place, 2, genrm_gpu_sets=genrm_gpu_sets)
    run.settings["placement"].update(placement)
    try:
        load_run_config([run.write()], [])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"min_gpu_sets": {"rollout": 5}}, ""),
        ({"min_gpu_sets": {"rollout": 6}}, "7 in all, but there are 6"),
        ({"min_gpu_sets": {JUDGE: 3}}, "begins with 1 of 6 GPU sets for genrm:judge, but min_gpu_sets"),
        ({"max_gpu_sets": {"rollout": 4}}, "begins with 5 of 6 GPU sets for rollout"),
        ({"max_gpu_sets": {"rollout": 5, JUDGE: 1}}, ""),
        ({"max_gpu_sets": {"rollout": 2, JUDGE: 1}}, "leaves some of 6 GPU sets to nobody"),
        (
            {"min_gpu_sets": {"judge": 1}},
            "'judge' is no role with engines; write one of rollout, genrm:judge",
        ),
        ({"min_gpu_sets": {JUDGE: 3}, "max_gpu_sets": {JUDGE: 2}}, "genrm:judge: 2 is below min_gpu_sets 3"),
        ({"split": "fixed", "min_gpu_sets": {JUDGE: 1}}, "has no effect on a fixed split"),
    ],
)
def test_limits_that_cannot_hold_are_refused(tmp_path: Any, placement: dict[str, Any], says: str):
    found = faults(tmp_path, **placement)
    assert says in found if says else not found, found


def test_a_number_that_leaves_rollout_nothing_is_one_mistake(tmp_path: Any):
    found = faults(tmp_path, genrm_gpu_sets=7)
    assert "1 mistake" in found and "begins with" not in found, found


def test_a_dynamic_split_needs_something_to_split_and_no_fixed_order(tmp_path: Any):
    assert "dynamic moves GPU sets" in faults(tmp_path, "partial", 0, mode="colocated")
    run = moving_run(tmp_path / "other", "partial", 2)
    run.settings["run"]["deterministic"] = True
    with pytest.raises(ConfigError, match="dynamic depends on timing"):
        load_run_config([run.write()], [])
