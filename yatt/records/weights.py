"""Records of published weights: where a trainer rank's host copy has which part of which tensor, and how a
node asks another one for them. And of a GenRM's weights, if it takes those of another run."""

from typing import Annotated

import msgspec

from yatt.records.order import Done, Message, Order

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


class WeightsDescribed(Message, frozen=True, kw_only=True):
    """A rank's `WeightPlan` (msgpack), and the bytes of its segment of weights, or of the part that was asked
    for. `unknown_bytes`: of these, of tensors whose cut is not known, so that each part has all of them."""

    plan: bytes
    size_bytes: int
    unknown_bytes: int = 0


class DescribeWeights(Order[WeightsDescribed], frozen=True, kw_only=True):
    """Request to the node of a trainer rank: what does its host copy contain? `part`: of the slices of the
    node with this number in an engine that spans several; below 0: of all."""

    rank: int
    part: int = -1


class WeightsOffered(Message, frozen=True, kw_only=True):
    """Where and with which key to fetch what was asked for (`yatt.adapters.net.bulk.Ticket`)."""

    host: str
    port: int
    name: bytes
    key: bytes


class OfferWeights(Order[WeightsOffered], frozen=True, kw_only=True):
    """Request to a node for a trainer rank's weights of this policy version, which it has or fetches.

    `former_version`: the version that the caller has now; 0: none. `part` is as in DescribeWeights; `plan`: a
    digest of the plan that the caller has of them.
    """

    rank: int
    policy_version: int
    former_version: int
    part: int = -1
    plan: bytes = b""


FirstIteration = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class ChosenWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights that a GenRM has from iteration `begins` on, as the run folder records them.

    `folder`: name of the folder with them; empty: the one that the run file names. `source`: iteration of the
    other run's checkpoint. `attempt`: the one that chose.
    """

    begins: FirstIteration
    folder: str = ""
    source: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    attempt: Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class UseJudges(Order[Done], frozen=True, kw_only=True):
    """Order before a batch is sampled: the folder with the weights of each GenRM that takes those of another
    run, by name. Its engines that were built from another folder are ended, and built anew."""

    folders: dict[str, str]
