"""The hidden states at the positions whose tokens are trained on, instead of logits at all positions.

Prompts have no loss, and logits of completions are made chunk by chunk (`yatt.trainer.logprobs`): so for one
forward call the language-model head hands out its input, narrowed to the wanted rows, and its weight.
megatron-core itself has no such choice when it trains.

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
    """The weight [V / tp, H] of the head that the model has run; with tied embeddings, the embedding's."""

    tensor: Tensor | None = None


@contextlib.contextmanager
def head_at(model: nn.Module, rows_R: Tensor) -> Iterator[HeadWeight]:
    """Within it `model` gives the head's input [1, R, H]; a stage without head what it always gives.

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

    head.forward = forward  # on this object only; the call through it runs the module's hooks as ever
    try:
        yield found
    finally:
        del head.forward


def _narrowed(hidden: Tensor, rows_R: Tensor, head: Any) -> Tensor:
    """Hidden states [S, B, H] (or this rank's part of S) to [R, 1, H], on every tensor-parallel rank.

    Each rank computes the gradient that comes through its part of the vocabulary: the backward pass sums.
    """
    if head.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden.flatten(0, 1).index_select(0, rows_R)[:, None]
    rows: Tensor = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1).index_select(0, rows_R)[:, None])
    return rows
