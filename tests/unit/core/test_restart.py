"""When another attempt is worth it."""

from yatt.core.attempts.restart import AttemptEnd, may_begin


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


def test_two_attempts_with_the_same_exception_about_what_was_asked_for_are_enough():
    def decided(*reasons, codes=(1, 1)):
        found = [AttemptEnd(code, 4, reason) for code, reason in zip(codes, reasons, strict=True)]
        return may_begin(found, committed=4, max_without_progress=3)

    same = decided("trainer-n0r0: TypeError: no pid 12", "trainer-n0r0: TypeError: no pid 13")
    assert (same.again, same.exit_code) == (False, 93)
    assert "2 attempts in a row failed alike without a checkpoint after iteration 4" in same.reason
    assert decided("a: TypeError: x", "a: TypeError: y").again
    nccl = "a: RuntimeError: NCCL communicator was aborted"
    assert decided(nccl, nccl).again, "a machine may be the cause"
    assert decided("a: TypeError: x", "a: TypeError: x", codes=(1, 75)).again
    moved = [AttemptEnd(1, 3, "a: TypeError: x"), AttemptEnd(1, 4, "a: TypeError: x")]
    assert may_begin(moved, committed=4, max_without_progress=3).again, "there was progress between"


def test_what_was_stopped_from_outside_counts_less():
    stopped = ends(*[(75, 4)] * 4, *[(None, 4)] * 4)
    assert may_begin(stopped, committed=4, max_without_progress=3).again
    too_often = may_begin([*stopped, AttemptEnd(None, 4)], committed=4, max_without_progress=3)
    assert (too_often.again, too_often.exit_code) == (False, 93)
    assert "9 of them stopped from outside: save more often" in too_often.reason


def test_a_final_end_begins_the_count_anew():
    assert may_begin(ends((1, 4), (1, 4), (2, 4), (1, 4)), committed=4, max_without_progress=3).again
