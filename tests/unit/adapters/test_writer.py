"""Lines for people: whole, once, whatever the filesystem does; and what was lost is told."""

import asyncio
import contextlib
import errno
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs import HANG_S, environment, until, wait_for
from yatt.adapters.files import writer as writer_module
from yatt.adapters.files.lines import read_records
from yatt.adapters.files.writer import BackgroundWriter
from yatt.adapters.processes import log_lines
from yatt.adapters.processes.log_lines import TracebackFormatter
from yatt.adapters.processes.log_thread import logging_by_a_thread
from yatt.control.writers import watch_writer
from yatt.obs.story.events import EventLog

NUM_LINES = 300
SHORT_WRITE = """
import json, resource, signal, sys, time
from pathlib import Path
from yatt.adapters.files.writer import BackgroundWriter

path, limit = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
writer = BackgroundWriter()
lines = [json.dumps({"number": number}) for number in range(int(sys.argv[3]))]
if sys.argv[4] == "several":  # as another controller sends them
    writer.append(path, "\\n".join(lines))
else:
    for line in lines:
        writer.append(path, line)
while not writer.failing_s:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert writer.close(180)
"""


@pytest.mark.parametrize("limit", [4000, 4001, 4009, 4015, 4016])
@pytest.mark.parametrize("at_once", ["one", "several"])
def test_after_a_short_write_each_line_is_in_the_file_whole_and_once(
    tmp_path: Path, limit: int, at_once: str
) -> None:
    path = tmp_path / "events.jsonl"
    argv = [sys.executable, "-c", SHORT_WRITE, str(path), str(limit), str(NUM_LINES), at_once]
    subprocess.run(argv, env=environment(), check=True, timeout=HANG_S)
    records, num_torn = read_records(path)
    assert [record["number"] for record in records] == list(range(NUM_LINES))
    assert num_torn <= 1


