"""Events of runs whose slabs move, written by hand."""

from collections.abc import Mapping
from typing import Any

from tests.obs_runs import event

JUDGE = "genrm:judge"
Event = dict[str, Any]


def use(slabs: int, *, busy_s: float, held_s: float, engines: int = 1) -> Event:
    """One role of a batch."""
    return {
        "step_s": 0.02, "sequence_s": 0.001, "room": 8, "engines": engines, "slabs": slabs,
        "idle": round(1 - busy_s / held_s, 6), "busy_s": busy_s, "held_s": held_s,
    }  # fmt: skip


def batch(
    at_s: float, iteration: int, seconds: float, roles: Mapping[str, Event], *, attempt: int = 1
) -> Event:
    """A batch that was measured."""
    return event(
        at_s, "batch.load", attempt=attempt, iteration=iteration, seconds=seconds, num_samples=64,
        lengths=[float(i) for i in range(21)], verdicts={JUDGE: 30.0}, roles=dict(roles), switch_s=1.0,
        train_s=2.0, kept=1.0,
    )  # fmt: skip


def choice(at_s: float, before: tuple[int, int], after: tuple[int, int], *seconds: float, **more) -> Event:
    """A choice of the split: slabs of rollout and the GenRM, and predicted seconds before and after."""
    predicted_s, chosen_s = seconds
    splits = [{"rollout": split[0], JUDGE: split[1]} for split in (before, after)]
    return event(
        at_s, "split.choose", before=splits[0], after=splits[1], predicted_s=predicted_s, chosen_s=chosen_s,
        num_samples=64, tokens={JUDGE: 30.0}, switch_s=1.0, took_s=0.1, **more,
    )  # fmt: skip


def tail_move(at_s: float, slab: str, **changes: Any) -> Event:
    """An order near the end of a batch."""
    fields = {
        "before": "rollout", "after": JUDGE, "reason": "tail", "running": 2, "backlog_s": 12.0,
        "after_s": 6.0, "switch_s": 1.5, "is_built": True,
    }  # fmt: skip
    return event(at_s, "slab.move", slab=slab, **{**fields, **changes})


def split_move(at_s: float, slab: str) -> Event:
    """An order to another split."""
    return event(at_s, "slab.move", slab=slab, before="rollout", after=JUDGE, reason="split")


def moved(at_s: float, slab: str, *, after: str = JUDGE, has_moved: bool = True, **more: Any) -> Event:
    """The answer to an order."""
    return event(
        at_s, "slab.moved", slab=slab, after=after, has_moved=has_moved, seconds=1.25, workers_s=1.0, **more
    )


def unfit(at_s: float, slab: str, error: str = "no host memory", node: int = 1) -> Event:
    """An engine that could not be built."""
    return event(at_s, "engine.unfit", node=node, slab=slab, holder=JUDGE, first="rollout", error=error)


def rollout_begins(at_s: float, iteration: int, attempt: int = 1) -> Event:
    """The phase in which a batch is sampled."""
    return event(at_s, "phase.begin", attempt=attempt, phase="rollout", iteration=iteration, part="prepare")


def roles(rollout: int, judge: int, seconds: float = 10.0) -> dict[str, Event]:
    """Rollout was busy for half of its time, the GenRM for all of it."""
    return {
        "rollout": use(rollout, busy_s=rollout * seconds / 2, held_s=rollout * seconds),
        JUDGE: use(judge, busy_s=judge * seconds, held_s=judge * seconds),
    }


MOVING = (
    event(0, "attempt.start", nodes=2),
    rollout_begins(1, 1),
    *(event(1, "lease.grant", slab=f"n1s{i}", holder="rollout", token=1, node=1) for i in range(3)),
    event(1, "lease.grant", slab="n1s3", holder=JUDGE, token=1, node=1),
    batch(11, 1, 10.0, roles(3, 1)),
    choice(12, (3, 1), (2, 2), 9.0, 7.5),
    split_move(12, "n1s0"),
    event(13, "lease.release", slab="n1s0", holder="rollout", token=1, node=1),
    event(13, "lease.grant", slab="n1s0", holder=JUDGE, token=2, node=1),
    moved(13.25, "n1s0"),
    rollout_begins(14, 2),
    tail_move(18, "n1s1"),
    tail_move(18, "n1s2", before="rollout<b>"),
    moved(19, "n1s1"),
    unfit(20, "n1s2", "CUDA <out> of memory"),
    moved(20, "n1s2", has_moved=False),
    batch(22, 2, 8.0, roles(1, 3, 8.0)),
    choice(23, (2, 2), (2, 2), 7.9, 7.9),
    rollout_begins(24, 3),
    batch(32, 3, 7.0, roles(2, 2, 7.0)),
)
"""Three batches: the split changes after the first; near the end of the second one slab moves, one cannot."""
