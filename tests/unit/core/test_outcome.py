"""What follows from the end of an attempt case by case."""

import pytest

from yatt.core.attempts.outcome import CANCEL, AttemptFacts, Verdict, outcome_of

OWNERS = frozenset({0, 1})


def seen(**changes):
    return outcome_of(AttemptFacts(trainer_nodes=OWNERS, **changes))


@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        ({"ended": {0: 0, 1: 0}}, Verdict.FINISHED, 0),
        ({"ended": {0: 0}, "is_killed": True}, Verdict.FINISHED, 0),
        ({"is_killed": True, "stop": "preempted"}, Verdict.KILLED, None),
        ({"ended": {0: 75}, "stop": "preempted"}, Verdict.SUCCEED, 75),
        ({"ended": {0: 75}, "is_preempted": True}, Verdict.SUCCEED, 75),
        ({"ended": {0: 75}, "stop": CANCEL}, Verdict.CANCELLED, 75),
        ({"ended": {0: 2}, "cause": "the reward raises"}, Verdict.GIVE_UP, 2),
        ({"ended": {0: 93}}, Verdict.GIVE_UP, 93),
        ({"ended": {1: -9}}, Verdict.AGAIN, 1),
        ({"ended": {0: 75}}, Verdict.AGAIN, 1),
        ({"ended": {0: 1}, "dead": frozenset({3})}, Verdict.AGAIN, 1),
        ({"ended": {0: 1}, "dead": frozenset({1})}, Verdict.SUCCEED, None),
        ({"ended": {0: 1}, "dead": frozenset({3}), "can_shrink": False}, Verdict.SUCCEED, None),
        ({}, Verdict.AGAIN, 1),
        ({"unfit": {3: "x"}}, Verdict.AGAIN, None),
        ({"unfit": {3: "x"}, "can_shrink": False}, Verdict.SUCCEED, None),
        ({"unfit": {1: "x"}}, Verdict.SUCCEED, None),
        ({"unfit": {0: "x"}, "ended": {0: 1}}, Verdict.SUCCEED, None),
        ({"unfit": {0: "x"}, "ended": {0: 2}}, Verdict.SUCCEED, None),
        ({"unfit": {0: "x", 1: "y"}, "is_unfit_everywhere": True, "ended": {0: 1}}, Verdict.AGAIN, 1),
        ({"unfit": {0: "x", 1: "y"}, "is_unfit_everywhere": True, "ended": {0: 2}}, Verdict.GIVE_UP, 2),
        ({"unfit": {1: "x"}, "stop": "preempted"}, Verdict.SUCCEED, 75),
        ({"unfit": {1: "x"}, "stop": CANCEL}, Verdict.CANCELLED, 75),
        ({"unfit": {1: "x"}, "is_killed": True}, Verdict.KILLED, None),
    ],
)
def test_the_verdict(changes, verdict, code):
    outcome = seen(**changes)
    assert (outcome.verdict, outcome.exit_code) == (verdict, code)
    assert outcome.reason


def test_a_stop_names_its_reason_and_a_failure_its_cause():
    assert seen(ended={0: 75}, stop="the time limit is near").reason == "the time limit is near"
    assert seen(ended={0: 1}, cause="trainer-n0r0 was killed").reason == "trainer-n0r0 was killed"
    assert seen(ended={0: 0, 1: 0}).reason == "finished"
    assert seen(ended={1: -9}).reason == "node1 was killed by SIGKILL"
    assert "node1 is gone" in seen(ended={0: 1}, dead=frozenset({1})).reason


def test_lost_machines_are_left_out_from_then_on():
    assert seen(ended={0: 1}, dead=frozenset({2, 3})).gone == {2, 3}
    before_it_began = seen(dead=frozenset({2}))
    assert (before_it_began.gone, before_it_began.reason) == ({2}, "node2 is gone")


def test_a_killed_controller_that_trains_is_named_before_what_followed_from_it():
    followed = "trainer-n0r0: Connection closed by peer"
    assert seen(ended={0: 1, 1: -9}, cause=followed).reason == f"node1 was killed by SIGKILL; {followed}"
    assert seen(ended={0: 1, 3: -9}, cause=followed).reason == followed, "engine nodes may be lost"
    assert seen(ended={0: 1, 1: 1}, cause=followed).reason == followed


def test_a_node_that_is_unfit_is_left_out_unless_all_are():
    some = seen(unfit={3: "GPU 1 is lost"}, dead=frozenset({2}))
    assert (some.gone, some.unfit) == ({2, 3}, {3})
    assert some.reason == "node3 is unfit: GPU 1 is lost"
    every = seen(unfit={0: "no disk", 1: "no disk"}, is_unfit_everywhere=True)
    assert (every.gone, every.unfit) == (frozenset(), frozenset())
    assert every.reason == "no node is fit: node0 is unfit: no disk; node1 is unfit: no disk"
    assert seen(unfit={2: "x"}, stop="preempted").gone == {2}
