"""CUDA registers host copies of trainers and engines as the tests without a GPU assume."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from yatt.adapters.node_local.host_segment import SegmentReader, SegmentWriter
from yatt.weights.registered_memory import MemoryRegistrar

pytestmark = pytest.mark.gpu
SIZE = 64 << 20


@pytest.fixture
def folder():
    """In memory, as host copies are: files of a disk cannot be page-locked for writing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def memory_of(segment: SegmentReader | SegmentWriter) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.frombuffer(segment.data, dtype=torch.uint8)


def test_a_host_copy_is_page_locked_for_its_writer_and_its_reader(folder):
    torch.zeros(1, device="cuda")
    registrar = MemoryRegistrar()
    writer = SegmentWriter(folder / "segment", SIZE)
    reader = SegmentReader(folder / "segment")
    assert registrar.register(memory_of(writer), writer, read_only=False)
    assert registrar.register(memory_of(reader), reader, read_only=True)
    assert memory_of(writer).is_pinned() and memory_of(reader).is_pinned()
    memory_of(writer).copy_(torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert int(memory_of(reader).to("cuda").min()) == 7


def test_a_failed_registration_is_no_error_of_the_next_kernel(folder):
    torch.zeros(1, device="cuda")
    writer, other = SegmentWriter(folder / "segment", SIZE), SegmentWriter(folder / "other", SIZE)
    memory = memory_of(writer)
    assert MemoryRegistrar().register(memory, writer, read_only=False)
    assert not MemoryRegistrar().register(memory, other, read_only=False), "it is registered already"
    assert torch.ones(8, device="cuda").add_(1).sum().item() == 16


def test_an_address_that_comes_again_can_be_registered(folder):
    torch.zeros(1, device="cuda")
    for index in range(6):
        writer = SegmentWriter(folder / f"{index}", SIZE)
        assert MemoryRegistrar().register(memory_of(writer), writer, read_only=False)
