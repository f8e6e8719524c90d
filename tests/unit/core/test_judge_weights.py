"""When a GenRM's weights are chosen, and which hold, whatever is sampled again; every way a run may go."""

import itertools

import pytest
from hypothesis import given, strategies as st

from yatt.core.attempts.claims import Commit
from yatt.core.phases.judge_weights import (
    choice_in_force,
    is_choice_due,
    is_weights_folder,
    needed_folders,
    record_iteration,
    record_name,
    weights_folder,
)

TOTAL = 6


@pytest.mark.parametrize("every", [1, 2, 3, 5, 20])
def test_an_iteration_that_is_sampled_again_has_the_weights_that_it_had(every: int) -> None:
    """All pairs of iterations at which a run is set back, each to any iteration before."""
    for falls in itertools.product(range(1, TOTAL + 1), repeat=4):
        recorded, had, chosen = dict[int, int](), dict[int, int](), itertools.count(1)
        for begin, end in ((1, falls[0]), (min(falls[1], falls[0]), falls[2]), (min(falls[3], 2), TOTAL)):
            for iteration in range(begin, end + 1):
                if is_choice_due(iteration, every, recorded):
                    recorded[iteration] = next(chosen)
                weights = recorded[choice_in_force(iteration, recorded)]
                assert had.setdefault(iteration, weights) == weights
        assert set(recorded) == {begin for begin in range(1, TOTAL + 1, every) if begin in had}


def test_a_run_that_begins_later_chooses_in_its_first_iteration() -> None:
    assert is_choice_due(8, 5, ())
    assert not is_choice_due(9, 5, (8,))
    assert is_choice_due(11, 5, (8,))
    assert choice_in_force(10, (8, 11)) == 8


def test_weights_stay_as_long_as_an_iteration_with_them_may_be_sampled_again() -> None:
    folders = {1: "", 3: "a", 5: "b", 7: "b", 9: "c"}
    assert needed_folders(folders, 1) == {"a", "b", "c"}
    assert needed_folders(folders, 4) == {"a", "b", "c"}
    assert needed_folders(folders, 5) == {"b", "c"}
    assert needed_folders(folders, 12) == {"c"}
    assert needed_folders({}, 3) == set()


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.text())
def test_names_are_read_as_they_are_written_and_lead_nowhere_else(
    iteration: int, attempt: int, run_id: str
) -> None:
    folder = weights_folder(Commit(iteration, attempt), run_id)
    assert is_weights_folder(folder)
    assert record_iteration(record_name(iteration)) == iteration
    assert record_iteration(folder) is None


@pytest.mark.parametrize("name", ["1.json", "../00000001.json", "000000001.json", "00000001.json.x", ""])
def test_other_names_are_no_records(name: str) -> None:
    assert record_iteration(name) is None


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "00000001.000001-436a8a31353", "/00000001.000001-436a8a31353f"]
)
def test_other_names_are_no_folders_of_weights(name: str) -> None:
    assert not is_weights_folder(name)
