"""What limits a run, for runs that take turns and runs that overlap."""

import pytest

from yatt.core.figures.limiting import WAIT, limit_of


def row(step: int, **seconds: float) -> dict[str, float]:
    return {
        "training/global_step": step, "timing_s/step": 10.0,
        **{f"goodput/{name}_s": value for name, value in seconds.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "by"),
    [
        ({"rollout": 6.0, "train": 3.0}, "sampling"),
        ({"rollout": 3.0, "train": 6.0}, "training"),
        ({"rollout": 3.0, "train": 2.0, "score": 4.0}, "scoring"),
        ({"rollout": 3.0, "train": 2.0, "switch": 2.5, "weight_update": 2.5}, "switching"),
        ({"rollout": 1.0, "train": 2.0, "saving": 7.0}, "saving"),
    ],
)
def test_the_longest_part_limits_a_run_that_takes_turns(seconds: dict[str, float], by: str) -> None:
    limit = limit_of([row(step, **seconds) for step in range(1, 9)])
    assert limit is not None
    assert (limit.by, limit.is_overlapped) == (by, False)
    assert limit.in_words().startswith(f"{by}: ")


@pytest.mark.parametrize(("wait_s", "by"), [(0.5, "training"), (2.0, "sampling")])
def test_an_overlapped_run_is_limited_by_what_the_other_waits_for(wait_s: float, by: str) -> None:
    """Also if training takes longer than its wait: it could not be faster than the samples come."""
    rows = [{**row(step, rollout=1.0, train=10.0 - wait_s), WAIT: wait_s} for step in range(1, 9)]
    limit = limit_of(rows)
    assert limit is not None
    assert (limit.by, limit.is_overlapped) == (by, True)
    says = "training waits 20% of an iteration" if by == "sampling" else "95% of an iteration; 5% is a wait"
    assert says in limit.in_words()


def test_only_the_newest_iterations_count_and_not_the_first() -> None:
    old = [row(step, rollout=9.0) for step in range(1, 6)]
    new = [row(step, train=9.0) for step in range(6, 11)]
    assert limit_of([*old, *new]).by == "training"  # type: ignore[union-attr]
    assert limit_of([row(1, rollout=9.0), row(2, train=9.0)]).by == "training"  # type: ignore[union-attr]
    assert limit_of([row(1, rollout=9.0)]).by == "sampling"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "rows", [[], [{}], [row(1)], [{"training/global_step": 0, "goodput/train_s": 3.0}],
             [{**row(1), "timing_s/step": "x", "goodput/train_s": None}],
             [{**row(1), "goodput/train_s": 10**400}], [{**row(1, train=1.0), "timing_s/step": 1e-320}],
             [{**row(1), "goodput/train_s": float("nan")}]],
)  # fmt: skip
def test_rows_that_do_not_say_it(rows: list[dict[str, object]]) -> None:
    assert limit_of(rows) is None
