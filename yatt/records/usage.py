"""What processes used: reported once per iteration, for metrics only."""

from collections.abc import Sequence

import msgspec


class RankUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the update of one iteration took on a trainer rank.

    Attributes:
        flops: operations of the update of the whole batch, by all ranks (`yatt.models.flops`).
        peak_flops_per_s: the most that the rank's device can do; 0: not known.
        max_allocated_bytes, max_reserved_bytes: the most device memory that tensors had, and that torch had
            from the device; 0 without a device.
    """

    flops: float = 0.0
    peak_flops_per_s: float = 0.0
    max_allocated_bytes: int = 0
    max_reserved_bytes: int = 0


def largest_usage(usages: Sequence[RankUsage]) -> RankUsage:
    """The largest value of each field. A peak that is not known on one rank is not known."""
    is_known = all(usage.peak_flops_per_s for usage in usages)
    return RankUsage(
        flops=max(usage.flops for usage in usages),
        peak_flops_per_s=max(usage.peak_flops_per_s for usage in usages) if is_known else 0.0,
        max_allocated_bytes=max(usage.max_allocated_bytes for usage in usages),
        max_reserved_bytes=max(usage.max_reserved_bytes for usage in usages),
    )


class NodeMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host memory of one node now.

    Attributes:
        used_bytes: of the machine, by all processes; 0: not known.
        resident_bytes: anonymous and shared memory of all processes of a role, by role.
        peak_bytes: the most resident memory that one process of a role has had, by role.
    """

    used_bytes: int = 0
    resident_bytes: dict[str, int] = {}
    peak_bytes: dict[str, int] = {}
