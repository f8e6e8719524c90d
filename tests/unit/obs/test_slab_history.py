"""What slabs did in a run, from its events."""

import pytest

from tests.obs_runs import event, logged, make_run
from tests.slab_runs import (
    JUDGE,
    MOVING,
    batch,
    choice,
    moved,
    roles,
    rollout_begins,
    split_move,
    tail_move,
    unfit,
    use,
)
from yatt.obs.story.history import read_events
from yatt.obs.story.slab_history import FLOOR, SPLIT, TAIL, SlabHistory, slab_history
from yatt.obs.story.slabs_now import split_in_words


def event_of(record):
    (found,) = logged(record)
    return found.event


def history(*events) -> SlabHistory:
    return slab_history(logged(*events))


def test_the_bound_is_the_busy_share_of_all_engine_seconds():
    found = event_of(batch(1, 1, 10.0, roles(3, 1)))
    assert found.bound_s == pytest.approx(10.0 * (3 * 0.5 + 1) / 4)


def test_engines_side_by_side_count_as_much_as_one_that_fills_the_slab():
    narrow = use(1, busy_s=20.0, held_s=40.0, engines=4)
    wide = use(1, busy_s=10.0, held_s=10.0)
    found = event_of(batch(1, 1, 10.0, {"rollout": narrow, JUDGE: wide}))
    assert found.busy_share == pytest.approx((0.5 + 1) / 2)


def test_without_held_seconds_there_is_no_bound():
    old = {name: {**role, "held_s": None} for name, role in roles(3, 1).items()}
    found = event_of(batch(1, 1, 10.0, old))
    assert found.bound_s is None and found.roles["rollout"].idle == 0.5


def test_moves_belong_to_the_batch_that_is_sampled_and_have_their_answers():
    found = history(*MOVING)
    assert [(m.batch, m.slab, m.reason, m.has_moved, m.is_unfit) for m in found.moves] == [
        ((1, 2), "n1s0", SPLIT, True, False),
        ((1, 2), "n1s1", TAIL, True, False),
        ((1, 2), "n1s2", TAIL, False, True),
    ]
    assert found.num_moves == {SPLIT: 1, TAIL: 2} and found.num_not_moved == 1
    assert found.moves[1].seconds == 1.25
    assert found.moves[1].tail is not None and found.moves[1].tail.gain_s == 12.0 - 6.0 - 1.5


def test_a_choice_is_for_the_next_batch():
    found = history(*MOVING)
    assert found.newest() == [(1, 1), (1, 2), (1, 3)]
    assert found.choices[1, 2].gain_s == 1.5 and found.choices[1, 2].is_change
    assert not found.choices[1, 3].is_change
    assert [found.split_of(key).get(JUDGE) for key in found.newest()] == [1, 2, 2]


def test_with_a_batch_ahead_a_move_belongs_to_the_batch_that_is_sampled_beside_training():
    found = history(
        event(1, "batch.begin", iteration=1, policy_version=0),
        rollout_begins(1, 1),
        event(5, "batch.begin", iteration=2, policy_version=0),
        batch(6, 1, 4.0, roles(3, 1)),
        rollout_begins(7, 1),
        tail_move(8, "n1s1"),
    )
    assert [move.batch for move in found.moves] == [(1, 2)]


def test_an_answer_without_an_order_repairs_a_role_below_its_floor():
    found = history(batch(1, 1, 4.0, roles(3, 1)), moved(2, "n1s1"), moved(3, "n1s1"))
    assert [(m.slab, m.before, m.after, m.reason) for m in found.moves] == [("n1s1", "", JUDGE, FLOOR)] * 2


def test_an_answer_without_an_order_may_belong_to_the_split_that_was_chosen_before():
    chosen = choice(2, (3, 1), (2, 2), 4.0, 3.0)
    found = history(
        batch(1, 1, 4.0, roles(3, 1)), chosen, moved(3, "n1s1"), moved(4, "n1s2", after="rollout")
    )
    assert [(move.batch, move.reason) for move in found.moves] == [((1, 2), SPLIT), ((1, 2), FLOOR)]


def test_an_order_that_is_sent_again_is_one_move():
    found = history(split_move(1, "n1s1"), moved(2, "n1s1", has_moved=False), moved(3, "n1s1"))
    assert [move.has_moved for move in found.moves] == [True]
    assert found.num_not_moved == 1


def test_batches_that_a_later_attempt_repeats_are_those_of_that_attempt():
    first = [batch(i, i, 4.0, roles(3, 1)) for i in (1, 2, 3)]
    found = history(*first, batch(9, 2, 5.0, roles(2, 2), attempt=2))
    assert found.newest() == [(1, 1), (2, 2)]
    again = history(*first, batch(9, 2, 5.0, roles(2, 2)))
    assert again.newest() == [(1, 1), (1, 2)] and again.batches[1, 2].seconds == 5.0


def test_a_choice_of_an_earlier_attempt_is_not_that_of_the_next_one():
    found = history(
        batch(1, 1, 4.0, roles(3, 1)), choice(2, (3, 1), (2, 2), 4.0, 3.0),
        batch(9, 1, 5.0, roles(3, 1), attempt=2), choice(10, (3, 1), (3, 1), 5.0, 5.0, attempt=2),
    )  # fmt: skip
    assert found.choices[1, 2].is_change and not found.choices[2, 2].is_change


def test_events_about_slabs_are_read_for_the_report(tmp_path):
    events, _ = read_events(make_run(tmp_path, events=MOVING).events)
    found = slab_history(events)
    assert len(found.moves) == 3 and len(found.batches) == 3 and len(found.unfit) == 1


def test_an_unfit_engine_without_a_move_is_kept_too():
    found = history(unfit(1, "n1s2"))
    assert [(each.slab, each.role, each.error) for each in found.unfit] == [("n1s2", JUDGE, "no host memory")]


def test_a_change_in_words_names_the_roles_that_change():
    found = event_of(choice(1, (3, 1), (2, 2), 9.0, 7.5))
    assert split_in_words(found) == "rollout 3 to 2, genrm:judge 1 to 2 (7.5 s predicted instead of 9.0 s)"
