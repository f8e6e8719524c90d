"""Rotary positions that megatron-core does not have. Suffixes: S tokens of the stream, D elements of a head.

Three axes (Qwen2-VL, arXiv:2409.12191), of a whole packed stream: megatron-core has axes side by side only,
and cuts the positions of packed sequences wrongly under context parallelism. And YaRN's frequencies for
attention that is not latent, in some layers.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from yatt.models.shape import RopeAxes, Shape, Yarn


def yarn_frequencies(plain: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Returns frequencies for a context of `yarn.factor` times the length trained on (arXiv:2309.00071,
    section 3.2): slow ones divided by the factor, fast ones as they are, and those between in part. The
    bounds are whole numbers, as in transformers.

    Args:
        plain: float32 [D / 2], falling.
        theta: base of them.
    """
    dim = 2 * len(plain)

    def turning(rotations: float) -> float:
        turned = yarn.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(turned) / (2 * math.log(theta))

    low, high = max(math.floor(turning(yarn.beta_fast)), 0), min(math.ceil(turning(yarn.beta_slow)), dim - 1)
    places = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    share = ((places - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / yarn.factor * share + plain * (1 - share)


class RotaryAxes(nn.Module):
    """Takes the place of megatron-core's `MultimodalRotaryEmbedding`."""

    def __init__(self, shape: Shape, axes: RopeAxes) -> None:
        super().__init__()
        dim = int(shape.attention.head_dim * shape.rotary_share)
        self._axes = axes
        self._inverse = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def forward(self, positions_31S: Tensor, _sections: list[int], cp_group: Any = None) -> Tensor:  # noqa: ARG002
        """Returns angles float32 [S, 1, 1, D] from positions int64 [3, 1, S]."""
        self._inverse = self._inverse.to(positions_31S.device)
        angles = positions_31S[..., None].float() * self._inverse
        mixed = _interleaved if self._axes.is_interleaved else _side_by_side
        half = mixed(angles, self._axes.sections)
        return torch.cat([half, half], -1).transpose(0, 1)[:, :, None]


def _interleaved(angles: Tensor, sections: tuple[int, int, int]) -> Tensor:
    """Elements take turns, time, height, width, as long as an axis has some left; the rest is time's."""
    found = angles[0].clone()
    for axis in (1, 2):
        of_axis = slice(axis, 3 * sections[axis], 3)
        found[..., of_axis] = angles[axis][..., of_axis]
    return found


def _side_by_side(angles: Tensor, sections: tuple[int, int, int]) -> Tensor:
    bounds = itertools.pairwise([0, *itertools.accumulate(sections)])
    return torch.cat([angles[axis][..., first:end] for axis, (first, end) in enumerate(bounds)], -1)
