"""A GPTModel that takes pictures: a tower of transformers before it, on the first pipeline stage.

The tower's features take the place of embeddings, and DeepStack's levels are added after the first layers
(arXiv:2406.04334). What a forward pass adds is kept with its sequences, so that a layer which is computed
again in the backward pass adds the same. Suffixes: S tokens, H hidden size, M places of pictures, N tokens of
all pictures of a micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from yatt.models.shape import Shape
from yatt.trainer.attention.batches import PackedSequences
from yatt.trainer.attention.media_batch import AddedLevels, MediaBatch
from yatt.trainer.mcore.rotary_axes import RotaryAxes
from yatt.trainer.mcore.tower import PictureFeatures


class SeeingModel(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """Its sequences are always packed, since positions are those of a whole stream.

    Args:
        tower: transformers' module, on the first stage; None: another model's features are used.

    Attributes:
        pictures: set by the rank before the first pass.
    """

    def __init__(self, *given: Any, shape: Shape, tower: nn.Module | None, **named: Any) -> None:
        kinds = {"position_embedding_type": "mrope", "scatter_embedding_sequence_parallel": False}
        super().__init__(*given, **(named | kinds))
        assert shape.vision is not None, "a shape that takes pictures"
        self.rotary_pos_emb = RotaryAxes(shape, shape.picture_axes)
        self.pictures: PictureFeatures | None = None
        if tower is not None:
            self.vision = tower
        if self.pre_process:
            for level, layer in enumerate(self.decoder.layers[: len(shape.vision.levels)]):
                layer.register_forward_hook(_adds_level(level), with_kwargs=True)

    @property
    def tower(self) -> nn.Module | None:
        """Transformers' module; None on other stages, and where another model's features are used."""
        return getattr(self, "vision", None)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,  # noqa: ARG002
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        """As GPTModel, with the positions of the sequences in place of `position_ids`."""
        media = packed_seq_params.media
        assert media is not None, "a layout of a model that takes pictures"
        if self.pre_process:
            decoder_input = self._embedded(input_ids, media, packed_seq_params)
        output: Tensor = super().forward(
            input_ids,
            media.positions_3S[:, None],
            attention_mask,
            decoder_input=decoder_input,
            packed_seq_params=packed_seq_params,
        )
        if not torch.is_grad_enabled():
            packed_seq_params.added = None
        return output

    def _embedded(self, tokens: Tensor, media: MediaBatch, packed: PackedSequences) -> Tensor:
        """Embeddings [S, 1, H] with features in place of those of pictures; notes what layers add."""
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=None)
        features, levels = self._features(media, embedded)
        if features is None and self.pictures and (nothing := self.pictures.untouched()) is not None:
            embedded = embedded + nothing.to(embedded)
        places_M, order_M = media.places_M, media.order_M
        if features is not None:
            where = (places_M, torch.zeros_like(places_M))
            embedded = embedded.index_put(where, features[order_M])
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
            places_M, order_M = _on_this_rank(places_M, order_M, len(embedded))
            levels = [copy_to_tensor_model_parallel_region(level) for level in levels]
        if not levels:
            return embedded
        trains = torch.is_grad_enabled()
        copies = [level.detach().requires_grad_(trains and level.requires_grad) for level in levels]
        packed.added = AddedLevels(places_M, order_M, copies)
        return _Gate.apply(embedded, packed, copies, *levels) if trains else embedded  # type: ignore[no-untyped-call]

    def _features(self, media: MediaBatch, like: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        if not media.pictures:
            return None, []
        assert self.pictures is not None, "set before the first pass"
        features, *levels = (each.to(like) for each in self.pictures.features_of(media.pictures))
        return features, levels


def _on_this_rank(places_M: Tensor, order_M: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The places in this rank's part of a stream that sequence parallelism cuts, and their features."""
    first = mpu.get_tensor_model_parallel_rank() * num_tokens
    is_mine = (places_M >= first) & (places_M < first + num_tokens)
    return places_M[is_mine] - first, order_M[is_mine]


def _adds_level(level: int) -> Callable[..., Any]:
    """A hook of a layer: adds this level's features to its output, also when it is computed again."""

    def add(_: nn.Module, __: tuple[Any, ...], named: Mapping[str, Any], output: tuple[Tensor, Any]) -> Any:
        added: AddedLevels | None = named["packed_seq_params"].added
        if added is None:
            return None
        hidden, *rest = output
        where = (added.places_M, torch.zeros_like(added.places_M))
        # chosen here and not before the gate: what autograd notes later, it goes through earlier
        features = added.levels[level][added.order_M].to(hidden.dtype)
        return hidden.index_put(where, features, accumulate=True), *rest

    return add


class _Gate(torch.autograd.Function):
    """Returns embeddings unchanged.

    Layers add copies of the levels that are cut from the graph, so that one which is computed again does not
    go through the tower's graph twice. The gradients add up in the copies and reach the tower here: this
    backward pass runs after that of all layers, since its output is the first layer's input.
    """

    @staticmethod
    def forward(
        ctx: Any, embedded: Tensor, packed: PackedSequences, copies: list[Tensor], *_levels: Tensor
    ) -> Tensor:
        ctx.packed, ctx.copies = packed, copies
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.packed.added = None
        assert all(copy.grad is not None for copy in ctx.copies if copy.requires_grad), "after all layers"
        return grads[0], None, None, *(copy.grad for copy in ctx.copies)
