"""Counters of dropped prompt groups and their causes in an iteration's row, and their sentence. Pure."""

from collections.abc import Mapping

DROPPED_GROUPS, FAILED_GROUPS = "rollout/dropped_groups", "rollout/failed_groups"
MEDIA_FAULTS = "rollout/media_faults"
_CAUSES = (
    ("reward/", "/failed", "reward '{name}' failed {count:g} times"),
    ("genrm/", "/unparsable", "GenRM '{name}' gave {count:g} unreadable verdicts"),
    ("genrm/", "/truncated", "GenRM '{name}' was cut {count:g} times"),
    ("rollout/", "_faults", "{count:g} samples had {name} that cannot be used"),
)


def is_drop_counter(key: str) -> bool:
    """Whether a key of an iteration's row counts dropped groups or a cause of them."""
    return key in (DROPPED_GROUPS, FAILED_GROUPS) or any(
        counter_name(key, begin, end) for begin, end, _ in _CAUSES
    )


def drops_message(drops: Mapping[str, float], since: int, iteration: int) -> str:
    """Returns how many groups were dropped in these iterations, and why.

    Args:
        drops: sums of the counters.
    """
    flat, failed = drops.get(DROPPED_GROUPS, 0.0), drops.get(FAILED_GROUPS, 0.0)
    when = f"iteration {iteration}" if since == iteration else f"iterations {since} to {iteration}"
    causes = [f"{flat:g} because their rewards were all equal"] if flat else []
    if failed:
        details = [
            text.format(name=name, count=count)
            for begin, end, text in _CAUSES
            for key, count in sorted(drops.items())
            if count and (name := counter_name(key, begin, end))
        ]
        causes.append(f"{failed:g} because a sample failed" + (f" ({', '.join(details)})" if details else ""))
    groups = "prompt group was" if flat + failed == 1 else "prompt groups were"
    return (
        f"{when}: {flat + failed:g} {groups} dropped, {' and '.join(causes)}. "
        "events.jsonl (rollout.group.drop) has the reason of each."
    )


def counter_name(key: str, begin: str, end: str) -> str:
    """Returns the name between `begin` and `end` in a counter's key; empty if it is another counter."""
    is_this = key.startswith(begin) and key.endswith(end)
    return key.removeprefix(begin).removesuffix(end) if is_this else ""
