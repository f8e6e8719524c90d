"""The host copy of a rank's state: what it sleeps on, what engines load and what a checkpoint contains.

Works on storages: each has a place in host memory that is allocated once and kept. `copy` copies what has
changed since the last copy; `offload` copies too, then resizes the storages to 0. Every view of a storage
(parameters in their flat buffer, gradients, optimizer shards) stays valid and has its content again after
`onload`. The same code frees memory on CPU, so that a test without GPU covers it. An area may live on the
host all the time (`keep_away`); an optimizer's step has it on the device part by part (`visited`). A second
model may be apart: it and all else take turns on the device (`swap_in`, `swap_out`).

Weights and optimizer state are in named segments (`yatt.adapters.node_local.host_segment`), stamped with
attempt and version: other processes of the node read them. Other tensors (a reference, buffers) have private
memory.

Source: verl's Megatron workers resize the flat buffers. Every storage is treated alike here, because
swapping `p.data` would break aliases.
"""

import ctypes
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from yatt.adapters.node_local.host_segment import (
    ALIGN_BYTES,
    SegmentWriter,
    Stamp,
    aligned_size,
    segment_path,
)
from yatt.errors import WorkerFailed
from yatt.trainer.mcore.parted_step import HostRun, Parts, Piece, all_here, visit_on_host
from yatt.weights.registered_memory import MemoryRegistrar

CLEAR_WORKSPACES = "_cuda_clearCublasWorkspaces"
"""Of torch._C."""


@dataclass(slots=True)
class _Held:
    """One storage and its place on the host.

    `host`: None if it comes back as zeros. `area`: its segment; "" if the memory is private. `at`: its first
    byte there. `is_current`: whether the host has its present content. `is_constant`: it never changes.
    `is_apart`: it is on the device only between `swap_in` and `swap_out`.
    """

    storage: torch.UntypedStorage
    size_bytes: int
    host: Tensor | None = None
    area: str = ""
    at: int = 0
    is_constant: bool = False
    is_current: bool = False
    is_away: bool = False
    is_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """What a process keeps of a model between iterations.

    Args:
        areas: tensors of each segment.
        private: tensors whose content must come back, and that no other process reads.
        constant: the same, and they never change.
        dropped: tensors that may come back as zeros (gradients).
    """

    areas: dict[str, list[Tensor]]
    private: Sequence[Tensor] = ()
    constant: Sequence[Tensor] = ()
    dropped: Sequence[Tensor] = ()


