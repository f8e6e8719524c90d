"""Exchanges megatron-core's Python objects between ranks without pickle."""

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def literal_exchange() -> Iterator[None]:
    """Makes `all_gather_object` send Python literals as text, and refuse other values, in this context.

    megatron-core's set-up of the optimizer gathers the keys of parameter groups (tuples of text, numbers,
    booleans and None) as pickles. Unpickling data from a socket can execute any code of the sender.
    """
    original = dist.all_gather_object
    dist.all_gather_object = all_gather_literal  # type: ignore[assignment]  # narrower names of arguments
    try:
        yield
    finally:
        dist.all_gather_object = original


def all_gather_literal(gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    """Replaces `torch.distributed.all_gather_object` for Python literals. Collective.

    Raises:
        TypeError: the value is not made of literals.
    """
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise TypeError(f"only Python literals can be exchanged between ranks, not {text}") from error
    body = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in gathered]
    dist.all_gather(sizes, torch.tensor([len(body)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(body)] = body
    bodies = [torch.zeros(longest, dtype=torch.uint8) for _ in gathered]
    dist.all_gather(bodies, padded, group=group)
    for index, (size, raw) in enumerate(zip(sizes, bodies, strict=True)):
        gathered[index] = ast.literal_eval(bytes(raw[: int(size)].tolist()).decode())
