"""Which trainer the runs of this folder have."""

from collections.abc import Iterator

import pytest

from tests.runs import RunFile

REAL = frozenset({"test_kills_in_placements", "test_nurseries", "test_resume_exact", "test_resume_real"})
"""Modules whose subject is the state of the real trainer, or its processes. In the others it is stores,
folders, leases and nodes; there every sample decides all of the scripted trainer's state (adr/0073)."""


@pytest.fixture(autouse=True, scope="module")
def trainer_of_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before all other fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] not in REAL:
            patch.setattr(RunFile, "trainer", "scripted")
        yield
