"""Records of published weights: where a trainer rank's host copy has which part of which tensor."""

import msgspec


class WeightBox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor, contiguous in the data of the segment of weights from byte `at` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int


class PlannedWeight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Hugging Face tensor, and the boxes of it that one rank has. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[WeightBox, ...]


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one trainer rank's segment of weights contains; the same for every policy version."""

    rank: int
    weights: tuple[PlannedWeight, ...]
