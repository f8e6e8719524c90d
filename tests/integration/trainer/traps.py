"""Mistakes about pictures that trainers have made, to be planted in a rank."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.integration.trainer.pictured import PAD


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Context manager: the mistake of this name is made; empty: none."""
    with contextlib.ExitStack() as stack:
        for target, wrong in _mistakes(name) if name else ():
            stack.enter_context(mock.patch(target, wrong))
        yield


def _mistakes(name: str) -> list[tuple[str, Any]]:
    from yatt.trainer.attention import media_batch
    from yatt.trainer.mcore import rotary_axes, seeing, tower

    right_pixels, right_embedded = tower.normalised_pixels, seeing.SeeingModel._embedded
    right_features = tower.PictureFeatures.features_of
    right_positions, right_merged = media_batch.positions_of, tower._merged_patches

    def by_token_id(model: Any, tokens: torch.Tensor, media: Any, packed: Any) -> torch.Tensor:
        """The first tokens that look like a picture's have the features."""
        (places_M,) = torch.nonzero(tokens[0] == PAD, as_tuple=True)
        num = min(len(places_M), len(media.places_M))
        fields = {key: getattr(media, key) for key in ("positions_3S", "pictures")}
        wrong = media_batch.MediaBatch(places_M=places_M[:num], order_M=media.order_M[:num], **fields)
        return right_embedded(model, tokens, wrong, packed)

    def twice(patches: torch.Tensor, scale: Any) -> torch.Tensor:
        return right_pixels(right_pixels(patches, scale).view_as(patches), scale)

    class NoGate:
        @staticmethod
        def apply(embedded: torch.Tensor, packed: Any, _copies: Any, *levels: torch.Tensor) -> torch.Tensor:
            packed.added = packed.added._replace(levels=list(levels))
            return embedded

    return {
        "features-by-token-id": [("yatt.trainer.mcore.seeing.SeeingModel._embedded", by_token_id)],
        "one-axis": [
            (
                "yatt.trainer.attention.media_batch.positions_of",
                lambda num_tokens, *_: np.tile(np.arange(num_tokens), (3, 1)),
            )
        ],
        "sections-side-by-side": [("yatt.trainer.mcore.rotary_axes._interleaved", rotary_axes._side_by_side)],
        "normalised-twice": [("yatt.trainer.mcore.tower.normalised_pixels", twice)],
        "without-levels": [
            (
                "yatt.trainer.mcore.tower.PictureFeatures.features_of",
                lambda features, pictures: right_features(features, pictures)[:1],
            )
        ],
        "pictures-in-another-order": [
            (
                "yatt.trainer.mcore.tower.PictureFeatures.features_of",
                lambda features, pictures: right_features(features, pictures[::-1]),
            )
        ],
        "levels-of-one-rank": [
            ("yatt.trainer.mcore.seeing.copy_to_tensor_model_parallel_region", lambda level: level)
        ],
        "without-the-gate": [("yatt.trainer.mcore.seeing._Gate", NoGate)],
        "axes-of-pictures": [
            (
                "yatt.trainer.attention.media_batch.positions_of",
                lambda num_tokens, media, _: right_positions(num_tokens, media, 2),
            )
        ],
        "squares-turned": [
            (
                "yatt.trainer.mcore.tower._merged_patches",
                lambda found, merge: right_merged(found.transpose(1, 2), merge),
            )
        ],
        "frozen-in-vain": [
            (
                "yatt.trainer.mcore.model.train_part",
                lambda module, _: module.requires_grad_(True),
            )
        ],
    }[name]
