"""The goodput ledger of any history, however damaged: nothing raises, and the categories add up."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.obs_runs import BEGAN_S, event, logged, make_run
from yatt.config.sections.operation import CheckpointSection
from yatt.core.figures.goodput import CATEGORIES, QUEUE, RUN, START_UP, Now, goodput_seconds
from yatt.obs.story.account import AccountFold, account_of, facts_of
from yatt.obs.story.history import attempts_of, read_events
from yatt.obs.story.spans import AttemptRecord, SpanFold, attempt_spans
from yatt.obs.story.view import RunView

PARTS = ("prepare", "enter", "act")
CHECKPOINT = CheckpointSection(save_every=1)


class Script:
    """Writes the events of a run as its leader emits them; `at_s` is true time."""

    def __init__(self, seed: int) -> None:
        self.draw, self.at_s, self.events, self.attempt, self.skew_s = random.Random(seed), 0.0, [], 0, 0.0

    def emit(self, kind: str, **fields) -> None:
        self.at_s += self.draw.uniform(0.0, 0.01)
        made = event(self.at_s + self.skew_s, kind, attempt=self.attempt, **fields)
        self.events.append({**made, "t": int(self.at_s * 1e9)})

    def phase(self, name: str, iteration: int, *, dies: bool = False, parts=PARTS) -> None:
        began_s = self.at_s
        for part in parts:
            kind = "phase.begin" if part == parts[0] else "phase.part"
            self.emit(kind, phase=name, iteration=iteration, part=part)
            self.at_s += self.draw.uniform(0.1, 3.0)
        if self.draw.random() < 0.1:
            self.emit(
                "ckpt.backpressure",
                node=self.draw.randrange(3),
                iteration=iteration,
                size_bytes=1,
                seconds=0.2,
            )
        self.emit("rollout.group.accept", number=iteration)
        if not dies:
            self.emit("phase.end", phase=name, iteration=iteration, seconds=self.at_s - began_s)

    def begin(self, resumed: int) -> None:
        self.attempt += 1
        self.at_s += self.draw.uniform(0.0, 20.0)
        self.skew_s = self.draw.uniform(-5.0, 5.0)
        self.emit("attempt.start", nodes=2)
        self.phase("join", 0, parts=("act",))
        self.emit("phase.begin", phase="build", iteration=0, part="prepare")
        self.at_s += 1.0
        self.emit("attempt.resume", iteration=resumed, seconds=0.5)
        self.emit("phase.end", phase="build", iteration=0, seconds=1.0)
        self.phase("publish", resumed)
        self.phase("sync", resumed)

    def run(self, *, attempts: int, iterations: int) -> list[dict]:
        committed = 0
        for number in range(attempts):
            self.begin(committed)
            is_last = number == attempts - 1
            dies_in = 0 if is_last else self.draw.randint(committed + 1, iterations)
            for iteration in range(committed + 1, iterations + 1):
                self.phase("rollout", iteration)
                self.phase("train", iteration, dies=iteration == dies_in)
                if iteration == dies_in:
                    break
                self.phase("save", iteration)
                if self.draw.random() < 0.7 or iteration == iterations:
                    committed = iteration
                    self.emit("ckpt.commit", iteration=iteration, size_bytes=5, seconds=1.5)
                self.phase("publish", iteration)
            if is_last:
                self.emit("attempt.end", exit_code=0, reason="finished")
        return self.events


def folded(events, facts=None) -> tuple:
    folds: dict[int, SpanFold] = {}
    for each in logged(*events):
        folds.setdefault(each.attempt, SpanFold()).take(each)
    return tuple(attempt_spans(folds, facts or {}).values())


def check(spans, now=None) -> dict[str, float]:
    """The categories add up to the wall time, and none is negative."""
    seconds = goodput_seconds(spans, now)
    assert set(seconds) == set(CATEGORIES)
    assert all(spent_s >= 0 and math.isfinite(spent_s) for spent_s in seconds.values()), seconds
    if spans:
        last_s = last_moment(spans, now)
        assert sum(seconds.values()) == pytest.approx(last_s - spans[0].begin_s, abs=1e-5)
    account_of(spans, CHECKPOINT, now)
    return seconds


def last_moment(spans, now) -> float:
    """When the last attempt ends, or now. An attempt is over when the next one begins, unless clocks differ
    so much that the next one seems to begin before it."""
    at_s = spans[0].begin_s
    for index, span in enumerate(spans):
        next_s = spans[index + 1].begin_s if index + 1 < len(spans) else math.inf
        at_s = max(at_s, span.begin_s, min(span.end_s, next_s) if next_s >= span.begin_s else span.end_s)
    return max(at_s, now.at_s) if now is not None else at_s


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_cut_at_any_line_keeps_its_sum(seed: int) -> None:
    events = Script(seed).run(attempts=3, iterations=4)
    assert len(events) > 100 and logged(*events)
    before_s = 0.0
    for end in range(len(events) + 1):
        spans = folded(events[:end])
        over = check(spans)
        for doing in (RUN, QUEUE, START_UP):
            check(spans, Now(at_s=BEGAN_S + 100, doing=doing))
            late = check(spans, Now(at_s=BEGAN_S + 10_000, doing=doing))
            if spans:
                assert sum(late.values()) == pytest.approx(BEGAN_S + 10_000 - spans[0].begin_s, abs=1e-5)
        wall_s = sum(over.values())
        assert wall_s >= before_s - 10.1, "only the clock of another host takes time back"
        before_s = wall_s


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.0, 0.9), st.booleans(), st.floats(-50.0, 500.0))
def test_a_history_with_any_lines_missing_keeps_its_sum(seed, attempts, lost, is_shuffled, now_s) -> None:
    draw = random.Random(seed)
    events = [each for each in Script(seed).run(attempts=attempts, iterations=3) if draw.random() >= lost]
    if is_shuffled:
        draw.shuffle(events)
    spans = folded(events)
    check(spans)
    check(spans, Now(at_s=BEGAN_S + now_s, doing=draw.choice((RUN, QUEUE, START_UP))))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_recorded_facts_of_any_kind_keep_the_sum(seed, data) -> None:
    at_s = st.one_of(st.just(math.inf), st.floats(BEGAN_S - 50, BEGAN_S + 200))
    facts = {
        number: AttemptRecord(
            began_s=data.draw(at_s), started_s=data.draw(at_s), ended_s=data.draw(at_s),
            queued_s=data.draw(at_s), start=data.draw(st.sampled_from(["", "a", "b"])),
            submission=data.draw(st.sampled_from(["", "s"])),
            job=data.draw(st.sampled_from(["", "7"])), committed=data.draw(st.integers(0, 5)),
            is_over=data.draw(st.booleans()), exit_code=data.draw(st.sampled_from([None, 0, 1, 75])),
        )
        for number in data.draw(st.sets(st.integers(1, 5)))
    }  # fmt: skip
    check(folded(Script(seed).run(attempts=3, iterations=2), facts))


def test_what_is_computed_is_what_happened() -> None:
    """One history without skew, whose seconds are known by hand."""
    script = Script(0)
    script.draw.uniform = lambda low, high: 1.0 if high == 3.0 else 0.0  # type: ignore[method-assign]
    script.draw.random = lambda: 0.5  # type: ignore[method-assign]
    events = script.run(attempts=2, iterations=2)
    spans = folded(events)
    dead = max(each["iteration"] for each in events if each["attempt"] == 1 and each["kind"] == "phase.begin")
    committed = max(
        [0, *(e["iteration"] for e in events if e["kind"] == "ckpt.commit" and e["attempt"] == 1)]
    )
    seconds = check(spans)
    lost_s = sum(
        span.end_s - span.begin_s
        for span in spans[0].phases
        if span.iteration > committed and span.phase != "join"
    )
    assert dead > committed and seconds["wasted"] == pytest.approx(lost_s) and lost_s >= 5.0
    kept = [span for attempt in spans for span in attempt.phases if span.phase in ("rollout", "train")]
    kept_s = sum(
        span.end_s - span.act_s for span in kept if span not in spans[0].phases or span.iteration <= committed
    )
    assert seconds["rollout"] + seconds["train"] == pytest.approx(kept_s)
    assert seconds["restore"] == (0.5 if committed else 0.0)


def test_a_begin_that_is_lost_is_known_from_the_end_and_an_end_from_the_next_begin() -> None:
    def one(at_s, kind, phase, **more):
        return event(at_s, kind, phase=phase, iteration=1, **more)

    (span,) = folded([
        event(0, "attempt.start", nodes=1), one(20, "phase.end", "rollout", seconds=15.0),
        one(20, "phase.begin", "train"), one(32, "phase.begin", "save"),
        one(33, "phase.end", "save", seconds=1.0),
    ])  # fmt: skip
    shown = [(each.phase, each.end_s - each.begin_s) for each in span.phases]
    assert shown == [("rollout", 15), ("train", 12), ("save", 1)]


def test_a_clock_that_is_set_during_an_attempt_changes_no_duration() -> None:
    events = [event(at_s, "phase.begin", phase="train", iteration=1) for at_s in (10, 20)]
    events[1]["wall"] = event(3, "x")["wall"]
    (span,) = folded(events)
    assert span.phases[0].end_s - span.phases[0].begin_s == 10


@pytest.mark.parametrize("seed", range(3))
def test_files_that_are_cut_anywhere_give_an_account_a_view_and_a_report(tmp_path: Path, seed: int) -> None:
    """Through the readers: bytes are cut inside lines, and lines are replaced by what is no event."""
    draw = random.Random(seed)
    events = Script(seed).run(attempts=2, iterations=2)
    paths = make_run(tmp_path, events=events)
    whole = paths.events.read_bytes()
    for _ in range(25):
        data = whole[: draw.randrange(len(whole))]
        lines = data.split(b"\n")
        lines[draw.randrange(len(lines))] = draw.choice([b"", b"{", b'{"kind": "phase.end"}', b"\xff\xfe"])
        paths.events.write_bytes(b"\n".join(lines))
        fold = AccountFold()
        view = RunView(paths, 24, also=fold.take)
        view.refresh()
        streamed = fold.account(paths, CHECKPOINT, None)
        attempts = attempts_of(read_events(paths.events)[0], facts_of(paths))
        read = account_of([each.span for each in attempts], CHECKPOINT, None)
        assert streamed.seconds == pytest.approx(read.seconds), "both readers agree"
        check(tuple(each.span for each in attempts))
        json.dumps(streamed.as_json(), allow_nan=False)
        streamed.in_words()
