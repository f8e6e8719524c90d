"""Files of records: what is whole is read, whatever else is in the file."""

import errno
import os
import random
import tracemalloc

import pytest

from yatt.adapters.files import record_file
from yatt.adapters.files.record_file import PREFIX_BYTES, RecordReader, RecordWriter, encoded_record
from yatt.errors import FolderGone

LINE = b"a format 1\n"
RECORDS = [(n, n % 3, bytes([n]) * n) for n in range(1, 40)]


def written(tmp_path, records=RECORDS):
    path = tmp_path / "folder" / "file"
    writer = RecordWriter(tmp_path, path, LINE)
    for record in records:
        writer.append(*record)
    writer.close()
    return path


def whole(path):
    with RecordReader(path, len(LINE)) as reader:
        assert reader.line == LINE
        return [(p.key, p.rank, reader.data(p)) for p in reader.places()]


def test_what_was_appended_is_read(tmp_path):
    assert whole(written(tmp_path)) == RECORDS


def test_a_torn_tail_is_ignored_wherever_it_is_torn(tmp_path):
    path = written(tmp_path, RECORDS[:3])
    data = path.read_bytes()
    ends = [len(LINE)]
    for record in RECORDS[:3]:
        ends.append(ends[-1] + len(encoded_record(*record)))
    for size in range(len(LINE), len(data) + 1):
        path.write_bytes(data[:size])
        assert whole(path) == RECORDS[: sum(end <= size for end in ends) - 1]


def test_a_flipped_bit_costs_its_record_or_those_behind_it(tmp_path):
    path = written(tmp_path)
    data, draw = path.read_bytes(), random.Random(3)
    for bit in draw.sample(range(8 * len(LINE), 8 * len(data)), 400):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = whole(path)
        damaged = [number for number, record in enumerate(found) if record != RECORDS[number]]
        assert len(damaged) + (len(RECORDS) - len(found) > 0) == 1
        assert all(found[number][2] is None for number in damaged)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_never_a_record_and_takes_no_memory(tmp_path, seed):
    path, draw = tmp_path / "file", random.Random(seed)
    good = encoded_record(1, 1, b"good")
    huge = record_file._PREFIX.pack(7, 7, draw.choice([2**20, 2**40, 2**63, 2**64 - 1]), 0)
    huge += record_file._CHECKSUM.pack(record_file.xxhash.xxh3_64_intdigest(huge))
    path.write_bytes(LINE + good + draw.choice([huge, draw.randbytes(5000), b"\0" * 5000, good[:-1]]))
    tracemalloc.start()
    try:
        assert whole(path) == [(1, 1, b"good")]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_append_that_failed_can_be_repeated(tmp_path, monkeypatch):
    path = tmp_path / "file"
    writer, real, draw, failed = RecordWriter(tmp_path, path, LINE), os.pwrite, random.Random(1), 0

    def fails_often(descriptor, data, at):
        if draw.random() < 0.2:
            raise OSError(errno.EIO, "EIO")
        return real(descriptor, data[: len(data) // 2 + 1], at)

    monkeypatch.setattr(os, "pwrite", fails_often)
    left = RECORDS[:10]
    while left:
        try:
            writer.append(*left[0])
            left = left[1:]
        except OSError:
            failed += 1
    writer.close()
    assert failed > 10
    assert whole(path) == RECORDS[:10]


def test_a_file_that_was_removed_begins_anew(tmp_path):
    path = tmp_path / "file"
    writer = RecordWriter(tmp_path, path, LINE)
    writer.append(*RECORDS[5])
    writer.close()
    path.unlink()
    writer.append(*RECORDS[6])
    assert whole(path) == [RECORDS[6]]
    writer.remove()
    assert not path.exists()


def test_a_folder_that_is_gone_is_not_made_again(tmp_path):
    root = tmp_path / "run"
    with pytest.raises(FolderGone):
        RecordWriter(root, root / "folder" / "file", LINE).append(*RECORDS[0])
    assert not root.exists()


def test_a_prefix_is_as_long_as_it_says():
    assert len(encoded_record(1, 2, b"abc")) == PREFIX_BYTES + 3
