"""The limit of a trainer node's uploads: its own, or its share of the run's."""

from dataclasses import replace

import pytest

from tests.unit.core.test_placement import config
from yatt.config.check import upload_limit
from yatt.config.sections.operation import CheckpointSection

LIMITS = [(0, 0, 0.0), (100, 0, 100.0), (0, 100, 25.0), (100, 100, 25.0), (10, 100, 10.0)]


@pytest.mark.parametrize(("own", "whole", "limit"), LIMITS)
def test_the_smaller_limit_counts_and_the_runs_is_divided_among_trainer_nodes(
    own: int, whole: int, limit: float
) -> None:
    section = CheckpointSection(max_bytes_per_s=own, max_run_bytes_per_s=whole)
    assert upload_limit(replace(config(4, 1, 0, 0), checkpoint=section)) == limit


def test_engine_nodes_have_no_share() -> None:
    run = config(4, 1, 0, 0)
    placement = replace(run.placement, mode="disaggregated", trainer_nodes=2)
    section = CheckpointSection(max_run_bytes_per_s=100)
    assert upload_limit(replace(run, placement=placement, checkpoint=section)) == 50.0
