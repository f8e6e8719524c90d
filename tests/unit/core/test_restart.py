"""When another attempt is worth it."""

from yatt.core.restart import AttemptEnd, may_begin


def ends(*pairs):
    return [AttemptEnd(code, committed) for code, committed in pairs]


def test_crashes_that_get_further_go_on():
    assert may_begin(ends(*((1, n) for n in range(50))), committed=49, max_without_progress=3).again


def test_a_start_counts_the_failures_of_the_starts_before_it():
    assert may_begin([], committed=0, max_without_progress=3).again
    assert may_begin(ends((1, 4), (1, 4)), committed=4, max_without_progress=3).again
    stuck = may_begin(ends((1, 4), (1, 4), (1, 4)), committed=4, max_without_progress=3)
    assert (stuck.again, stuck.exit_code) == (False, 93)
    assert "3 attempts in a row failed without a checkpoint after iteration 4" in stuck.reason
    assert may_begin(ends((1, 2), (1, 4), (1, 4)), committed=4, max_without_progress=3).again


def test_what_was_stopped_from_outside_counts_less():
    stopped = ends(*[(75, 4)] * 4, *[(None, 4)] * 4)
    assert may_begin(stopped, committed=4, max_without_progress=3).again
    too_often = may_begin([*stopped, AttemptEnd(None, 4)], committed=4, max_without_progress=3)
    assert (too_often.again, too_often.exit_code) == (False, 93)
    assert "9 of them stopped from outside: save more often" in too_often.reason


def test_a_final_end_begins_the_count_anew():
    assert may_begin(ends((1, 4), (1, 4), (2, 4), (1, 4)), committed=4, max_without_progress=3).again
