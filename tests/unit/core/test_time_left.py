"""Where a save goes when the time is short: a table of cases, properties, and planted mistakes."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from yatt.core.phases import time_left
from yatt.core.phases.time_left import (
    LATE_S,
    LOCAL_BYTES_PER_S,
    MOST_RATES,
    RESERVE_S,
    SaveTarget,
    Speeds,
    Transfer,
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


DISK = (Transfer(10 * GB, 5.0),)
LATEST_S = RESERVE_S + 5.0
"""The last moment for 10 GB to `DISK`."""

GIVEN_UP = {
    "no limit": (10 * GB, math.inf, 0.0, speeds(SLOW, local=DISK), False),
    "no local tier": (10 * GB, LATEST_S, 0.0, speeds(SLOW, has_local=False), False),
    "a save to the disks still fits later": (10 * GB, LATEST_S + 1.0, 0.0, speeds(SLOW, local=DISK), False),
    "the last moment": (10 * GB, LATEST_S, 10.0, speeds(SLOW, local=DISK), True),
    "it is expected to end in time": (10 * GB, LATEST_S, 95.0, speeds(SLOW, local=DISK), False),
    "it is expected to end too late": (10 * GB, LATEST_S, 94.9, speeds(SLOW, local=DISK), True),
    "it is later than expected": (10 * GB, LATEST_S, 101.0, speeds(SLOW, local=DISK), True),
    "the last moment, nothing was measured": (int(LOCAL_BYTES_PER_S), RESERVE_S + 1, 50.0, speeds(), True),
    "the disks seem too slow, the upload is unknown": (112 * GB, 118.0, 0.2, speeds(), False),
    "the disks seem too slow, the upload fits": (
        112 * GB,
        118.0,
        0.2,
        speeds(Transfer(112 * GB, 90.0)),
        False,
    ),
    "neither fits, the disks are quicker": (10 * GB, RESERVE_S + 2, 0.0, speeds(SLOW, local=DISK), True),
    "neither fits, the upload is nearly done": (
        10 * GB,
        RESERVE_S + 2,
        97.0,
        speeds(SLOW, local=DISK),
        False,
    ),
}


@pytest.mark.parametrize("case", GIVEN_UP)
def test_an_upload_is_given_up_at_the_last_moment_unless_it_ends_in_time(case: str) -> None:
    size_bytes, left_s, waited_s, measured, expected = GIVEN_UP[case]
    assert time_left.is_given_up(size_bytes, left_s, waited_s, measured) is expected


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
    disks = max((t.seconds / t.size_bytes for t in measured.local[-MOST_RATES:]), default=0.0)
    local_s = size_bytes * (disks or 1 / (LOCAL_BYTES_PER_S * measured.num_nodes))
    for waited_s in (0.0, needed_s / 2, needed_s * 0.99, needed_s + 1.0):
        is_given_up = time_left.is_given_up(size_bytes, left_s, waited_s, measured)
        rest_s = needed_s - waited_s
        if is_given_up:
            assert not 0 < rest_s < (left_s - RESERVE_S) * (1 - 1e-9), "it would have ended in time"
            assert local_s > (left_s - RESERVE_S) * (1 - 1e-9), "there was time to wait"
        elif not 0 < rest_s <= (left_s - RESERVE_S) * (1 + 1e-9):
            just_fits = 0 <= local_s - (left_s - RESERVE_S) <= 1.0
            assert not just_fits, "the last moment has passed"


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


@given(sizes, times, anything)
def test_a_save_that_goes_to_the_store_is_not_given_up_at_once(
    size_bytes: int, left_s: float, measured: Speeds
) -> None:
    """Unless nothing is known of uploads, and this is the last moment for the disks."""
    if target_of(size_bytes, left_s, measured) is STORE and time_left.is_given_up(
        size_bytes, left_s, 0, measured
    ):
        assert not measured.uploads
        assert 0 <= measured.local_s(size_bytes) - (left_s - RESERVE_S) <= LATE_S


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
    monkeypatch.setattr(time_left, "is_given_up", lambda *_: False)


def gives_up_what_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        time_left, "is_given_up", lambda size, left, _, s: s.has_local and s.local_s(size) >= left - RESERVE_S
    )


def trusts_an_upload_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = time_left.is_given_up
    monkeypatch.setattr(
        time_left, "is_given_up",
        lambda size, left, waited, s: waited < s.upload_s(size) and right(size, left, waited, s),
    )  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [forgets_the_reserve, believes_the_quickest, goes_to_a_disk_that_is_not_there, always_takes_the_disk,
     waits_to_the_end, gives_up_what_ends_in_time, trusts_an_upload_that_is_late],
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
