"""Published weights as tensors: views of the host copies on this node, without a copy of the model.

A tensor that one host copy contains as a whole is a view of it. Another one (cut for tensor parallelism, or
part of a fused parameter) is put together from its boxes when it is used; what an engine cuts out of it first
is not put together. The trainer's layout and the engine's are independent.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from yatt.adapters.node_local.host_segment import (
    WEIGHTS,
    SegmentReader,
    Stamp,
    segment_path,
    weight_plan_path,
)
from yatt.errors import WorkerFailed
from yatt.records.weights import PlannedWeight, WeightPlan
from yatt.weights.checksum import box_sum, described_sum
from yatt.weights.registered_memory import MemoryRegistrar


@dataclass(frozen=True, slots=True)
class _Source:
    """A box of a tensor; `data` is a view of the segment."""

    offset: tuple[int, ...]
    data: Tensor


class _Mapping:
    """A host copy's segment, mapped without write access and shared: a private mapping would give registered
    pages of its own to this process, which the trainer's next version does not reach."""

    def __init__(self, path: Path) -> None:
        self.reader = SegmentReader(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns that the memory is not writable
            self.data = torch.frombuffer(self.reader.data, dtype=torch.uint8)
        self._is_asked = False

    def register(self, registrar: MemoryRegistrar) -> None:
        """Registers the data with CUDA, until they are unmapped. The first call counts."""
        if not self._is_asked:
            self._is_asked = True
            registrar.register(self.data, self, read_only=True)


class _Mappings:
    """Segments, kept mapped from one version to the next: a host copy is the same file for a whole attempt,
    and to map it anew costs half as much as to copy it (a page fault for each page)."""

    def __init__(self, registrar: MemoryRegistrar) -> None:
        self._kept: dict[Path, tuple[tuple[int, int, int], _Mapping]] = {}
        self._registrar = registrar

    def of(self, path: Path, *, is_for_gpu: bool) -> _Mapping:
        """Returns the segment that is at `path` now.

        Raises:
            WorkerFailed: it is gone.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise WorkerFailed(f"the host copy {path} cannot be opened: {error.strerror}") from error
        identity = found.st_dev, found.st_ino, found.st_size
        before, mapping = self._kept.get(path, (None, None))
        if before != identity or mapping is None:
            mapping = _Mapping(path)
            self._kept = {kept: each for kept, each in self._kept.items() if kept.exists()}
            self._kept[path] = identity, mapping
        if is_for_gpu:
            mapping.register(self._registrar)
        return mapping


_MAPPINGS = _Mappings(MemoryRegistrar())


class PublishedWeights:
    """The tensors of a publication. They are valid while `check` passes.

    Args:
        stems: of host copies that contain all weights together.
        is_for_gpu: they are copied to a GPU, so the host copies are registered with CUDA.

    Raises:
        WorkerFailed: a host copy is missing or of another version, or a tensor is incomplete.
    """

    def __init__(self, stems: Sequence[Path], stamp: Stamp, *, is_for_gpu: bool = False) -> None:
        self._stamp, self._mappings = stamp, list[_Mapping]()
        self._planned: dict[str, PlannedWeight] = {}
        self._sources: dict[str, dict[tuple[tuple[int, ...], ...], _Source]] = {}
        for stem in stems:
            self._open(stem, is_for_gpu=is_for_gpu)
        self.check()
        for name, planned in self._planned.items():
            found = sum(source.data.numel() for source in self._sources[name].values())
            if found != math.prod(planned.shape):
                raise WorkerFailed(
                    f"{found} of {math.prod(planned.shape)} elements of {name} are in the host copies of "
                    f"{', '.join(stem.name for stem in stems)}"
                )

    def _open(self, stem: Path, *, is_for_gpu: bool) -> None:
        mapping = _MAPPINGS.of(segment_path(stem, WEIGHTS), is_for_gpu=is_for_gpu)
        self._mappings.append(mapping)
        for planned in read_weight_plan(stem).weights:
            self._planned.setdefault(planned.name, planned)
            sources = self._sources.setdefault(planned.name, {})
            dtype = getattr(torch, planned.dtype)
            for box in planned.boxes:
                end = box.at + math.prod(box.shape) * dtype.itemsize
                data = mapping.data[box.at : end].view(dtype).view(box.shape)
                sources[box.offset, box.shape] = _Source(box.offset, data)

    def check(self) -> None:
        """Checks that all host copies still have this version.

        Raises:
            WorkerFailed: one was changed; what was read since the check before is a mix.
        """
        for mapping in self._mappings:
            mapping.reader.check(self._stamp)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor, in the order of the plans."""
        for name in self._planned:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor: a view, or one that is put together when it is used."""
        sources, shape = list(self._sources[name].values()), self._planned[name].shape
        if len(sources) == 1:
            return sources[0].data
        boxed: Tensor = _BoxedTensor(sources, (0,) * len(shape), shape)
        return boxed

    def checksums(self, sums: dict[str, int]) -> dict[str, str]:
        """Returns dtype, shape and, if it is in `sums`, checksum of each tensor, as by `described_sum`."""
        return {
            name: described_sum(planned.dtype, planned.shape, sums.get(name))
            for name, planned in self._planned.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns each tensor's shape."""
        return {name: planned.shape for name, planned in self._planned.items()}

    def damaged(self, sums: dict[str, int]) -> list[str]:
        """Returns the tensors whose bytes have another checksum than `sums` says, or that are missing."""
        return [name for name, total in sums.items() if self._sum(name) != total]

    def _sum(self, name: str) -> int:
        if name not in self._planned:
            return -1
        shape = self._planned[name].shape
        parts = (box_sum(source.data, source.offset, shape) for source in self._sources[name].values())
        return sum(parts) % (1 << 64)


class _BoxedTensor(Tensor):
    """A box of a tensor that is in several sources. A slice of it is another one; anything else first puts it
    together in new memory. Engines slice by `narrow`, which is `slice` here."""

    _sources: Sequence[_Source]
    _offset: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: type["_BoxedTensor"], sources: Sequence[_Source], offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> "_BoxedTensor":
        made: _BoxedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=sources[0].data.dtype)
        made._sources, made._offset = sources, offset
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a method of instances
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default and _copied(*args[:2]):
            return args[0]
        if func is torch.ops.aten.slice.Tensor and (sliced := _sliced(*args)) is not None:
            return sliced
        plain = tree_map(_whole, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def whole(self) -> Tensor:
        """Returns the box in one piece: a view if one source has all of it, otherwise a copy."""
        parts = self.parts()
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(tuple(self.shape), dtype=self.dtype)
        for place, data in parts:
            whole[place] = data
        return whole

    def parts(self) -> list[tuple[tuple[slice, ...], Tensor]]:
        """Returns the parts that sources have: place in this box, and elements."""
        shape = tuple(self.shape)
        return [part for source in self._sources if (part := self._common(source, shape)) is not None]

    def _common(self, source: _Source, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], Tensor] | None:
        here, there = [], []
        for mine, size, its, its_size in zip(
            self._offset, shape, source.offset, source.data.shape, strict=True
        ):
            begin, end = max(mine, its), min(mine + size, its + its_size)
            if begin >= end:
                return None
            here.append(slice(begin - mine, end - mine))
            there.append(slice(begin - its, end - its))
        return tuple(here), source.data[tuple(there)]


