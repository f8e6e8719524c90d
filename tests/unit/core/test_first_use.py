"""A second equal failure before the first use is the last, if a machine cannot be its cause."""

import pytest

from yatt.core.requests.first_use import MAX_WAKE_FAILURES, WakeFailures, error_likeness, is_lasting
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_USER_MISTAKE, ConfigError, WorkerFailed

UNKNOWN = WorkerFailed("rollout-n0s0: ValueError: model type qwen7 is not known (object at 0x7f12)")


def test_a_second_equal_exception_ends_the_run_with_its_own_words() -> None:
    failures = WakeFailures()
    assert failures.failed("a", UNKNOWN, is_own=True) is None
    assert failures.failed("b", UNKNOWN, is_own=True) is None, "another worker"
    again = WorkerFailed(str(UNKNOWN).replace("0x7f12", "0x80aa"))
    assert failures.failed("a", again, is_own=True) == (
        f"{again} (twice, before its first use)", EXIT_DO_NOT_RESTART
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        "a: OutOfMemoryError: CUDA out of memory", "a: RuntimeError: NCCL", "a ended: killed by SIGKILL",
        "a: ValueError: Free memory on device (3.1/79.2 GiB) on startup is less than desired",
        "a: RuntimeError: CUDA error: an illegal access",
        "a: RuntimeError: [enforce fail] DefaultCPUAllocator",
        "a: RuntimeError: Engine core initialization failed. See root cause above.",
        "a: RuntimeError: The server socket has failed to listen", "a: RuntimeError: can't start new thread",
        "a: OSError: Stale file handle", "a: ConnectionError: refused", "a: MyValueErrors: odd",
    ],
)  # fmt: skip
def test_what_a_machine_can_cause_is_tried_as_often_as_before(error: str) -> None:
    failures = WakeFailures()
    told = [failures.failed("a", WorkerFailed(error), is_own=True) for _ in range(MAX_WAKE_FAILURES)]
    assert told == [None] * (MAX_WAKE_FAILURES - 1) + [(error, EXIT_FAILED)]
    assert not is_lasting(error)


def test_other_failures_between_and_uses_begin_anew() -> None:
    failures = WakeFailures()
    other = WorkerFailed("a: TypeError: odd")
    assert failures.failed("a", UNKNOWN, is_own=True) is None
    assert failures.failed("a", other, is_own=True) is None
    failures.worked("a")
    told = [failures.failed("a", UNKNOWN, is_own=True) for _ in range(MAX_WAKE_FAILURES)]
    assert told == [None, None, (str(UNKNOWN), EXIT_FAILED)], "it has worked: the cause may be elsewhere"


def test_kills_do_not_count_and_a_users_mistake_ends_at_once() -> None:
    failures = WakeFailures()
    for _ in range(9):
        assert failures.failed("a", UNKNOWN, is_own=False) is None
    assert failures.failed("a", ConfigError("wrong"), is_own=True) == ("wrong", EXIT_USER_MISTAKE)


def test_numbers_and_addresses_do_not_make_a_difference() -> None:
    assert error_likeness("pid 12 at 0x7F: 3.5") == error_likeness("pid 9 at 0xab: 12.25")
    assert error_likeness("a b") != error_likeness("a c")


def test_a_runtime_error_about_the_model_is_lasting() -> None:
    assert is_lasting(
        "a: RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
    )
