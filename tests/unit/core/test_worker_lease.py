"""The worker's side of a lease, over every short sequence of orders."""

import itertools
from collections.abc import Callable

import pytest

from yatt.core.gpus.lease import WorkerLease
from yatt.errors import LeaseLost

ORDERS = [(kind, token) for kind in ("wake", "sleep", "work") for token in (1, 2, 3)]
Fence = Callable[[WorkerLease, str, int], WorkerLease]


def fence(lease: WorkerLease, kind: str, token: int) -> WorkerLease:
    """As `yatt.adapters.net.worker_link` applies it."""
    lease = lease.seen(token)
    if kind == "work":
        lease.check_awake()
    return {"wake": lease.awake, "sleep": lease.asleep, "work": lambda: lease}[kind]()


def walk(rule: Fence, length: int = 4) -> int:
    """Check every sequence; gives how often work was admitted.

    Work may be done if, and only if, no order with a higher token came before it, and the newest Wake or
    Sleep that was not refused is a Wake with the same token.
    """
    num_admitted = 0
    for orders in itertools.product(ORDERS, repeat=length):
        lease, newest, woken = WorkerLease(), 0, 0
        for kind, token in orders:
            is_current = token >= newest
            newest = max(newest, token)
            may = is_current and (kind != "work" or woken == token)
            try:
                lease = rule(lease, kind, token)
                assert may, f"{orders}: {kind} {token} was admitted"
                num_admitted += kind == "work"
            except LeaseLost:
                assert not may, f"{orders}: {kind} {token} was refused"
                if is_current:  # the token counts as seen, though the work was refused
                    lease = lease.seen(token)
            if may and kind != "work":
                woken = token if kind == "wake" else 0
    return num_admitted


def test_work_is_done_only_under_the_newest_token_and_awake() -> None:
    assert walk(fence) > 100


def forgets_the_token(lease: WorkerLease, kind: str, token: int) -> WorkerLease:
    return fence(WorkerLease(0, lease.held), kind, token)


def works_asleep(lease: WorkerLease, kind: str, token: int) -> WorkerLease:
    return lease.seen(token) if kind == "work" else fence(lease, kind, token)


def stays_awake(lease: WorkerLease, kind: str, token: int) -> WorkerLease:
    return lease.seen(token) if kind == "sleep" else fence(lease, kind, token)


@pytest.mark.parametrize("wrong", [forgets_the_token, works_asleep, stays_awake])
def test_a_planted_mistake_is_caught(wrong: Fence) -> None:
    with pytest.raises(AssertionError, match=r"was (admitted|refused)"):
        walk(wrong)
