"""Published weights as tensors: views of the host copies on this node, without a copy of the model.

A tensor that one host copy contains as a whole is a view of it. Another one (cut for tensor parallelism, or
part of a fused parameter) is put together from its boxes when it is used; what an engine cuts out of it first
is not put together. The trainer's layout and the engine's are independent.

On a node of an engine that spans several, tensors have their full shapes but only the slices that this node's
ranks need. Reading anything else is an error, so an engine cannot take over what is not there.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from yatt.records.weights import PlannedWeight, WeightBox, WeightPlan
from yatt.weights.checksum import box_sum, described_sum
from yatt.weights.registered_memory import MemoryRegistrar
from yatt.weights.slices import Extent, common_extent, part_extent


@dataclass(frozen=True, slots=True)
class _Source:
    """A box of a tensor; `data` is a view of the segment."""

    offset: tuple[int, ...]
    data: Tensor


@dataclass(slots=True)
class _Published:
    """A tensor, the box of it that is here, and where: sources by offset and shape, which do not overlap."""

    planned: PlannedWeight
    here: Extent
    sources: dict[Extent, _Source] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        found: torch.dtype = getattr(torch, self.planned.dtype)
        return found

    def add(self, box: WeightBox, segment: Tensor) -> None:
        """Adds what a box of a segment has of the tensor's part that is needed here."""
        extent = box.offset, box.shape
        if (common := common_extent(extent, self.here)) is None or common in self.sources:
            return
        end = box.at + math.prod(box.shape) * self.dtype.itemsize
        data = segment[box.at : end].view(self.dtype).view(box.shape)
        if common != extent:
            data = data[_within(common, box.offset)]
        self.sources[common] = _Source(common[0], data)


class _Mapping:
    """A host copy's segment, mapped without write access and shared: a private mapping would give registered
    pages of its own to this process, which the trainer's next version does not reach."""

    def __init__(self, path: Path) -> None:
        self.reader = SegmentReader(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns that the memory is not writable
            no_bytes = torch.empty(0, dtype=torch.uint8)  # nothing of this rank is needed here
            self.data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw := self.reader.data) else no_bytes
        self._is_asked = False

    def register(self, registrar: MemoryRegistrar) -> None:
        """Registers the data with CUDA, until they are unmapped. The first call counts."""
        if not self._is_asked and len(self.data):
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
        stems: of host copies that contain all weights together, or all that is needed here.
        part: number of this node in an engine that spans several, if it has only slices; None: it has all.
        is_for_gpu: they are copied to a GPU, so the host copies are registered with CUDA.

    Raises:
        WorkerFailed: a host copy is missing or of another version, or a tensor is incomplete.
    """

    def __init__(
        self, stems: Sequence[Path], stamp: Stamp, *, part: int | None = None, is_for_gpu: bool = False
    ) -> None:
        self._stamp, self._part, self._mappings = stamp, part, list[_Mapping]()
        self._tensors: dict[str, _Published] = {}
        for stem in stems:
            self._open(stem, is_for_gpu=is_for_gpu)
        self.check()
        for name, tensor in self._tensors.items():
            found = sum(source.data.numel() for source in tensor.sources.values())
            if found != math.prod(tensor.here[1]):
                raise WorkerFailed(
                    f"{found} of {math.prod(tensor.here[1])} elements of {name} are in the host copies of "
                    f"{', '.join(stem.name for stem in stems)}"
                )

    def _open(self, stem: Path, *, is_for_gpu: bool) -> None:
        mapping = _MAPPINGS.of(segment_path(stem, WEIGHTS), is_for_gpu=is_for_gpu)
        self._mappings.append(mapping)
        for planned in read_weight_plan(stem).weights:
            if (known := self._tensors.get(planned.name)) is None:
                here = part_extent(planned.shape, planned.cut, self._part)
                known = self._tensors[planned.name] = _Published(planned, here)
            elif (known.planned.shape, known.planned.cut) != (planned.shape, planned.cut):
                raise WorkerFailed(f"{stem.name} has another shape or cut of {planned.name} than the others")
            for box in planned.boxes:
                known.add(box, mapping.data)

    def check(self) -> None:
        """Checks that all host copies still have this version.

        Raises:
            WorkerFailed: one was changed; what was read since the check before is a mix.
        """
        for mapping in self._mappings:
            mapping.reader.check(self._stamp)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor, in the order of the plans."""
        for name in self._tensors:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor: a view, or one that is put together when it is used."""
        found = self._tensors[name]
        shape = found.planned.shape
        zeros = (0,) * len(shape)
        if (whole := found.sources.get((zeros, shape))) is not None:
            return whole.data
        boxed: Tensor = _BoxedTensor(found, zeros, shape)
        return boxed

    def checksums(self, sums: dict[str, int]) -> dict[str, str]:
        """Returns dtype, shape and, if it is in `sums`, checksum of each tensor, as by `described_sum`."""
        return {
            name: described_sum(tensor.planned.dtype, tensor.planned.shape, sums.get(name))
            for name, tensor in self._tensors.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns each tensor's shape."""
        return {name: tensor.planned.shape for name, tensor in self._tensors.items()}

    def damaged(self, sums: dict[str, int]) -> list[str]:
        """Returns tensors whose bytes here have another checksum than `sums` says, and missing ones."""
        return [name for name, total in sums.items() if self._sum(name) != total]

    def _sum(self, name: str) -> int:
        if (found := self._tensors.get(name)) is None:
            return -1
        shape = found.planned.shape
        parts = (box_sum(source.data, source.offset, shape) for source in found.sources.values())
        return sum(parts) % (1 << 64)


