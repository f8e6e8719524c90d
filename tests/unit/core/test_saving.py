"""When a save is due by time."""

from hypothesis import given, strategies as st

from yatt.core.phases.saving import NO_SAVES


def test_a_save_by_time_is_due_at_the_first_iteration_that_ends_after_the_interval():
    began = NO_SAVES.resumed(7, 100.0)
    assert not began.trained(159.9, 60).is_due
    assert began.trained(160.0, 60).is_due
    assert not began.trained(1e9, 0).is_due, "0 is off"
    taken = began.trained(170.0, 60).taken(8, 175.0)
    assert not taken.is_due
    assert not taken.trained(234.0, 60).is_due, "the interval begins when the host copy is taken"
    assert taken.trained(235.0, 60).is_due


def test_a_save_that_is_due_stays_due_until_it_is_taken():
    due = NO_SAVES.trained(60.0, 60)
    assert due.trained(61.0, 0).is_due
    failed = due.taken(1, 61.0).ended(1, is_committed=False)
    assert failed.is_due, "the next iteration is saved in its place"
    assert not due.taken(1, 61.0).ended(1, is_committed=True).is_due


@given(st.lists(st.floats(0.01, 200.0), min_size=1, max_size=40), st.floats(1.0, 300.0))
def test_work_at_risk_is_never_older_than_the_interval_and_one_iteration(steps_s, every_s):
    saving, now_s, at_risk_since_s, last_s = NO_SAVES.resumed(0, 0.0), 0.0, 0.0, 0.0
    for iteration, step_s in enumerate(steps_s, start=1):
        now_s, last_s = now_s + step_s, now_s
        saving = saving.trained(now_s, every_s)
        assert saving.is_due == (now_s - at_risk_since_s >= every_s)
        assert last_s - at_risk_since_s < every_s, "it was saved at the first opportunity"
        if saving.is_due:
            saving = saving.taken(iteration, now_s).ended(iteration, is_committed=True)
            at_risk_since_s = now_s
