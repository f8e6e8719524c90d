"""Which trainer the runs of this folder have."""

from collections.abc import Iterator

import pytest

from tests.runs import RunFile

REHEARSED = frozenset({
    "test_damaged_runs", "test_data_sources", "test_descriptors", "test_folders", "test_killed_starts",
    "test_left_processes", "test_moving_slabs", "test_open_ports", "test_oversampling",
    "test_planted_credentials", "test_reward_pool", "test_second_start", "test_store_access", "test_terminal",
    "test_training_on_nothing",
})  # fmt: skip
"""Modules whose subject is not what is learned, nor the trainer's processes: their runs have the scripted
trainer (adr/0073)."""


@pytest.fixture(autouse=True, scope="module")
def trainer_of_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before all other fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] in REHEARSED:
            patch.setattr(RunFile, "trainer", "scripted")
        yield
