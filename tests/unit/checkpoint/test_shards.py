"""Boxes in any number of dimensions: whatever cut wrote them, any other cut reads them."""

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load_file

from tests.shard_files import write_shards
from yatt.checkpoint.local import shards as shards_module
from yatt.checkpoint.local.shards import Shard, read_shards
from yatt.checkpoint.store.store import FolderStore
from yatt.errors import CheckpointError

SHAPE = (4, 6, 3)


def cut(whole, parts, fill=None):
    """Shards of `whole`, cut into parts[d] pieces along dimension d."""
    steps = [size // count for size, count in zip(whole.shape, parts, strict=True)]
    shards = []
    for place in itertools.product(*(range(count) for count in parts)):
        offset = tuple(index * step for index, step in zip(place, steps, strict=True))
        window = tuple(slice(o, o + s) for o, s in zip(offset, steps, strict=True))
        tensor = whole[window].clone() if fill is None else torch.full(tuple(steps), fill)
        shards.append(Shard(key="w", global_shape=tuple(whole.shape), offset=offset, tensor=tensor))
    return shards


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


@pytest.fixture
def whole():
    return torch.arange(72, dtype=torch.float32).view(SHAPE)


@pytest.mark.parametrize("wrote", [(1, 1, 1), (2, 1, 1), (1, 3, 1), (4, 2, 3)])
@pytest.mark.parametrize("reads", [(1, 1, 1), (2, 2, 1), (1, 6, 1), (4, 3, 3)])
def test_any_cut_reads_any_other(store, whole, wrote, reads):
    files = [write_shards(store, f"rank-{rank}", [shard]) for rank, shard in enumerate(cut(whole, wrote))]
    wanted, expected = cut(whole, reads, fill=-1.0), cut(whole, reads)
    read_shards(store, files, wanted)
    assert all(torch.equal(got.tensor, right.tensor) for got, right in zip(wanted, expected, strict=True))


def test_a_missing_piece_is_named_not_zeroed(store, whole):
    files = [write_shards(store, "rank-0", cut(whole, (2, 1, 1))[:1])]
    with pytest.raises(CheckpointError, match="lacks 36 elements of w"):
        read_shards(store, files, cut(whole, (1, 1, 1)))


def test_an_unknown_tensor_is_named(store, whole):
    files = [write_shards(store, "rank-0", cut(whole, (1, 1, 1)))]
    other = [dataclasses.replace(shard, key="v") for shard in cut(whole, (1, 1, 1))]
    with pytest.raises(CheckpointError, match="elements of v"):
        read_shards(store, files, other)


@pytest.mark.parametrize("harm", ["short", "garbage", "missing"])
def test_a_damaged_file_is_refused(store, whole, tmp_path, harm):
    file = write_shards(store, "rank-0", cut(whole, (1, 1, 1)))
    path = tmp_path / "rank-0"
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-8] if harm == "short" else data[:-8] + b"12345678")
    with pytest.raises(CheckpointError, match="rank-0"):
        read_shards(store, [file], cut(whole, (1, 1, 1)))


def test_another_models_shape_or_dtype_is_refused(store):
    files = [write_shards(store, "rank-0", cut(torch.ones(62, 4), (1, 1)))]
    wanted = cut(torch.zeros(64, 4), (2, 1), fill=-1.0)
    with pytest.raises(CheckpointError, match=r"w was saved as \(62, 4\), the model wants \(64, 4\)"):
        read_shards(store, files, wanted)
    wanted = cut(torch.zeros(62, 4).bfloat16(), (1, 1))
    with pytest.raises(CheckpointError, match="w was saved as float32, the model wants bfloat16"):
        read_shards(store, files, wanted)


def test_a_shard_is_a_safetensors_file(store, whole, tmp_path):
    write_shards(store, "rank-0.safetensors", cut(whole, (2, 1, 1)))
    tensors = load_file(tmp_path / "rank-0.safetensors")
    assert torch.equal(torch.cat([tensors["0"], tensors["1"]]), whole)


def test_large_boxes_are_written_in_pieces_and_only_the_needed_ones_are_fetched(store, monkeypatch):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 64)
    saved, ticks = torch.arange(400.0).view(20, 20), []
    file = write_shards(store, "rank-0", cut(saved, (1, 1)), lambda: ticks.append(1))
    assert len(file.tensors) == len(ticks) >= 25
    assert max(piece.size_bytes for piece in file.tensors) <= 80
    fetched = []
    read_ranges = store.read_ranges
    monkeypatch.setattr(
        store, "read_ranges", lambda name, ranges: fetched.extend(ranges) or read_ranges(name, ranges)
    )
    wanted = Shard(key="w", global_shape=(20, 20), offset=(7, 3), tensor=torch.zeros(2, 5))
    read_shards(store, [file], [wanted])
    assert torch.equal(wanted.tensor, saved[7:9, 3:8])
    assert 0 < len(fetched) <= 6


def test_damage_in_a_piece_that_is_not_needed_is_not_met(store, tmp_path, whole):
    file = write_shards(store, "rank-0", cut(whole, (2, 1, 1)))
    path = tmp_path / "rank-0"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    first, second = cut(whole, (2, 1, 1), fill=-1.0)
    read_shards(store, [file], [first])
    with pytest.raises(CheckpointError, match="rank-0 is not what was saved: of w at byte"):
        read_shards(store, [file], [second])


def test_every_dtype_comes_back_as_it_was(store):
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        saved = torch.arange(6).to(dtype).view(2, 3)
        files = [write_shards(store, f"rank-{dtype}", cut(saved, (1, 1)))]
        wanted = [Shard(key="w", global_shape=(2, 3), offset=(0, 0), tensor=torch.zeros_like(saved))]
        read_shards(store, files, wanted)
        assert torch.equal(wanted[0].tensor, saved)
        assert files[0].tensors[0].dtype == str(dtype).removeprefix("torch.")
