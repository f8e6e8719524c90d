"""Attempts as spans of time: from events, and from the recorded facts of starts and jobs."""

import math

import pytest

from tests.obs_runs import BEGAN_S, event, logged, make_run
from yatt.adapters.run_folder.ledger import COMMITTED, ENDED, STARTED, write_record
from yatt.core.figures.goodput import RUN, Now, goodput_seconds
from yatt.obs.story.account import facts_of
from yatt.obs.story.spans import AttemptRecord, SpanFold, attempt_spans


def wall(at_s: float) -> str:
    return event(at_s, "x")["wall"]


def started(at_s: float, began_s: float, **more) -> dict:
    return {"wall": wall(at_s), "began": wall(began_s), "submission": "s", **more}


def spans_of(events, facts) -> tuple:
    folds: dict[int, SpanFold] = {}
    for each in logged(*events):
        folds.setdefault(each.attempt, SpanFold()).take(each)
    return tuple(attempt_spans(folds, facts).values())


def spent(events, facts, now=None) -> dict[str, float]:
    return {name: each for name, each in goodput_seconds(spans_of(events, facts), now).items() if each > 1e-6}


def trained(begin_s: float, attempt: int) -> list[dict]:
    """An attempt that trains iteration `attempt` in ten seconds, and commits it."""
    return [
        event(begin_s, "attempt.start", attempt=attempt, nodes=1),
        event(begin_s, "attempt.resume", attempt=attempt, iteration=attempt - 1, seconds=0.0),
        event(begin_s, "phase.begin", attempt=attempt, phase="train", iteration=attempt, part="act"),
        event(begin_s + 10, "phase.end", attempt=attempt, phase="train", iteration=attempt, seconds=10.0),
        event(begin_s + 10, "ckpt.commit", attempt=attempt, iteration=attempt, size_bytes=1, seconds=3.0),
    ]


def facts(**by_number) -> dict[int, AttemptRecord]:
    return {int(name[1:]): AttemptRecord.of(*records, {}) for name, records in by_number.items()}


def test_the_time_before_the_first_event_and_between_attempts_of_one_start_is_start_up():
    known = facts(a1=(started(2, 0), {"wall": wall(25)}), a2=(started(30, 0), {}))
    found = spent([*trained(5, 1), *trained(40, 2)], known)
    assert found == {
        "start-up": pytest.approx(5 + 15),
        "train": pytest.approx(20),
        "other": pytest.approx(10),
    }


def test_a_requeued_job_waited_in_the_queue_from_the_end_of_the_attempt_before():
    known = facts(
        a1=(started(0, 0, job="7", restarts=0), {"wall": wall(16)}),
        a2=(started(81, 80, job="7", restarts=1), {}),
    )
    found = spent([*trained(5, 1), *trained(90, 2)], known)
    assert (found["queue"], found["start-up"]) == (pytest.approx(64), pytest.approx(5 + 10))


def test_a_job_that_was_submitted_later_waited_since_then():
    later = started(81, 80, job="8", restarts=0, submitted=wall(50)) | {"submission": "t"}
    known = facts(a1=(started(0, 0, job="7", restarts=0), {"wall": wall(15)}), a2=(later, {}))
    found = spent([*trained(5, 1), *trained(90, 2)], known)
    assert (found["not running"], found["queue"]) == (pytest.approx(35), pytest.approx(30))
    unknown = facts(a1=(started(0, 0, job="7"), {"wall": wall(15)}), a2=(later | {"submitted": ""}, {}))
    assert "queue" not in spent([*trained(5, 1), *trained(90, 2)], unknown)


def test_work_until_a_recorded_death_is_wasted_although_no_event_came():
    events = [
        event(0, "phase.begin", phase="train", iteration=1, part="prepare"),
        event(1, "lease.grant", slab="n0s0", holder="trainer"),
    ]
    known = facts(a1=(started(0, 0), {"wall": wall(600), "exit_code": 1}))
    assert spent(events, known) == {"wasted": pytest.approx(600)}
    assert spent(events, {}) == {"wasted": pytest.approx(1)}, "without a record the last event counts"


