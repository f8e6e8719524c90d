import gc
import logging
import warnings
from pathlib import Path

import torch

from yatt.adapters.node_local.host_segment import SegmentReader, SegmentWriter
from yatt.weights.registered_memory import READ_ONLY_FLAGS, WRITABLE_FLAGS, MemoryRegistrar

ALREADY_REGISTERED, NOT_REGISTERED, NOT_MAPPED, NOT_SUPPORTED = 712, 713, 1, 801


def is_mapped(address):
    bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in bounds)


class Cuda:
    """CUDA's rules: an address is registered once, only while it is mapped; errors stay until read."""

    def __init__(self, limit_bytes=1 << 30):
        self.calls, self.registered, self.error, self.limit_bytes = [], {}, 0, limit_bytes

    def register(self, address, size_bytes, flags):
        self.calls.append(("register", address, flags))
        if address in self.registered:
            return self._failed(ALREADY_REGISTERED)
        if not is_mapped(address) or size_bytes > self.limit_bytes:
            return self._failed(NOT_MAPPED)
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address):
        self.calls.append(("unregister", address))
        if not is_mapped(address):
            return self._failed(NOT_MAPPED)
        return 0 if self.registered.pop(address, None) else self._failed(NOT_REGISTERED)

    def clear_error(self):
        self.error = 0

    def _failed(self, code):
        self.error = code
        return code


def data_of(segment):
    return torch.frombuffer(segment.data, dtype=torch.uint8)


def test_memory_of_dropped_host_copies_is_given_back_once_and_before_it_is_unmapped(tmp_path, caplog):
    cuda = Cuda()
    registrar, addresses = MemoryRegistrar(cuda), []
    for index in range(6):
        segment = SegmentWriter(tmp_path / f"{index}", 1 << 20)
        whole = data_of(segment)
        addresses.append(whole.data_ptr())
        assert registrar.register(whole, segment, read_only=False), "no earlier host copy is in its way"
        assert cuda.registered == {addresses[-1]: 1 << 20}
        del segment, whole
        gc.collect()
        assert cuda.registered == {} and not is_mapped(addresses[-1])
    assert cuda.calls == [
        call for each in addresses for call in (("register", each, WRITABLE_FLAGS), ("unregister", each))
    ]
    assert len(set(addresses)) < 6, "an address comes again"
    assert (cuda.error, caplog.records) == (0, [])


def test_registered_memory_is_given_back_when_its_owner_ends_even_if_a_view_lives_longer(tmp_path):
    cuda = Cuda()
    segment = SegmentWriter(tmp_path / "segment", 4096)
    view = data_of(segment)[64:]
    MemoryRegistrar(cuda).register(data_of(segment), segment, read_only=False)
    del segment
    gc.collect()
    assert cuda.registered == {}
    assert int(view.sum()) == 0, "and is still mapped"


def test_memory_that_is_mapped_without_write_access_is_registered_as_such(tmp_path):
    cuda = Cuda()
    SegmentWriter(tmp_path / "segment", 4096)
    reader = SegmentReader(tmp_path / "segment")
    with warnings.catch_warnings(action="ignore"):  # "not writable", once in a process
        whole = data_of(reader)
    assert MemoryRegistrar(cuda).register(whole, reader, read_only=True)
    assert cuda.calls == [("register", whole.data_ptr(), READ_ONLY_FLAGS)]


def test_a_failed_registration_leaves_no_error_and_one_warning(tmp_path, caplog):
    cuda = Cuda(limit_bytes=4096)
    registrar = MemoryRegistrar(cuda)
    segments = [SegmentWriter(tmp_path / f"{index}", size) for index, size in enumerate((8192, 8192, 4096))]
    registered = [registrar.register(data_of(segment), segment, read_only=False) for segment in segments]
    assert registered == [False, False, True]
    assert cuda.error == 0, "the next kernel does not fail"
    assert ["ulimit -l" in record.message for record in caplog.records] == [True]
    segments.clear()
    gc.collect()
    assert [call[0] for call in cuda.calls] == ["register"] * 3 + ["unregister"], "only what is registered"


def test_a_refused_end_of_a_registration_leaves_no_error(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    cuda = Cuda()
    segment = SegmentWriter(tmp_path / "segment", 4096)
    MemoryRegistrar(cuda).register(data_of(segment), segment, read_only=False)
    cuda.registered.clear()
    del segment
    gc.collect()
    assert cuda.error == 0
    assert "stays registered with CUDA (cudaHostUnregister: error 713)" in caplog.text


def test_empty_memory_is_not_registered():
    cuda = Cuda()
    assert not MemoryRegistrar(cuda).register(torch.empty(0), object(), read_only=False)
    assert cuda.calls == []


def test_a_driver_that_cannot_do_it_is_told_apart_from_a_limit(tmp_path, caplog):
    class Unable(Cuda):
        def register(self, address, size_bytes, flags):
            return self._failed(NOT_SUPPORTED)

    segment = SegmentWriter(tmp_path / "segment", 4096)
    assert not MemoryRegistrar(Unable()).register(data_of(segment), segment, read_only=True)
    assert "error 801" in caplog.text and "there is no cure" in caplog.text and "ulimit" not in caplog.text
