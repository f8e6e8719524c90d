"""Floors and ceilings of a dynamic split."""

from typing import Any

import pytest

from tests.moving_slabs import JUDGE, moving_run
from yatt.config.load import load
from yatt.errors import ConfigError


def faults(tmp_path: Any, place: str = "disaggregated", genrm_slabs: int = 1, **placement: Any) -> str:
    run = moving_run(tmp_path, place, 2, genrm_slabs=genrm_slabs)
    run.settings["placement"].update(placement)
    try:
        load([run.write()], [])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"min_slabs": {"rollout": 5}}, ""),
        ({"min_slabs": {"rollout": 6}}, "7 slabs in all, but there are 6"),
        ({"min_slabs": {JUDGE: 3}}, "begins with 1 of 6 slabs for genrm:judge, but min_slabs"),
        ({"max_slabs": {"rollout": 4}}, "begins with 5 of 6 slabs for rollout"),
        ({"max_slabs": {"rollout": 5, JUDGE: 1}}, ""),
        ({"max_slabs": {"rollout": 2, JUDGE: 1}}, "leaves some of 6 slabs to nobody"),
        ({"min_slabs": {"judge": 1}}, "'judge' is no role with engines; write one of rollout, genrm:judge"),
        ({"min_slabs": {JUDGE: 3}, "max_slabs": {JUDGE: 2}}, "genrm:judge: 2 is below min_slabs 3"),
        ({"split": "fixed", "min_slabs": {JUDGE: 1}}, "has no effect on a fixed split"),
    ],
)
def test_limits_that_cannot_hold_are_refused(tmp_path: Any, placement: dict[str, Any], says: str):
    found = faults(tmp_path, **placement)
    assert says in found if says else not found, found


def test_a_dynamic_split_needs_something_to_split_and_no_fixed_order(tmp_path: Any):
    assert "dynamic moves slabs" in faults(tmp_path, "partial", 0, mode="colocated")
    run = moving_run(tmp_path / "other", "partial", 2)
    run.settings["run"]["deterministic"] = True
    with pytest.raises(ConfigError, match="dynamic depends on timing"):
        load([run.write()], [])
