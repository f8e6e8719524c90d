"""Records of published weights: where a trainer rank's host copy has which part of which tensor."""

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by torch's name of the dtype."""


class WeightBox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor, contiguous in the data of the segment of weights from byte `at` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int


class WeightCut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine over several nodes cuts a tensor: its ranks on the node with number i have together the
    elements [begin, end) of dimension `dim` that `spans[i]` says; begin = end: nothing."""

    dim: int
    spans: tuple[tuple[int, int], ...]


class PlannedWeight(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A Hugging Face tensor, and the boxes of it that one rank has. `dtype` is torch's name.

    `cut`: how engines over several nodes cut it; None: each of their nodes needs all of it, because its ranks
    have all of it or (not `is_known`) because their cut is not known.
    `is_given`: a node that fetches slices gets these boxes from this rank; of the ranks that have the boxes,
    and from which such a node fetches, one gives them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[WeightBox, ...]
    cut: WeightCut | None = None
    is_known: bool = True
    is_given: bool = True


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one trainer rank's segment of weights contains; the same for every policy version."""

    rank: int
    weights: tuple[PlannedWeight, ...]
