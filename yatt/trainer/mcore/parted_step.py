"""Optimizer steps in parts: only one part of the optimizer's state has to be on the device at a time.

Adam and SGD work element by element, so the division changes no bit, also within a tensor. Gradients are
reduced, measured and clipped as a whole before: that needs gradients only. State that lives on the host goes
through three places on the device, of which one is filled, one is computed with, and one is emptied.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yatt.adapters.node_local.host_segment import aligned_size
from yatt.trainer.mcore.optimizer_state import inner_optimizers, kept_tensors

PART_BYTES, NUM_SLOTS = 512 << 20, 3
ALIGN = 64
"""Elements of a slice are a multiple of this, but for a tensor's last ones."""


class Piece(NamedTuple):
    """The elements [begin, end) of a flat tensor of an optimizer's state."""

    tensor: Tensor
    begin: int
    end: int


Parts = Sequence[Sequence[Piece]]
Visit = Callable[[Parts], Generator[list[Tensor], None, None]]
"""Yields for each part the content of its pieces on the device, which may be changed."""


def all_here(parts: Parts) -> Generator[list[Tensor], None, None]:
    """Visits parts that are always on the device."""
    yield from (list(map(_here, part)) for part in parts)


def step_in_parts(optimizer: Any, visit: Visit) -> None:
    """From now on steps in parts of at most `PART_BYTES` of state. A norm of the gradient that is not finite
    raises FloatingPointError before anything has changed.

    Args:
        optimizer: megatron-core's, a chained one.
    """
    for inner in inner_optimizers(optimizer):
        inner.step_with_ready_grads = partial(_step_parts, inner, visit)
    optimizer.get_grad_norm = partial(_finite_norm, optimizer)


def _finite_norm(optimizer: Any) -> float:
    norm = float(type(optimizer).get_grad_norm(optimizer))
    if not torch.isfinite(torch.tensor(norm)):
        raise FloatingPointError(f"the gradient norm is {norm}; start again from the last checkpoint")
    return norm


# ---- one step -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _SteppedGroup:
    """A parameter group during a step. A fused Adam counts its steps in it, also those of a part.

    `before`, `after`: that number; None: the group has none.
    """

    group: dict[str, Any]
    params: list[Tensor]
    before: int | None
    after: int | None

    def begin_part(self) -> None:
        """The group has no parameters, and has made no step."""
        self.group["params"] = []
        self._count(self.before)

    def end_part(self) -> None:
        """Notes the number of a step in which the group had parameters."""
        if self.group["params"]:
            self.after = self.group.get("step")

    def end_step(self) -> None:
        """The group is whole again."""
        self.group["params"] = self.params
        self._count(self.after)

    def _count(self, number: int | None) -> None:
        self.group.pop("step", None)
        self.group |= {} if number is None else {"step": number}


@dataclass(frozen=True, slots=True)
class _Slice:
    """The elements [begin, end) of a main copy, which stand in its group for a part's time.

    `target`: the elements of the model's parameter that the whole main copy is of.
    """

    main: Tensor
    target: Tensor
    group: _SteppedGroup
    begin: int
    end: int

    def enter(self, adam: Any, contents: Iterator[Tensor]) -> Tensor:
        """Takes its part; returns what stands there."""
        value = next(contents)
        value.grad = self.main.grad[self.begin : self.end] if self.main.grad is not None else None
        is_last = self.end == self.main.numel()
        adam.state[value] = {
            name: next(contents) if kept.dim() > 0 else kept if is_last else kept.clone()
            for name, kept in adam.state[self.main].items()
        }  # torch's Adam has the number of its steps in a tensor without dimensions
        self.group.group["params"].append(value)
        return value


@torch.no_grad()
def _step_parts(inner: Any, visit: Visit) -> bool:
    """As megatron-core's `step_with_ready_grads`, which it replaces."""
    adam = inner.optimizer
    found = ((group, group.get("step")) for group in adam.param_groups)
    groups = [_SteppedGroup(group, group["params"], number, number) for group, number in found]
    parts = list(_parts_of(inner, groups))
    pieces = [
        [Piece(each, part.begin, part.end) for part in slices for each in kept_tensors(inner, part.main)]
        for slices in parts
    ]
    try:
        with contextlib.closing(visit(pieces)) as visited:
            for slices, contents in zip(parts, visited, strict=True):
                _step_part(adam, groups, slices, contents)
    finally:
        for group in groups:
            group.end_step()
    if not inner.ddp_config.overlap_param_gather:
        for chunk in inner.model_chunks:
            chunk.start_param_sync()
    return True


