"""The language-model head at the positions whose tokens are trained on, and at no others.

Prompts have no loss, so their logits are not needed: with a large vocabulary and long prompts these are
most of the memory and much of the time of a pass. The hidden states are narrowed by a hook that lasts for
one forward call, before the head's own communication and product; megatron-core itself has no such choice
when it trains.

Suffixes: S tokens, B sequences, H hidden size, R rows wanted.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn


@contextlib.contextmanager
def head_at(model: nn.Module, rows_R: Tensor) -> Iterator[None]:
    """Within it `model` gives logits [1, R, V / tp]; a stage without head gives what it always gives.

    Args:
        model: a chunk of the policy or reference, wrapped or not.
        rows_R: int64, indices in the flattened hidden states [S / B, B, H]; under sequence parallelism R is a
            multiple of the tensor-parallel size.
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    if not model.post_process:
        yield
        return

    def narrowed(head: Any, arguments: tuple[Tensor, *tuple[Any, ...]]) -> tuple[Any, ...]:
        return _narrowed(arguments[0], rows_R, head), *arguments[1:]

    hook = model.output_layer.register_forward_pre_hook(narrowed)  # type: ignore[union-attr]  # GPTModel's
    try:
        yield
    finally:
        hook.remove()


def _narrowed(hidden: Tensor, rows_R: Tensor, head: Any) -> Tensor:
    """Hidden states [S, B, H] (or this rank's part of S) to [R, 1, H] (or its part of R)."""
    if not head.sequence_parallel:
        return hidden.flatten(0, 1).index_select(0, rows_R)[:, None]
    # Every rank has the whole gradient of its own part of R, so the gather's backward need not sum.
    whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    rows = whole.flatten(0, 1).index_select(0, rows_R)[:, None]
    part: Tensor = scatter_to_sequence_parallel_region(rows)
    return part
