"""The independent checker of lease events: what frees a slab, and what does not."""

from typing import Any

import pytest

from tests.moving_slabs import double_holders

Told = list[tuple[str, dict[str, Any]]]


def told(
    *middle: tuple[str, str | int], role: str = "rollout", workers: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Two grants of slab n0s0 to a role with workers that were started before; `middle` lies between."""
    events: Told = [("worker.start", {"worker": worker}) for worker in workers]
    events += [("lease.grant", {"slab": "n0s0", "holder": role, "token": 1})]
    for kind, value in middle:
        of_slab = {"slab": "n0s0", "token": value}
        events.append((kind, {"worker": value} if kind.startswith("worker") else of_slab))
    events += [("lease.grant", {"slab": "n0s0", "holder": role, "token": 2})]
    return [{"t": t, "kind": kind, "node": 0, "attempt": 1, **rest} for t, (kind, rest) in enumerate(events)]


ENDS = "end", "start", "end"
ONE, NARROW, RANK = ("rollout-n0s0.1",), ("rollout-n0s0e0.1", "rollout-n0s0e1.1"), ("rollout-n0s0r0.1",)


@pytest.mark.parametrize(
    ("workers", "middle"),
    [
        (ONE, [("lease.release", 1)]),
        (ONE, [("worker.end", "rollout-n0s0.1")]),
        (RANK, [("worker.end", "rollout-n0s0r0.1")]),
        (NARROW, [("worker.end", "rollout-n0s0e1.1"), ("worker.end", "rollout-n0s0e0.1")]),
        (ONE, [(f"worker.{what}", f"rollout-n0s0.{n}") for what, n in zip(ENDS, (1, 2, 2), strict=True)]),
    ],
)  # fmt: skip
def test_a_slab_is_free_after_its_release_or_the_end_of_all_its_holders_processes(workers, middle) -> None:
    assert double_holders(told(*middle, workers=workers)) == []


@pytest.mark.parametrize(
    ("workers", "middle"),
    [
        (ONE, []),
        ((), []),
        (ONE, [("lease.release", 0)]),
        (ONE, [("worker.end", "rollout-n0s1.1")]),
        (ONE, [("worker.end", "genrm-judge-n0s0.1")]),
        (ONE, [("worker.end", "rollout-n0s0.1"), ("worker.start", "rollout-n0s0.2")]),
        (RANK, [("worker.end", "rollout-n1s0r1.1")]),
        (NARROW, [("worker.end", "rollout-n0s0e1.1")]),
    ],
)
def test_a_slab_is_not_free_after_anything_else(workers, middle) -> None:
    assert double_holders(told(*middle, workers=workers)) == ["n0s0: rollout while rollout held it"]


def test_a_judge_has_a_dash_in_its_name() -> None:
    events = told(("worker.end", "genrm-judge-n0s0.1"), role="genrm:judge", workers=("genrm-judge-n0s0.1",))
    assert double_holders(events) == []


def test_a_token_that_does_not_grow_is_told() -> None:
    events = told(("lease.release", 1), workers=ONE)
    events[-1]["token"] = 1
    assert double_holders(events) == ["n0s0: token 1 after 1"]