class _BoxedTensor(Tensor):
    """A box of a tensor that is in several sources, or not all here. A slice of it is another one; anything
    else first puts it together in new memory. Engines slice by `narrow`, which is `slice` here, and some
    put an expert into a dimension of its own and take it out again."""

    _of: _Published
    _offset: tuple[int, ...]
    _is_stacked: bool

    @staticmethod
    def __new__(
        cls: type["_BoxedTensor"],
        of: _Published,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        is_stacked: bool = False,
    ) -> "_BoxedTensor":
        lead = (1,) if is_stacked else ()
        made: _BoxedTensor = Tensor._make_wrapper_subclass(cls, (*lead, *shape), dtype=of.dtype)
        made._of, made._offset, made._is_stacked = of, offset, is_stacked
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a method of instances
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default and _copied(*args[:2]):
            return args[0]
        if (make := _VIEWS.get(func)) is not None and (view := make(*args)) is not None:
            return view
        plain = tree_map(_whole, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box, without a dimension of its own."""
        return tuple(self.shape[1:] if self._is_stacked else self.shape)

    def whole(self) -> Tensor:
        """Returns the box in one piece: a view if one source has all of it, otherwise a copy."""
        parts = self.parts()
        if len(parts) == 1:
            return parts[0][1].view(self.shape) if self._is_stacked else parts[0][1]
        whole = torch.empty(self.box_shape, dtype=self.dtype)
        for place, data in parts:
            whole[place] = data
        return whole.view(self.shape)

    def parts(self) -> list[tuple[tuple[slice, ...], Tensor]]:
        """Returns the parts that sources have: place in this box, and elements.

        Raises:
            WorkerFailed: some are not here.
        """
        shape, found = self.box_shape, list[tuple[tuple[slice, ...], Tensor]]()
        for source in self._of.sources.values():
            common = common_extent((self._offset, shape), (source.offset, tuple(source.data.shape)))
            if common is not None:
                found.append((_within(common, self._offset), source.data[_within(common, source.offset)]))
        if sum(data.numel() for _, data in found) != math.prod(shape):
            raise WorkerFailed(_not_here(self._of, self._offset, shape))
        return found


def _within(extent: Extent, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The place of a box in a larger one that begins at `origin`."""
    return tuple(
        slice(first - begin, first - begin + size) for first, size, begin in zip(*extent, origin, strict=True)
    )


def _not_here(of: _Published, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    (has_offset, has_shape), name = of.here, of.planned.name
    return (
        f"the engine reads {list(shape)} from {list(offset)} on of {name}, and this node has fetched "
        f"{list(has_shape)} from {list(has_offset)} on: the engine does not cut this tensor as yatt expects. "
        "Write placement.send_slices: false"
    )


def _sliced(
    box: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    """The slice as a smaller box, or an empty tensor: vLLM's last ranks may have only padding of a
    vocabulary. None if it is no box."""
    if not isinstance(box, _BoxedTensor) or box._is_stacked:
        return None
    begin, stop, stride = slice(start, end, step).indices(box.shape[dim])
    if stride != 1:
        return None
    dim %= box.dim()
    offset, shape = list(box._offset), list(box.shape)
    offset[dim] += begin
    shape[dim] = max(stop - begin, 0)
    if not shape[dim]:
        return torch.empty(shape, dtype=box.dtype)
    smaller: Tensor = _BoxedTensor(box._of, tuple(offset), tuple(shape))
    return smaller


def _stacked(box: Any, dim: int) -> Tensor | None:
    """The box in a first dimension of its own; None if it is another dimension."""
    if not isinstance(box, _BoxedTensor) or box._is_stacked or dim not in (0, -box.dim() - 1):
        return None
    stacked: Tensor = _BoxedTensor(box._of, box._offset, tuple(box.shape), is_stacked=True)
    return stacked


def _unstacked(box: Any, dim: int = 0) -> list[Tensor] | None:
    """The box out of its own dimension; None if it is in none."""
    if not isinstance(box, _BoxedTensor) or not box._is_stacked or dim not in (0, -box.dim()):
        return None
    return [_BoxedTensor(box._of, box._offset, box.box_shape)]


_VIEWS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.slice.Tensor: _sliced,
    torch.ops.aten.unsqueeze.default: _stacked,
    torch.ops.aten.unbind.int: _unstacked,
}
"""Operations that give a box again; each function returns None where it does not."""


def _copied(target: Any, box: Any) -> bool:
    """Copies a box into a tensor of its shape without putting it together first; False if it is neither."""
    if isinstance(target, _BoxedTensor) or not isinstance(box, _BoxedTensor) or target.shape != box.shape:
        return False
    inner = target[0] if box._is_stacked else target
    for place, data in box.parts():
        inner[place].copy_(data)
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
