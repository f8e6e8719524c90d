"""Where a save goes when the time is short: a table of cases, properties, and planted mistakes."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from yatt.core import time_left
from yatt.core.time_left import (
    LOCAL_BYTES_PER_S,
    MOST_RATES,
    RESERVE_S,
    SaveTarget,
    Speeds,
    Transfer,
    patience_s,
    target_of,
)

GB = 10**9
STORE, LOCAL = SaveTarget.STORE, SaveTarget.LOCAL
SLOW = Transfer(10 * GB, 100.0)
"""A tenth of a GB per second."""

QUICK = Transfer(10 * GB, 10.0)


def speeds(*uploads: Transfer, local: tuple[Transfer, ...] = (), has_local: bool = True) -> Speeds:
    return Speeds(uploads=uploads, local=local, num_nodes=1, has_local=has_local)


CASES = {
    "no limit": (20 * GB, math.inf, speeds(SLOW), STORE),
    "there is time": (20 * GB, 200.0 + RESERVE_S, speeds(SLOW), STORE),
    "the reserve is missing": (20 * GB, 199.0 + RESERVE_S, speeds(SLOW), LOCAL),
    "a smaller save fits": (10 * GB, 100.0 + RESERVE_S, speeds(SLOW), STORE),
    "the slowest of the last uploads counts": (10 * GB, 60.0, speeds(SLOW, QUICK, QUICK), LOCAL),
    "an upload long ago does not": (10 * GB, 60.0, speeds(SLOW, QUICK, QUICK, QUICK), STORE),
    "nothing was measured": (20 * GB, RESERVE_S + 1, speeds(), STORE),
    "nothing was measured, and no time is left": (20 * GB, 1.0, speeds(), LOCAL),
    "no local tier": (20 * GB, 1.0, speeds(SLOW, has_local=False), STORE),
    "no time at all": (20 * GB, 0.0, speeds(SLOW), LOCAL),
    "the end has passed": (20 * GB, -5.0, speeds(SLOW), LOCAL),
    "an empty upload is no measurement": (20 * GB, 60.0, speeds(Transfer(0, 50.0)), STORE),
}


@pytest.mark.parametrize("case", CASES)
def test_a_save_goes_to_the_store_if_it_fits(case: str) -> None:
    size_bytes, left_s, measured, expected = CASES[case]
    assert target_of(size_bytes, left_s, measured) is expected


@pytest.mark.parametrize(
    ("size_bytes", "left_s", "measured", "expected"),
    [
        (20 * GB, math.inf, speeds(SLOW), math.inf),
        (20 * GB, 40.0, speeds(SLOW, has_local=False), math.inf),
        (int(LOCAL_BYTES_PER_S), 40.0, speeds(SLOW), 40.0 - RESERVE_S - 1.0),
        (10 * GB, 40.0, speeds(SLOW, local=(Transfer(10 * GB, 5.0),)), 40.0 - RESERVE_S - 5.0),
        (10 * GB, RESERVE_S + 2, speeds(SLOW, local=(Transfer(10 * GB, 5.0),)), 0.0),
    ],
)
def test_an_upload_is_waited_for_as_long_as_a_local_save_fits(
    size_bytes: int, left_s: float, measured: Speeds, expected: float
) -> None:
    assert patience_s(size_bytes, left_s, measured) == pytest.approx(expected)


transfers = st.lists(st.builds(Transfer, st.integers(1, 10**13), st.floats(0.001, 1e5)), max_size=6)
anything = st.builds(
    Speeds, uploads=transfers, local=transfers, num_nodes=st.integers(1, 64), has_local=st.booleans()
)
sizes, times = st.integers(1, 10**13), st.floats(0.0, 1e6)


def check(size_bytes: int, left_s: float, measured: Speeds) -> None:
    """What holds for each decision, written without the module's own functions."""
    target = time_left.target_of(size_bytes, left_s, measured)
    last = measured.uploads[-MOST_RATES:]
    needed_s = max((size_bytes / t.size_bytes * t.seconds for t in last), default=0.0)
    if not measured.has_local:
        assert target is STORE, "there is nowhere else"
        return
    if target is STORE:
        assert needed_s <= (left_s - RESERVE_S) * (1 + 1e-9), "it does not fit"
    else:
        assert needed_s > (left_s - RESERVE_S) * (1 - 1e-9), "it would have fitted"
    local_s = time_left.patience_s(size_bytes, left_s, measured)
    slowest = max((t.seconds / t.size_bytes for t in measured.local[-MOST_RATES:]), default=0.0)
    after_s = size_bytes * (slowest or 1 / (LOCAL_BYTES_PER_S * measured.num_nodes))
    assert local_s == 0 or local_s + after_s + RESERVE_S <= left_s * (1 + 1e-9) + 1e-6, "no time is left"
    assert local_s >= 0


@given(sizes, times, anything)
def test_the_choice_is_the_store_if_and_only_if_it_fits(
    size_bytes: int, left_s: float, measured: Speeds
) -> None:
    check(size_bytes, left_s, measured)


@given(sizes, times, times, anything)
def test_more_time_never_moves_a_save_away_from_the_store(
    size_bytes: int, left_s: float, more_s: float, measured: Speeds
) -> None:
    if target_of(size_bytes, left_s, measured) is STORE:
        assert target_of(size_bytes, left_s + more_s, measured) is STORE
    assert patience_s(size_bytes, left_s + more_s, measured) >= patience_s(size_bytes, left_s, measured)


def forgets_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "RESERVE_S", 0.0)


def believes_the_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        time_left, "_slowest", lambda found: min((t.seconds / t.size_bytes for t in found), default=0)
    )


def goes_to_a_disk_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    right = time_left.target_of
    monkeypatch.setattr(
        time_left,
        "target_of",
        lambda size, left, s: right(size, left, Speeds(uploads=s.uploads, has_local=True)),
    )


def always_takes_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "target_of", lambda _, __, s: LOCAL if s.has_local else STORE)


def waits_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "patience_s", lambda _, left, s: left if s.has_local else math.inf)


@pytest.mark.parametrize(
    "mistake",
    [forgets_the_reserve, believes_the_quickest, goes_to_a_disk_that_is_not_there, always_takes_the_disk,
     waits_to_the_end],
)  # fmt: skip
def test_a_planted_mistake_is_caught(mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    local = (Transfer(10 * GB, 5.0),)
    found = 0
    for has_local in (True, False):
        for left_s in (RESERVE_S + more_s for more_s in (-10, -5, 2, 5, 8, 30, 95, 190)):
            for uploads in ((SLOW,), (SLOW, QUICK), (QUICK,)):
                try:
                    check(10 * GB, left_s, speeds(*uploads, local=local, has_local=has_local))
                except AssertionError:
                    found += 1
    assert found