class HostCopy:
    """Copies the storages of tensors to the host, and moves them there and back.

    Args:
        stem: path of the segments, without the area's name.
    """

    def __init__(self, stem: Path, attempt: int) -> None:
        self._held: dict[int, _Held] = {}
        self._stem, self._attempt, self._version = stem, attempt, 0
        self._segments: dict[str, SegmentWriter] = {}
        self._data: dict[str, Tensor] = {}
        """The bytes of each segment."""
        self._stamped: dict[str, int] = {}
        """The version of each segment's stamp, where it is valid."""
        self._kept_away: frozenset[str] = frozenset()
        """Areas that live on the host."""
        self._torn: set[str] = set()
        """Areas whose content on the host is of no version: they are being changed, or that has failed."""

    def add(self, kept: KeptTensors, *, is_apart: bool = False) -> None:
        """Allocates the host's memory of these tensors, which stay where they are.

        Raises:
            ConfigError: the memory filesystem has not enough room.
        """
        known = set(self._held)
        for area, tensors in kept.areas.items():
            self._allocate(area, [held for t in tensors if (held := self._add(t)) is not None])
        for others, is_constant in ((kept.private, False), (kept.constant, True)):
            for tensor in others:
                if (held := self._add(tensor)) is not None:
                    held.host, held.is_constant = _private_memory(held), is_constant
        for tensor in kept.dropped:
            self._add(tensor)
        for key in self._held.keys() - known:
            self._held[key].is_apart = is_apart

    def _add(self, tensor: Tensor) -> _Held | None:
        """Notes a tensor's storage; returns None if it is known or empty. One that was made without memory is
        away: its content are the zeros of a new segment."""
        storage = tensor.untyped_storage()
        is_away = storage.size() == 0
        size_bytes = tensor.nbytes if is_away else storage.size()
        if size_bytes == 0 or storage._cdata in self._held:
            return None
        held = _Held(storage, size_bytes, is_away=is_away, is_current=is_away)
        self._held[storage._cdata] = held
        return held

    def _allocate(self, area: str, members: Sequence[_Held]) -> None:
        size_bytes = 0
        for held in members:
            held.area, held.at = area, size_bytes
            size_bytes += aligned_size(held.size_bytes)
        if not size_bytes:
            return
        segment = SegmentWriter(segment_path(self._stem, area), size_bytes)
        self._segments[area] = segment
        self._data[area] = whole = _data_of(segment)
        for held in members:
            held.host = whole[held.at : held.at + held.size_bytes]

    def register_segments(self, registrar: MemoryRegistrar, areas: Iterable[str]) -> None:
        """Registers these segments with CUDA, each until it is unmapped."""
        for area in self._segments.keys() & set(areas):
            registrar.register(self._data[area], self._segments[area], read_only=False)

    # ---- versions -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version of the present content."""
        return self._version

    def changed(self, version: int) -> None:
        """Notes that the content has changed: it is of this policy version now."""
        self._version = version
        self._torn.clear()
        for held in self._held.values():
            held.is_current &= held.is_constant or held.is_away

    @torch.no_grad()
    def copy(self, areas: Iterable[str]) -> int:
        """Brings the segments up to date; returns the number of bytes that were copied.

        Raises:
            WorkerFailed: a step has failed in the middle of a part of the state.
        """
        copied = 0
        for area in [area for area in areas if area in self._segments]:
            if area in self._torn:
                raise WorkerFailed(f"the host copy's {area} was being changed when that failed")
            copied += self._bring_up_to_date(area)
            if self._stamped.get(area) != self._version:
                self._segments[area].complete(Stamp(self._attempt, self._version))
                self._stamped[area] = self._version
        return copied

    def _bring_up_to_date(self, area: str) -> int:
        """Copies what is not current into an area's segment, whose stamp is invalid from then on."""
        stale = [held for held in self._of(area) if not held.is_current]
        if not stale:
            return 0
        self._segments[area].invalidate()
        self._stamped.pop(area, None)
        copied = sum(_to_host(held) for held in stale)
        _wait_for_copies()
        return copied

    def _of(self, area: str) -> list[_Held]:
        return [held for held in self._held.values() if held.area == area]

    def view(self, tensor: Tensor) -> Tensor:
        """The tensor, which may be a view of a larger one; or its content on the host, if it is away."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None or not held.is_away:
            return tensor
        assert held.host is not None, "what has a content"
        begin = int(tensor.storage_offset()) * tensor.element_size()
        return held.host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def overwrite(self, area: str) -> None:
        """Notes that `view`s of an area are written to: its stamp is invalid until `changed` and `copy`."""
        if area in self._kept_away and area in self._segments:
            self._segments[area].invalidate()
            self._stamped.pop(area, None)
            self._torn.add(area)

    def place(self, tensor: Tensor) -> tuple[str, int]:
        """Returns area and first byte of a tensor, which may be a view of a larger one, or of `view`."""
        storage, begin = tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size()
        for area, data in self._data.items():
            if data.untyped_storage()._cdata == storage:
                return area, begin
        held = self._held[storage]
        assert held.area, "only weights and optimizer state are in segments"
        return held.area, held.at + begin

    # ---- device memory --------------------------------------------------------------------------

    @torch.no_grad()
    def offload(self) -> None:
        """Copies to the host and frees the device's memory; a second call does nothing."""
        self.copy(self._segments)
        self._leave_device(list(self._held.values()))

    @torch.no_grad()
    def onload(self) -> None:
        """Allocates and copies back all but what is kept away or apart; a second call does nothing."""
        self._enter_device(is_apart=False)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Begins the turn of what is apart: it comes to the device, which all else leaves before. Does
        nothing if nothing is apart."""
        if not self._apart():
            return
        self.copy({held.area for held in self._held.values() if held.area and not held.is_apart})
        self._leave_device([held for held in self._held.values() if not held.is_apart])
        self._enter_device(is_apart=True)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Ends the turn of what is apart, which has changed: its segments have no valid stamp until `changed`
        and `copy`."""
        if not (apart := self._apart()):
            return
        for held in apart:
            held.is_current &= held.is_constant or held.is_away
        for area in {held.area for held in apart if held.area}:
            self._torn.add(area)
            self._bring_up_to_date(area)
        self._leave_device(apart)
        self._enter_device(is_apart=False)

    def _apart(self) -> list[_Held]:
        return [held for held in self._held.values() if held.is_apart]

    def _enter_device(self, *, is_apart: bool) -> None:
        for held in self._held.values():
            if held.is_apart is is_apart and held.area not in self._kept_away:
                _to_device(held)

    def _leave_device(self, leaving: Sequence[_Held]) -> None:
        """Frees the device's memory of storages, of which those of segments are copied."""
        for held in leaving:
            if held.host is not None and not held.is_current:
                _to_host(held)
        _wait_for_copies()
        for held in leaving:
            _free(held)
        if torch.cuda.is_available():
            _empty_device_cache()
        else:
            _give_back_freed_memory()

    @torch.no_grad()
    def keep_away(self, area: str) -> None:
        """From now on keeps this area on the host."""
        self._kept_away |= {area}
        self._put_away(area)

    def visited(self, parts: Parts) -> Generator[list[Tensor], None, None]:
        """Yields the content of each part's pieces on the device; see `Visit`.

        What is kept away has its new content on the host at the end. Its segment has no valid stamp then,
        until `changed` and `copy`.
        """
        runs = [self._runs(part) for part in parts]
        if not any(runs):
            yield from all_here(parts)
            return
        for area in self._kept_away:
            self.overwrite(area)
        yield from visit_on_host(parts, runs, next(piece.tensor.device for part in parts for piece in part))

    def _runs(self, part: Sequence[Piece]) -> list[HostRun]:
        """Those of a part's pieces that are kept away, by adjacent bytes on the host."""
        runs = list[HostRun]()
        area, end = "", -ALIGN_BYTES
        for number, (tensor, begin, last) in enumerate(part):
            held = self._held[tensor.untyped_storage()._cdata]
            if held.area not in self._kept_away:
                continue
            first, size = held.at + begin * tensor.element_size(), (last - begin) * tensor.element_size()
            data, members = runs.pop() if area == held.area and 0 <= first - end < ALIGN_BYTES else (None, [])
            start = first if data is None else end - data.nbytes
            area, end = held.area, first + size
            runs.append(HostRun(self._data[area][start:end], [*members, (number, first - start)]))
        return runs

    @torch.no_grad()
    def _put_away(self, area: str) -> None:
        self._bring_up_to_date(area)
        for held in self._of(area):
            _free(held)

    @property
    def device_bytes(self) -> int:
        """Bytes that these storages now hold on the device."""
        return sum(held.storage.size() for held in self._held.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that these storages have."""
        return sum(held.size_bytes for held in self._held.values() if held.host is not None)


def _to_device(held: _Held) -> None:
    """Gives a storage its memory and its content back, if it is away."""
    if not held.is_away:
        return
    held.storage.resize_(held.size_bytes)
    flat = _bytes_of(held.storage)
    if held.host is None:
        flat.zero_()
    else:
        flat.copy_(held.host)
    held.is_away = False


def _free(held: _Held) -> None:
    held.storage.resize_(0)
    held.is_away = True


def _to_host(held: _Held) -> int:
    """Begins to copy a storage to its place; returns its size in bytes."""
    assert held.host is not None and not held.is_away, "what is away is current"
    held.host.copy_(_bytes_of(held.storage), non_blocking=True)
    held.is_current = True
    return held.size_bytes


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _private_memory(held: _Held) -> Tensor:
    is_cuda = held.storage.device.type == "cuda"
    return torch.empty(held.size_bytes, dtype=torch.uint8, pin_memory=is_cuda)


def _data_of(segment: SegmentWriter) -> Tensor:
    return torch.frombuffer(segment.data, dtype=torch.uint8)


def _empty_device_cache() -> None:
    """Returns the allocator's free blocks to the device, and cuBLAS's workspaces with them: 32 MiB for each
    thread that multiplied, on Hopper."""
    # torch has no public function for it. Without this one the workspaces stay, and nothing else fails.
    clear = getattr(torch._C, CLEAR_WORKSPACES, None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def _give_back_freed_memory() -> None:
    """Returns freed heap memory to the system, so that the process's memory shows what it uses. glibc keeps
    about 700 MiB of activations with 5 M parameters; a C library without `malloc_trim` keeps none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
