"""Exchanges Python objects of megatron-core and vLLM between ranks without pickle.

Unpickling data from a socket can execute any code of the sender. So in a process that uses these, only Python
literals travel (text, numbers, booleans, None, and tuples, lists and dicts of them), as text.
"""

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def literal_exchange() -> Iterator[None]:
    """Makes `all_gather_object` and `broadcast_object_list` send literals as text, and refuse other values,
    in this context.

    megatron-core's set-up of the optimizer gathers the keys of parameter groups; vLLM's set-up of a group of
    ranks sends the names of memory segments.
    """
    originals = dist.all_gather_object, dist.broadcast_object_list
    dist.all_gather_object = all_gather_literal  # type: ignore[assignment]  # narrower names of arguments
    dist.broadcast_object_list = broadcast_literals  # type: ignore[assignment]  # as above
    try:
        yield
    finally:
        dist.all_gather_object, dist.broadcast_object_list = originals


def all_gather_literal(gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    """Replaces `torch.distributed.all_gather_object` for Python literals. Collective.

    Raises:
        TypeError: the value is not made of literals.
    """
    body = _tensor_of(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in gathered]
    dist.all_gather(sizes, torch.tensor([len(body)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(body)] = body
    bodies = [torch.zeros(longest, dtype=torch.uint8) for _ in gathered]
    dist.all_gather(bodies, padded, group=group)
    for index, (size, raw) in enumerate(zip(sizes, bodies, strict=True)):
        gathered[index] = _literal_of(raw[: int(size)])


def broadcast_literals(values: list[Any], src: int, group: dist.ProcessGroup | None = None) -> None:
    """Replaces `torch.distributed.broadcast_object_list` for Python literals. Collective.

    Args:
        src: global rank of the sender.

    Raises:
        TypeError: a value is not made of literals.
    """
    is_sender = dist.get_rank() == src
    body = _tensor_of(list(values)) if is_sender else torch.zeros(0, dtype=torch.uint8)
    size = torch.tensor([len(body)])
    dist.broadcast(size, src=src, group=group)
    if not is_sender:
        body = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(body, src=src, group=group)
    if not is_sender:
        values[:] = _literal_of(body)


def _tensor_of(value: Any) -> torch.Tensor:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise TypeError(f"only Python literals can be exchanged between ranks, not {text}") from error
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _literal_of(raw: torch.Tensor) -> Any:
    return ast.literal_eval(bytes(raw.tolist()).decode())
