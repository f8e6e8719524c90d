"""Prompt files: what is refused before start, and that a row read later is the row that was checked."""

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.runs import wait_for
from yatt.adapters.inputs import dataset
from yatt.adapters.inputs.data_rows import called_columns, config_columns
from yatt.adapters.inputs.dataset import RowFiles, RowReader, check_rows, read_data_rows
from yatt.adapters.inputs.media import media_of
from yatt.adapters.inputs.parquet_rows import BATCH_BYTES, parquet_batches
from yatt.config.load import parse_resolved
from yatt.config.schema import DataSection, RunConfig
from yatt.errors import ConfigError, WorkerFailed
from yatt.records.message import RowRef

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


def test_a_key_that_is_null_in_every_message_of_a_parquet_file_is_read(tmp_path: Path) -> None:
    """Files of chats have `name` in every message; Arrow gives such a column a type of nulls."""
    said = [[{"role": role, "content": f"{number}", "name": None} for role in "ab"] for number in range(3000)]
    words = pyarrow.array([f"{number % 7}" for number in range(3000)]).dictionary_encode()
    file = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.table({"prompt": said, "data_source": words}), file)
    with closing(RowFiles((str(file),), DATA, tmp_path / "scratch")) as read:
        found = [read.row(number) for number in range(len(read))]
    assert [row.data_source for row in found] == words.to_pylist()
    assert [[each["content"] for each in row.prompt] for row in found] == [[f"{n}"] * 2 for n in range(3000)]


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


def with_pictures(path: Path, size: int, **more: Any) -> str:
    """A file of 48 rows in row groups of 8, each row with a picture of `size` bytes."""
    rows = [row(number, images=[{"bytes": os.urandom(size), "path": None}], **more) for number in range(48)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=8)
    return str(path)


@contextmanager
def counted_pool() -> Iterator[pyarrow.MemoryPool]:
    """A pool that counts what Arrow takes from now on."""
    counted, before = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(counted)
    try:
        yield counted
    finally:
        pyarrow.set_memory_pool(before)


def test_columns_that_nobody_needs_are_not_read(tmp_path: Path) -> None:
    file = with_pictures(tmp_path / "pictures.parquet", 1 << 20)
    scratch = tmp_path / "scratch"
    with counted_pool() as pool:
        assert check_rows((file,), DATA).rows == 48
        with closing(RowFiles((file,), DATA, scratch, columns=config_columns(DATA))) as read:
            assert set(read.row(47).raw) == {"prompt", "data_source", "reward_model"}
        assert pool.max_memory() < 4 << 20
        assert sum(each.stat().st_size for each in scratch.iterdir()) < 1 << 20, "nor copied"
        rows = read_data_rows((file,), DATA, is_whole=True)
        assert sum(len(each.raw) for each, _ in rows) == 48 * 4
        assert pool.max_memory() > 8 << 20, "else the pool counts nothing"


def test_batches_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    path = Path(with_pictures(tmp_path / "pictures.parquet", 4 << 20))
    batches = [(len(batch), batch.nbytes) for batch in parquet_batches(path)]
    assert sum(rows for rows, _ in batches) == 48
    assert max(size for _, size in batches) <= BATCH_BYTES
    scratch = tmp_path / "scratch"
    with closing(RowFiles((str(path),), DATA, scratch)) as read:
        assert [read.row(n).prompt[0]["content"].split()[1] for n in range(48)] == [str(n) for n in range(48)]
        with pytest.raises(WorkerFailed, match="there is no row 49"):
            read.read(RowRef(0, 48, 0), limit_s=0)


def test_functions_that_take_whole_rows_get_all_columns() -> None:
    def config(**sections: Any) -> RunConfig:
        base = {"data": {"train_files": ["x"]}, "run": {"dir": "r"}, "model": {"path": "m"}}
        base |= {
            "optimizer": {"lr": 0.1},
            "trainer": dict.fromkeys(("total_iterations", "train_batch_size", "mini_batch_size"), 1),
        }
        return parse_resolved(json.dumps(base | sections))

    verl, trl = ({"name": style, "path": "r.py", "style": style} for style in ("verl", "trl"))
    assert called_columns(config(rewards=[verl])) == config_columns(DATA)
    assert called_columns(config(rewards=[verl, trl])) is None
    assert called_columns(config(rewards=[verl], environment={"path": "e.py"})) is None


def test_messages_show_a_row_without_its_bytes_and_without_end(tmp_path: Path) -> None:
    file = tmp_path / "other.parquet"
    rows = [{"question": "a" * 10_000, "images": [{"bytes": b"\x89PNG" * 4096, "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(ConfigError) as found:
        check_rows((str(file),), DATA)
    says = str(found.value)
    assert "has no prompt: column 'prompt'" in says
    assert "'question': 'aaa" in says
    assert "<16,384 bytes>" in says
    assert says.endswith("Correct the row, or write the column in data.prompt_key.")
    assert len(says) < 700
    with pytest.raises(ConfigError, match=r"<16,384 bytes>.* is not what was made") as found:
        media_of({"bytes": b"\x89PNG" * 4096}, "row 1")
    assert len(str(found.value)) < 400
