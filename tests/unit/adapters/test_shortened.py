"""A file of lines that is full loses its older half, and nothing else is lost or read twice."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs import HANG_S
from tests.unit.core.test_placement import config
from yatt.adapters.files import shortened
from yatt.adapters.files.lines import read_records
from yatt.adapters.files.shortened import ShortenedFile
from yatt.control.writers import Writers
from yatt.obs.metrics import STEP
from yatt.obs.samples import as_sample
from yatt.obs.terminal.printed_samples import PrintedSamples
from yatt.obs.trackers.follow import Samples
from yatt.paths import RunPaths

MOST_BYTES = 8192


def line(step: int) -> str:
    texts = {"prompt": "p" * (step % 50), "completion": "c"}
    return json.dumps({STEP: step, "attempt": 1, "sample": 0, "reward": 1.0, "scores": {}, **texts})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl"


def append(path: Path, file: ShortenedFile, step: int) -> None:
    file.shorten()
    with path.open("a") as lines:
        lines.write(line(step) + "\n")


def test_a_full_file_keeps_its_newest_lines(path: Path) -> None:
    file = ShortenedFile(path, MOST_BYTES)
    for step in range(500):
        append(path, file, step)
        records, num_bad = read_records(path, as_sample)
        steps = [record[STEP] for record in records]
        assert steps == list(range(steps[0], step + 1)) and not num_bad
        assert path.stat().st_size < MOST_BYTES + 200
    assert path.stat().st_size > MOST_BYTES // 3


def test_who_follows_reads_each_sample_once(path: Path) -> None:
    file = ShortenedFile(path, MOST_BYTES)
    sent, printed = Samples(path, last=-1), PrintedSamples(path, every=1)
    seen: list[int] = []
    shown: list[str] = []
    for step in range(1, 300):
        append(path, file, step)
        if step % 7 == 0:
            seen += [number for number, _ in sent.until(step + 1)]
            shown += [text for text in printed.new() if text.startswith("  iteration")]
    assert seen == list(range(1, seen[-1] + 1)) and len(shown) == len(seen) == 294


def test_a_full_disk_costs_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def full(*_: object) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = ShortenedFile(path, MOST_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(shortened, "publish_stream", full)
        for step in range(200):
            append(path, file, step)
    assert len(read_records(path, as_sample)[0]) == 200
    assert 1 < len(tries) < 20, "not at each line"
    while path.stat().st_size > MOST_BYTES:
        append(path, file, step := step + 1)
    assert read_records(path, as_sample)[0][-1][STEP] == step


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_what_is_no_file_is_left_alone(path: Path, make: object) -> None:
    make(path)
    ShortenedFile(path, 0).shorten()
    assert path.exists() == (make in (os.mkfifo, os.mkdir))


def test_the_writer_of_a_run_shortens_its_samples_only(tmp_path: Path) -> None:
    run = config(1, 1, 1, 0)
    run = replace(run, logging=replace(run.logging, samples_file_bytes=MOST_BYTES))
    node = SimpleNamespace(config=run, paths=RunPaths(tmp_path))
    writers = Writers(node)
    for step in range(300):
        writers.lines.append(node.paths.samples, line(step))
        writers.lines.append(node.paths.metrics, line(step))
        if step % 20 == 0:
            assert writers.lines.flush(HANG_S)
    writers.close()
    assert node.paths.samples.stat().st_size < 2 * MOST_BYTES
    assert len(read_records(node.paths.metrics)[0]) == 300


def test_a_last_line_that_is_long_stays(path: Path) -> None:
    text = json.dumps({STEP: 2, "completion": "c" * 3000})
    path.write_text(f"{line(1)}\n{text}\n")
    ShortenedFile(path, 2048).shorten()
    assert path.read_text() == f"{text}\n"


def test_samples_that_wait_for_a_checkpoint_are_sent_though_their_lines_are_gone(path: Path) -> None:
    file, sent = ShortenedFile(path, MOST_BYTES), Samples(path, last=0)
    for step in range(1, 120):
        for _ in range(3):
            append(path, file, step)
        assert list(sent.until(0)) == []
    whole = list(sent.until(119))
    assert [step for step, _ in whole] == list(range(1, 119))
    assert {len(samples) for _, samples in whole} == {3}
