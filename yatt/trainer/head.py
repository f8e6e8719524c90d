"""Hidden states at the trained positions only, instead of logits at all positions.

Prompts have no loss, and logits of completions are computed chunk by chunk (`yatt.trainer.logprobs`). So for
one forward call the language-model head returns its input, narrowed to the wanted rows, and its weight.
megatron-core has no such option for training.

Suffixes: S tokens, B sequences, H hidden size, R rows wanted.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


@dataclass(slots=True)
class HeadWeight:
    """The head's weight [V / tp, H] in the forward call; with tied embeddings, the embedding's weight."""

    tensor: Tensor | None = None


@contextlib.contextmanager
def head_at(model: nn.Module, rows_R: Tensor) -> Iterator[HeadWeight]:
    """Makes `model` return the head's input [1, R, H]; a stage without head returns its usual output.

    Args:
        model: a chunk of the policy or reference, wrapped or not.
        rows_R: int64, indices in the flattened hidden states [S / B, B, H].
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    found = HeadWeight()
    if not model.post_process:
        yield found
        return
    head: Any = model.output_layer

    def forward(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        found.tensor = head.weight if weight is None else weight
        return _narrowed(hidden, rows_R, head), None

    head.forward = forward  # on this object only; the module's hooks still run
    try:
        yield found
    finally:
        del head.forward


def _narrowed(hidden: Tensor, rows_R: Tensor, head: Any) -> Tensor:
    """Selects rows [R, 1, H] of hidden states [S, B, H] (or this rank's part of S), on every TP rank.

    Each rank computes the gradient through its part of the vocabulary; the backward pass sums them.
    """
    if head.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden.flatten(0, 1).index_select(0, rows_R)[:, None]
    rows: Tensor = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1).index_select(0, rows_R)[:, None])
    return rows