def test_a_line_follows_a_torn_one_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"number": 0}\n{"num')
    writer = BackgroundWriter()
    writer.append(path, '{"number": 1}')
    assert writer.close(HANG_S)
    assert path.read_bytes() == b'{"number": 0}\n{"num\n{"number": 1}\n'


def test_many_lines_make_few_writes_and_a_lone_one_or_a_flush_waits_for_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(writer_module, "BETWEEN_S", 60.0)
    path, num_writes = tmp_path / "events.jsonl", 0

    def place(path: Path) -> Path:
        nonlocal num_writes
        num_writes += 1
        return path

    writer = BackgroundWriter(place=place)
    writer.append(path, "0")
    wait_for(lambda: path.exists() and path.read_text() == "0\n", what="the lone line")
    for number in range(1, 100):
        writer.append(path, str(number))
        time.sleep(0.001)
    assert num_writes == 1
    assert writer.flush(HANG_S)
    assert num_writes == 2
    assert path.read_text().split() == [str(number) for number in range(100)]
    assert writer.close(HANG_S)


@pytest.mark.parametrize("fails", ["call", "place"])
def test_an_error_that_is_not_the_filesystems_costs_what_was_written_and_nothing_else(
    tmp_path: Path, fails: str, caplog
) -> None:
    def place(path: Path) -> Path:
        if path.name == "bad":
            raise ValueError("a defect")
        return path

    def broken() -> None:
        raise ValueError("a defect")

    writer = BackgroundWriter(place=place)
    writer.call(broken) if fails == "call" else writer.append(tmp_path / "bad", "{}")
    writer.append(tmp_path / "good", "{}")
    assert writer.close(HANG_S)
    assert (tmp_path / "good").read_text() == "{}\n"
    assert writer.num_lost == 1
    assert "is skipped" in caplog.text


def test_lines_that_are_lost_while_a_write_hangs_are_told_afterwards(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(writer_module, "HANG_S", 0.2)
    gate, path = threading.Event(), tmp_path / "events.jsonl"
    writer = BackgroundWriter(most_bytes=1000)
    told = list[dict]()

    def sink(line: str) -> None:
        told.append(json.loads(line))
        writer.append(path, line)

    events = EventLog(attempt=1, node=0, role="controller", sink=sink)
    writer.call(lambda: gate.wait(HANG_S) and None)

    async def main() -> None:
        watching = asyncio.create_task(watch_writer(writer, events, period_s=0.05))
        for number in range(100):
            writer.append(path, json.dumps({"number": number, "filling": "x" * 20}))
        await until(lambda: "events cannot be written" in caplog.text, "the watch to see that it is late")
        gate.set()
        await until(
            lambda: sum(each["lost"] for each in told if "lost" in each) == writer.num_lost, "the news"
        )
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(main())
    assert writer.close(HANG_S)
    records = read_records(path)[0]
    late = [record for record in records if record.get("kind") == "telemetry.late"]
    lines = [record for record in records if "number" in record]
    assert 0 < len(lines) < 100
    assert sum(record["lost"] for record in late) == 100 - len(lines)
    assert max(record["seconds"] for record in late) > 0


def test_lines_of_several_files_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Events, samples and metrics take turns. With a pause after each turn, a run with short iterations had
    more and more lines in memory."""
    writer, gate = BackgroundWriter(), threading.Event()
    waits: list[float | None] = []
    waiting = writer._arrival.wait_for

    def counted(condition: Callable[[], object], timeout_s: float | None = None) -> object:
        waits.append(timeout_s)
        return waiting(condition, timeout_s)

    writer._arrival.wait_for = counted
    writer.call(gate.wait)
    for number in range(300):
        writer.append(tmp_path / f"{number % 3}.jsonl", json.dumps({"number": number}))
    gate.set()
    paths = [tmp_path / f"{name}.jsonl" for name in range(3)]
    wait_for(lambda: sum(len(read_records(path)[0]) for path in paths) == 300, what="all lines")
    assert waits.count(writer_module.BETWEEN_S) <= 2
    assert writer.close(HANG_S)
    for name, path in enumerate(paths):
        assert [record["number"] for record in read_records(path)[0]] == list(range(name, 300, 3))


def test_a_line_that_was_written_in_part_is_completed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the file would be another one by then: a full file is shortened before a write."""
    places, tries = iter(tmp_path / f"{name}.jsonl" for name in "ab"), []
    writing = writer_module.os.write

    def failing(descriptor: int, data: bytes) -> int:
        tries.append(len(data))
        if len(tries) == 2:
            raise OSError(errno.ENOSPC, "no space")
        return writing(descriptor, data[:10] if len(tries) == 1 else data)

    monkeypatch.setattr(writer_module.os, "write", failing)
    writer = BackgroundWriter(place=lambda _: next(places))
    writer.append(tmp_path / "any.jsonl", json.dumps({"number": 1, "text": "a line that is cut"}))
    assert writer.close(HANG_S)
    assert len(read_records(tmp_path / "a.jsonl")[0]) == 1 and not (tmp_path / "b.jsonl").exists()


LOG_AND_END = """
import logging, os, sys
from yatt.adapters.processes.log_thread import logging_by_a_thread
import yatt.adapters.processes.log_thread as module
module.LAST_S = 0.5
with logging_by_a_thread(most_waiting=10):
    for number in range(20_000):
        logging.getLogger("x").info("line %d", number)
    os.write(1, b"done\\n")
    sys.stdin.readline()
    logging.getLogger("x").info("the last one")
"""


@pytest.fixture
def hanging() -> subprocess.Popen:
    """A process whose log, a full pipe, takes nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOG_AND_END], env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"done\n", "it does not wait for its log"
    yield process
    process.kill()
    process.communicate()


def test_a_log_that_hangs_ends_no_process_and_keeps_none_from_ending(hanging) -> None:
    hanging.stdin.write(b"\n")
    hanging.stdin.flush()
    assert hanging.wait(timeout=HANG_S) == 0


def test_lines_of_a_log_that_were_lost_are_counted_in_it(hanging) -> None:
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(hanging.stderr))
    reader.start()
    wait_for(lambda: len(read) > 100, what="what waited")
    time.sleep(0.5)
    hanging.stdin.write(b"\n")
    hanging.stdin.flush()
    reader.join(timeout=HANG_S)
    kept = sum(b"INFO x line" in line for line in read)
    lost = sum(int(n) for line in read for n in re.findall(rb"(\d+) lines of this log were lost", line))
    assert lost > 0
    assert kept + lost == 20_000
    assert read[-1].endswith(b"the last one\n")


def test_a_log_within_a_process_is_whole_when_it_ends(capfd, monkeypatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # a report with half a character cannot be sent
    with logging_by_a_thread():
        logging.getLogger("x").warning("a word of \ud800 too few")
    assert "WARNING x a word of ? too few" in capfd.readouterr().err


def logged(work: Callable[[int], object], times: int, message: object = "order %s failed") -> None:
    for number in range(times):
        try:
            work(number)
        except Exception as error:
            words = ("SampleRequest",) if message == "order %s failed" else ()
            logging.getLogger("x").exception(error if message is None else message, *words)


def test_a_cause_has_one_traceback_in_a_hundred(capfd: pytest.CaptureFixture[str]) -> None:
    def failing(number: int) -> None:
        if number % 2:
            raise ValueError(f"odd: {number}")
        raise ValueError(f"even: {number}")

    with logging_by_a_thread():
        logged(failing, 198)
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("Traceback (most recent call last):") == 2, "of two lines of code"
    assert "ValueError: odd: 1" in lines and "ValueError: even: 0" in lines
    assert lines[-1].endswith(
        "ERROR x order SampleRequest failed: ValueError: odd: 197 (99 times so far; its traceback is above)"
    )


def test_a_traceback_is_shown_again_at_each_power_of_a_hundred() -> None:
    """By the formatter alone: so many lines may be more than a log takes in time, and it drops some then."""
    keeper, error = TracebackFormatter(), (ValueError, ValueError("odd"), None)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "m", None, error)
    texts = (keeper.format(record) for _ in range(20_000))
    assert [number for number, text in enumerate(texts, 1) if text.startswith("m\n")] == [1, 100, 10_000]


def test_causes_that_end_in_one_line_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    def wrapped(number: int) -> None:
        try:
            raise (ValueError if number % 2 else KeyError)(number)
        except (ValueError, KeyError) as error:
            raise RuntimeError("call failed") from error

    def in_group(number: int) -> None:
        raise ExceptionGroup("in a group", [ValueError(number) if number % 2 else KeyError(number)])

    def by_way_of(number: int) -> None:
        if number % 2:
            fail(number)
        fail(number)

    def fail(number: int) -> None:
        raise ValueError(number)

    for work in (wrapped, in_group, by_way_of):
        with logging_by_a_thread():
            logged(work, 20)
        assert capfd.readouterr().err.count("order SampleRequest failed\n") == 2, work


def test_an_odd_call_of_the_log_costs_its_line_and_no_call(capfd: pytest.CaptureFixture[str]) -> None:
    """What a user's function logs must not become an error of the function."""

    @dataclass
    class Odd(Exception):
        value: int

    def odd(number: int) -> None:
        raise Odd(number)

    with logging_by_a_thread():
        logged(odd, 3, {"a": 1})
        logged(odd, 3, None)
    text = capfd.readouterr().err
    assert text.count("Traceback (most") == 1 and "(6 times so far; its traceback is above)" in text
    keeper = TracebackFormatter()
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "m", None, (Odd, Odd(1), None))
    assert [keeper.format(record)[:2] for _ in range(2)] == ["m\n", "m:"]
    assert record.exc_info and record.msg == "m", "others format it too"
    assert all(type(cause) is int for cause in keeper._counts), "no error is kept alive"


def test_causes_that_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MOST_CAUSES", 3)
    kept = TracebackFormatter()
    for number in range(20):
        error = (ValueError, ValueError(number), None)
        kept.format(logging.LogRecord("x", logging.ERROR, "f", number, "m", None, error))
        assert len(kept._counts) <= 3