def _step_part(
    adam: Any, groups: Sequence[_SteppedGroup], slices: Sequence[_Slice], contents: Sequence[Tensor]
) -> None:
    for group in groups:
        group.begin_part()
    taken = iter(contents)
    values = [each.enter(adam, taken) for each in slices]
    try:
        adam.step()
        for each, value in zip(slices, values, strict=True):
            each.target[each.begin : each.end].copy_(value)  # cast into the model's parameter
    finally:
        for value in values:
            del adam.state[value]
    for group in groups:
        group.end_part()


def _parts_of(inner: Any, groups: Sequence[_SteppedGroup]) -> Iterator[list[_Slice]]:
    """Yields parts of at most `PART_BYTES` of state, in its order."""
    targets, part, room = _targets_of(inner), list[_Slice](), PART_BYTES
    for group, main in ((each, main) for each in groups for main in each.params):
        item = sum(each.element_size() for each in kept_tensors(inner, main))
        begin = 0
        while begin < main.numel():
            wanted = (main.numel() - begin) * item
            if part and wanted > room:
                yield part
                part, room = [], PART_BYTES
            end = min(main.numel(), begin + max(room // item // ALIGN * ALIGN, ALIGN))
            part.append(_Slice(main, targets[id(main)], group, begin, end))
            room -= (end - begin) * item
            begin = end
    if part:
        yield part


def _targets_of(inner: Any) -> dict[int, Tensor]:
    """By a main copy's id, the elements of the model's parameter that it is of."""
    found = {}
    for mains, models in (
        (inner.shard_fp32_from_float16_groups, inner.model_float16_groups),
        (inner.shard_fp32_groups, inner.model_fp32_groups),
    ):
        for main_group, model_group in zip(mains, models, strict=True):
            for main, model in zip(main_group, model_group, strict=True):
                place = inner._get_model_param_range_map(model)["param"]
                found[id(main)] = model.detach().view(-1)[place.start : place.end]
    return found


# ---- state that lives on the host ---------------------------------------------------------------


class HostRun(NamedTuple):
    """Adjacent bytes on the host, and the pieces whose content they are: numbers in their part, and first
    bytes in these."""

    data: Tensor
    members: list[tuple[int, int]]


class _Lane:
    """Copies in one direction: on a CUDA stream of their own, or at once."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Copies each pair's second tensor to its first one, after an event; returns the event of its end."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


def visit_on_host(
    parts: Parts, runs: Sequence[Sequence[HostRun]], device: torch.device
) -> Generator[list[Tensor], None, None]:
    """Visits parts of which some live on the host; their new content is there at the end.

    Args:
        runs: of each part, what is on the host.

    Raises:
        torch.OutOfMemoryError: the device has no room for three of the largest part.
    """
    size_bytes = max((sum(aligned_size(run.data.nbytes) for run in part) for part in runs), default=0)
    slots = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in parts[:NUM_SLOTS]]
    coming, going = _Lane(device), _Lane(device)
    came, gone = dict[int, Any](), dict[int, Any]()
    begun = _event_of(device)  # what had the places' memory before may still be computed with

    def bring(number: int) -> None:
        if number < len(parts):
            pairs = _pairs(slots[number % NUM_SLOTS], runs[number])
            came[number] = coming.copy(pairs, gone.get(number - NUM_SLOTS, begun))

    try:
        bring(0)
        for number, part in enumerate(parts):
            bring(number + 1)
            if came[number] is not None:
                torch.cuda.current_stream(device).wait_event(came[number])
            pairs = _pairs(slots[number % NUM_SLOTS], runs[number])
            yield _contents(part, runs[number], [place for place, _ in pairs])
            gone[number] = going.copy([(data, place) for place, data in pairs], _event_of(device))
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _event_of(device: torch.device) -> Any:
    """The event at which a device has done everything so far; None on CPU, where all is done at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _pairs(slot: Tensor, part: Sequence[HostRun]) -> list[tuple[Tensor, Tensor]]:
    """The places in a slot of a part's bytes, and these bytes on the host."""
    found, begin = list[tuple[Tensor, Tensor]](), 0
    for run in part:
        found.append((slot[begin : begin + run.data.nbytes], run.data))
        begin += aligned_size(run.data.nbytes)
    return found


def _contents(part: Sequence[Piece], runs: Sequence[HostRun], places: Sequence[Tensor]) -> list[Tensor]:
    """The contents of a part's pieces: in these places, or where they always are."""
    brought = dict[int, Tensor]()
    for run, place in zip(runs, places, strict=True):
        for number, first in run.members:
            tensor, begin, end = part[number]
            last = first + (end - begin) * tensor.element_size()
            brought[number] = place[first:last].view(tensor.dtype)
    return [brought[n] if n in brought else _here(piece) for n, piece in enumerate(part)]


def _here(piece: Piece) -> Tensor:
    return piece.tensor.detach()[piece.begin : piece.end]