def test_an_attempt_of_which_no_line_is_left_is_known_from_the_ledger():
    known = facts(a1=(started(0, 0), {"wall": wall(40), "committed": 1}), a2=(started(50, 50), {}))
    assert spent(trained(60, 2), known)["start-up"] == pytest.approx(40 + 10)
    silent = [
        event(5, "worker.start", node=1, worker="w", pid=1),
        event(9, "worker.end", node=1, worker="w", how="x"),
    ]
    assert spent(silent, {}) == {"start-up": pytest.approx(4)}, "only events of another node are left"


def test_a_finished_run_kept_all_even_if_the_line_of_a_commit_is_lost():
    events = [*trained(0, 1)[:-1], event(11, "attempt.end", exit_code=0, reason="finished")]
    assert spent(events, {})["train"] == pytest.approx(10)
    assert spent(events[:-1], {}) == {"wasted": pytest.approx(10)}
    ended = facts(a1=({}, {"exit_code": 0}))
    assert spent(events[:-1], ended)["train"] == pytest.approx(10)


def test_a_phase_that_is_begun_again_and_a_part_without_its_begin():
    def part(at_s, name, kind="phase.part"):
        return event(at_s, kind, phase="rollout", iteration=1, part=name)

    again = [
        part(0, "prepare", "phase.begin"), part(1, "enter"), part(3, "act"),
        part(10, "prepare"), part(11, "act"),
        event(20, "phase.end", phase="rollout", iteration=1, seconds=10.0),
    ]  # fmt: skip
    running = Now(at_s=BEGAN_S + 20, doing=RUN)
    assert spent(again, {}, running) == {"switch": pytest.approx(3 + 1), "rollout": pytest.approx(7 + 9)}
    assert spent(again[2:3], {}, running) == {"rollout": pytest.approx(17)}
    assert spent(again[:1], {}, running) == {"switch": pytest.approx(20)}, "it has not entered yet"


def test_other_nodes_bound_nothing_but_the_longest_of_their_stalls_counts():
    def stall(node, seconds, iteration=1):
        fields = {"iteration": iteration, "size_bytes": 1, "seconds": seconds}
        return event(1000 * node + 5, "ckpt.backpressure", node=node, **fields)

    events = [
        event(0, "phase.begin", phase="publish", iteration=1, part="act"), stall(1, 2.0), stall(0, 1.0),
        stall(1, 1.0), event(2000, "phase.begin", node=2, phase="train", iteration=9),
        event(10, "phase.end", phase="publish", iteration=1, seconds=10.0),
        event(10, "phase.begin", phase="train", iteration=2, part="act"), stall(3, 1.5),
        event(20, "phase.end", phase="train", iteration=2, seconds=10.0),
    ]  # fmt: skip
    (span,) = spans_of(events, {})
    assert (span.begin_s, span.end_s) == (BEGAN_S, BEGAN_S + 20)
    assert [each.stall_s for each in span.phases] == [3.0, 1.5]
    found = spent([*events, event(20, "ckpt.commit", iteration=2, size_bytes=1, seconds=9.0)], {})
    assert found == {"start-up": 10, "saving": 1.5, "train": 8.5}, "what is before a rollout is start-up"


def test_facts_are_read_from_the_ledger_and_damaged_ones_are_missing(tmp_path):
    paths = make_run(tmp_path)
    write_record(paths, 1, STARTED, started(2, 1, job="7", restarts=3, submitted="yesterday", launcher={}))
    write_record(paths, 1, ENDED, {"exit_code": "one", "committed": None, "wall": 7})
    write_record(paths, 1, COMMITTED, {"iteration": 6})
    write_record(paths, 2, STARTED, {})
    first, second = facts_of(paths)[1], facts_of(paths)[2]
    assert (first.began_s, first.started_s) == (BEGAN_S + 1, BEGAN_S + 2)
    assert (first.job, first.committed, first.is_over, first.exit_code) == ("7", 6, True, None)
    assert (first.ended_s, first.queued_s) == (math.inf, math.inf)
    assert (second.start, second.is_over) == ("", False)