def _sliced(
    box: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    """The slice as a smaller box; None if it is not one."""
    if not isinstance(box, _BoxedTensor):
        return None
    begin, stop, stride = slice(start, end, step).indices(box.shape[dim])
    if stride != 1 or stop <= begin:
        return None
    dim %= box.dim()
    offset, shape = list(box._offset), list(box.shape)
    offset[dim] += begin
    shape[dim] = stop - begin
    smaller: Tensor = _BoxedTensor(box._sources, tuple(offset), tuple(shape))
    return smaller


def _copied(target: Any, box: Any) -> bool:
    """Copies a box into a tensor of its shape without putting it together first; False if it is neither."""
    if isinstance(target, _BoxedTensor) or not isinstance(box, _BoxedTensor) or target.shape != box.shape:
        return False
    for place, data in box.parts():
        target[place].copy_(data)
    return True


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, _BoxedTensor) else value


def read_weight_plan(stem: Path) -> WeightPlan:
    """Reads the list of weights of a host copy.

    Raises:
        WorkerFailed: there is none.
    """
    try:
        return msgspec.msgpack.decode(weight_plan_path(stem).read_bytes(), type=WeightPlan)
    except (OSError, msgspec.DecodeError) as error:
        path = weight_plan_path(stem)
        raise WorkerFailed(f"{path} cannot be read as a list of weights: {error}") from error
