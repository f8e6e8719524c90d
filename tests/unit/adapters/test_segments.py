"""A log in segments: no reader loses or doubles a line over a rotation, and the whole stays bounded."""

import itertools
import json
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.obs_runs import event, make_run, metrics
from tests.runs import HANG_S, environment
from yatt.adapters.files import segments
from yatt.adapters.files.lines import accept_all
from yatt.adapters.files.segments import Rotation, SegmentTail, newest_segment, segments_of
from yatt.adapters.files.writer import BackgroundWriter
from yatt.launch.folder.folder import ready_people_files
from yatt.obs.story.events import reason_of_end
from yatt.obs.story.history import attempts_of, read_events
from yatt.obs.story.view import RunView


def write(rotation: Rotation, lines: "list[str]") -> None:
    """Through the writer of a run; each line may be in a write of its own."""
    writer = BackgroundWriter(place=rotation.place)
    for line in lines:
        writer.append(rotation.first, line)
    assert writer.close(HANG_S)


def rotated(folder: Path, most_bytes: int = 200, keep: int = 10**6) -> Rotation:
    return Rotation(folder / "events.jsonl", most_bytes, keep)


def one_by_one(rotation: Rotation, lines: "list[str]") -> None:
    for line in lines:
        with rotation.place(rotation.first).open("a") as file:
            file.write(line + "\n")


def numbered(begin: int, end: int) -> list[str]:
    return [json.dumps({"number": number}) for number in range(begin, end)]


def read(tail: SegmentTail) -> list[int]:
    return [record["number"] for batch in tail.batches() for record in batch]


def test_a_follower_gets_every_line_once_over_many_rotations(tmp_path: Path) -> None:
    rotation, chance, found = rotated(tmp_path), random.Random(7), []
    tail, end = SegmentTail(rotation.first, accept_all), 0
    for _ in range(200):
        begin, end = end, end + chance.randrange(12)
        one_by_one(rotation, numbered(begin, end))
        if chance.random() < 0.4:
            found += read(tail)
    found += read(tail)
    assert found == list(range(end)) and len(segments_of(rotation.first)) > 50
    assert read(SegmentTail(rotation.first, accept_all)) == found and tail.unreadable == 0
    assert max(path.stat().st_size for path in segments_of(rotation.first).values()) < 300


def test_the_writer_thread_rotates_and_loses_nothing(tmp_path: Path) -> None:
    rotation = rotated(tmp_path, most_bytes=5000)
    for begin in range(0, 5000, 1000):
        write(rotation, numbered(begin, begin + 1000))
    assert read(SegmentTail(rotation.first, accept_all)) == list(range(5000))
    assert len(segments_of(rotation.first)) >= 5


def test_two_writers_at_once_lose_nothing_and_a_follower_sees_all(tmp_path: Path) -> None:
    """A stale leader and a newer one; every interleaving of looking and appending that two can have."""
    one, two = rotated(tmp_path), rotated(tmp_path)
    tail, found, numbers = SegmentTail(one.first, accept_all), [], itertools.count()
    for turn in range(300):
        places = [one.place(one.first), two.place(two.first)]
        for place in places if turn % 2 else reversed(places):
            with place.open("a") as file:
                file.write(json.dumps({"number": next(numbers)}) + "\n")
        found += read(tail) if turn % 3 == 0 else []
    found += read(tail)
    assert sorted(found) == list(range(600)) and len(segments_of(one.first)) > 20


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_writer_that_is_killed_anywhere_costs_no_line_that_was_whole(tmp_path: Path, seed: int) -> None:
    chance, found, lives = random.Random(seed), [], 3
    tail = SegmentTail(tmp_path / "events.jsonl", accept_all)
    for life in range(lives):
        script = [sys.executable, "-m", "tests.segment_writer", str(tmp_path), str(life), "2000"]
        with subprocess.Popen(script, env=environment()) as writer:
            while sum(record["life"] == life for record in found[-5000:]) < 500:
                found += [record for batch in tail.batches() for record in batch]
            time.sleep(chance.random() * 0.05)
            writer.kill()
    found += [record for batch in tail.batches() for record in batch]
    fresh = [
        record for batch in SegmentTail(tmp_path / "events.jsonl", accept_all).batches() for record in batch
    ]
    assert found == fresh
    for life in range(lives):
        numbers = [record["number"] for record in found if record["life"] == life]
        assert numbers == list(range(len(numbers))) and len(numbers) >= 500
    assert tail.unreadable <= lives, "a kill tears one line at most"
    assert len(segments_of(tmp_path / "events.jsonl")) > 10


