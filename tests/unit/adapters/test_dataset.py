"""Prompt files: what is refused before start, and that a row read later is the row that was checked."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.runs import wait_for
from yatt.adapters import dataset
from yatt.adapters.dataset import RowFiles, RowReader, check_rows
from yatt.config.schema import DataSection
from yatt.errors import ConfigError, WorkerFailed

DATA = DataSection(train_files=("x",))
TRUTHS = [4, "4", 2.5, [1, 2], {"numbers": [1, 2.5, None], "deep": {"yes": True}}, True, None, "", 0]


def row(number: int, truth: Any = "4", **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"prompt {number} ü€😀"}]
    return {"prompt": prompt, "data_source": "sums", "reward_model": {"ground_truth": truth}, **more}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(
        "\n".join(json.dumps(each, ensure_ascii=number % 2 == 0) for number, each in enumerate(rows))
    )
    return str(path)


def test_a_ground_truth_keeps_its_type_and_none_are_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [row(number, truth) for number, truth in enumerate(TRUTHS)])
    assert check_rows((file,), DATA) == dataset.RowCounts(rows=len(TRUTHS), without_truth=1)
    with closing(RowFiles((file,), DATA, tmp_path / "scratch")) as read:
        truths = [read.row(number).ground_truth for number in range(len(read))]
    assert truths == TRUTHS
    assert [type(truth) for truth in truths] == [type(truth) for truth in TRUTHS]


def test_rows_over_several_files_of_both_kinds_are_found_by_number_and_by_place(tmp_path: Path) -> None:
    """Row groups that are no multiple of a batch, blank lines, a byte-order mark, no newline at the end."""
    sizes = (1500, 3, 2100, 1, 700)
    rows = [row(number, index={"of": number}) for number in range(sum(sizes))]
    file = tmp_path / "groups.parquet"
    table = pyarrow.Table.from_pylist(rows)
    at = 0
    with parquet.ParquetWriter(file, table.schema) as writer:
        for size in sizes:
            writer.write_table(table.slice(at, size), row_group_size=size)
            at += size
    lines = [json.dumps(row(number)) for number in range(9000, 9004)]
    (tmp_path / "b.jsonl").write_text("\ufeff" + lines[0] + "\r\n\n   \n" + "\n".join(lines[1:]))
    files = (str(file), str(tmp_path / "b.jsonl"), jsonl(tmp_path / "c.jsonl", [row(77)]))
    assert check_rows(files, DATA).rows == len(rows) + 5
    scratch = tmp_path / "scratch"
    with closing(RowFiles(files, DATA, scratch)) as read, closing(RowReader(files, DATA, scratch)) as other:
        numbers = [int(read.row(index).prompt[0]["content"].split()[1]) for index in range(len(read))]
        assert numbers == [*range(len(rows)), *range(9000, 9004), 77]
        for index in random.Random(3).sample(range(len(read)), 200):  # as a reward process reads them
            assert other.read(read.ref(index)) == read.row(index)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', r"bad.jsonl: row 2 is not JSON"),
        (b'{"prompt": "a"}\n[1]', r"row 2 is not an object of columns: \[1\]"),
        (b'{"prompt": "a"}\n\n{"prompt": ""}', r"row 3 has no prompt"),
        (b'{"prompt": [{"role": "user", "content": null}]}', r"row 1 has an unreadable prompt"),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            r"row 1 has an unreadable prompt",
        ),
        (b'{"prompt": 7}', r"row 1 has an unreadable prompt"),
        (b'{"question": "a"}', r"row 1 has no prompt: column 'prompt'"),
        (b'{"prompt": "a\\ud800"}', r"row 1: its prompt contains a lone surrogate"),
        (b'{"prompt": "\xff"}', r"row 1 is not text in UTF-8"),
        (b'{"prompt": "a", "data_source": "b\\ud800"}', r"row 1: its data source contains a lone surrogate"),
        (
            b'{"prompt": "a", "truth": ' + b"9" * 5000 + b"}",
            r"row 1 cannot be read as JSON: Exceeds the limit",
        ),
        ('{"prompt": "a"}'.encode("utf-16"), r"is text in UTF-16"),
        (b"\x1f\x8b\x08\x00", r"is compressed \(gzip\)"),
        (b"[" * 100_000, r"row 1 is nested too deeply"),
        (b"", r"no rows"),
        (b"\n \n", r"no rows"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_row(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        check_rows((str(tmp_path / "bad.jsonl"),), DATA)


def test_a_file_that_is_no_parquet_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"bad.parquet: cannot be read as parquet"):
        check_rows((str(tmp_path / "bad.parquet"),), DATA)
    with pytest.raises(ConfigError, match=r"none.jsonl: no such data file"):
        check_rows((str(tmp_path / "none.jsonl"),), DATA)


def test_a_file_that_changes_under_the_run_costs_the_row_not_the_process(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    jsonl(file, [row(number) for number in range(3)])
    with closing(RowFiles((str(file),), DATA, tmp_path / "scratch")) as read:
        file.write_bytes(file.read_bytes()[:40])
        with pytest.raises(WorkerFailed, match="a row of the data file cannot be read any more"):
            read.row(2)


def test_a_handle_that_went_stale_costs_no_row_and_a_new_one_that_fails_does(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [row(number) for number in range(3)])
    whole = Path(file).read_bytes()
    with closing(RowFiles((file,), DATA, tmp_path / "scratch")) as read:
        os.unlink(file)
        os.mkfifo(file)  # cannot be read at a place, as a stale handle cannot
        tasks = Path("/proc/self/task")
        with ThreadPoolExecutor(2) as pool:  # the first waits in open, the second for the first
            readings = [pool.submit(read.read, read.ref(number), limit_s=0.0) for number in (1, 1)]
            opens = lambda: any("partner" in path.read_text() for path in tasks.glob("*/wchan"))  # noqa: E731
            wait_for(opens, what="one to wait for the other end of the pipe")
            time.sleep(0.1)
            os.rename(file, f"{file}.fifo")
            Path(file).write_bytes(whole)
            os.close(os.open(f"{file}.fifo", os.O_WRONLY))
            results = [reading.exception() or reading.result() for reading in readings]
        assert sorted(isinstance(each, WorkerFailed) for each in results) == [False, True]
        assert [found for found in results if found == read.row(1)]


def test_the_fingerprint_is_of_the_files_bytes_and_order(tmp_path: Path) -> None:
    def fingerprint(*contents: str) -> str:
        files = []
        for number, content in enumerate(contents):
            file = tmp_path / f"{number}.jsonl"
            file.write_text(content)
            files.append(str(file))
        with closing(RowFiles(tuple(files), DATA, tmp_path / "scratch")) as read:
            return read.fingerprint

    one, two = '{"prompt": "a"}\n', '{"prompt": "b"}\n'
    assert fingerprint(one, two) == fingerprint(one, two)
    others = {
        fingerprint(two, one),
        fingerprint(one + two),
        fingerprint(one, two + "\n"),
        fingerprint(one, one),
    }
    assert len(others | {fingerprint(one, two)}) == 5


def test_rows_are_read_in_many_threads_at_once(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [row(number) for number in range(64)])
    for _ in range(30):
        with closing(RowFiles((file,), DATA, tmp_path / "scratch")) as read, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(read.row, range(64)))
        assert [each.prompt[0]["content"].split()[1] for each in found] == [str(n) for n in range(64)]
