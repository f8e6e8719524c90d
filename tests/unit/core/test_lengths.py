"""Counts of completions by length."""

import pytest

from yatt.core.samples.lengths import by_bucket, key_of


@pytest.mark.parametrize(
    ("num_tokens", "limit"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128), (4097, 8192)],
)
def test_a_bucket_holds_what_is_above_half_of_its_limit(num_tokens: int, limit: int) -> None:
    assert key_of(num_tokens, "cut") == f"rollout/length_to_{limit}/cut"


def test_rows_are_summed_and_what_is_no_count_is_left_out() -> None:
    rows = [
        {key_of(9, "accepted"): 3, key_of(200, "cut"): 1.0, "rollout/tokens": 7},
        {key_of(16, "accepted"): 2, "rollout/length_to_x/cut": 1, "rollout/length_to_8/eaten": 1},
        {key_of(9, "dropped"): "many", key_of(200, "accepted"): float("nan")},
    ]
    assert by_bucket(rows) == {
        16: {"accepted": 5, "dropped": 0, "cut": 0}, 256: {"accepted": 0, "dropped": 0, "cut": 1},
    }  # fmt: skip