def test_the_oldest_segments_are_deleted_and_a_follower_goes_on(tmp_path: Path) -> None:
    rotation = rotated(tmp_path, keep=4)
    tail, found = SegmentTail(rotation.first, accept_all), []
    for begin in range(0, 1000, 5):
        one_by_one(rotation, numbered(begin, begin + 5))
        found += read(tail)
    assert found == list(range(1000)), "it was never so late that a segment was gone"
    assert len(segments_of(rotation.first)) == 4 and not rotation.first.exists()
    late = read(SegmentTail(rotation.first, accept_all))
    assert late == list(range(late[0], 1000))
    one_by_one(rotated(tmp_path, keep=4), numbered(1000, 1003))  # the next attempt's writer
    assert read(tail) == [1000, 1001, 1002]


def test_reading_a_long_log_holds_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHUNK_BYTES", 1 << 16)
    rotation = rotated(tmp_path, most_bytes=2 << 20)
    write(rotation, [json.dumps({"number": n, "text": "x" * 200}) for n in range(30_000)])
    size = sum(path.stat().st_size for path in segments_of(rotation.first).values())
    tail, last = SegmentTail(rotation.first, accept_all), -1
    tracemalloc.start()
    for batch in tail.batches():
        assert [record["number"] for record in batch] == list(range(last + 1, last + 1 + len(batch)))
        last = batch[-1]["number"] if batch else last
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last == 29_999 and peak < size / 8, f"{peak} of {size} bytes"


def test_what_is_no_file_in_a_segments_place_is_passed_over(tmp_path: Path) -> None:
    rotation = rotated(tmp_path)
    (tmp_path / "events.000004.jsonl").mkdir()
    one_by_one(rotation, numbered(0, 3))
    assert newest_segment(rotation.first).name == "events.000005.jsonl"
    assert read(SegmentTail(rotation.first, accept_all)) == [0, 1, 2]


def test_the_view_the_report_and_the_reason_of_the_end_read_across_segments(tmp_path: Path) -> None:
    events = [event(0, "attempt.start", nodes=1)]
    for iteration in range(1, 40):
        events += [
            event(iteration, "phase.begin", phase="rollout", iteration=iteration),
            event(iteration + 0.5, "phase.end", phase="rollout", iteration=iteration),
        ]
    events += [event(50, "attempt.end", exit_code=75, reason="stopped"), event(51, "signal", name="SIGTERM")]
    paths = make_run(tmp_path, events=[], rows=metrics(3))
    one_by_one(Rotation(paths.events, 150, 10**6), [json.dumps(each) for each in events])
    assert len(segments_of(paths.events)) > 20
    view = RunView(paths, 40)
    view.refresh()
    assert (view.story.ended, view.story.iteration, view.story.attempt) == ("stopped", 39, 1)
    (attempt,) = attempts_of(read_events(paths.events)[0])
    assert len(attempt.span.phases) == 39 and attempt.reason == "stopped"
    assert reason_of_end(paths.events, 1) == "stopped"


def test_a_view_whose_attempts_start_was_deleted_still_knows_the_attempt(tmp_path: Path) -> None:
    paths = make_run(tmp_path, events=[{**event(1, "phase.begin", phase="train", iteration=7), "attempt": 3}])
    view = RunView(paths, 40)
    view.refresh()
    assert (view.story.attempt, view.story.phase, view.story.iteration) == (3, "train", 7)


def test_a_torn_end_of_the_newest_segment_is_mended_before_the_next_attempt(tmp_path: Path) -> None:
    paths = make_run(tmp_path, events=[])
    rotation = Rotation(paths.events, 100, 10)
    one_by_one(rotation, numbered(0, 30))
    with newest_segment(paths.events).open("a") as file:
        file.write('{"number": 99')
    ready_people_files(paths)
    one_by_one(rotation, numbered(30, 33))
    tail = SegmentTail(paths.events, accept_all)
    assert (
        read(tail) == list(range(read(SegmentTail(paths.events, accept_all))[0], 33)) and tail.unreadable == 1
    )
