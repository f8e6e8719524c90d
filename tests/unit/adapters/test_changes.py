"""Changes of blocks: what is applied is what was compared; what is no change writes nothing."""

import os
import random

import pytest
from hypothesis import given, settings, strategies as st

from yatt.adapters.net.changes import apply_change, change_between
from yatt.errors import WorkerFailed


def changed(former: bytes, words: set[int]) -> bytes:
    present = bytearray(former)
    for word in words:
        present[2 * word] ^= 1 + word % 255
    return bytes(present)


@settings(deadline=None)
@given(st.integers(0, 400), st.sets(st.integers(0, 399), max_size=120), st.randoms(use_true_random=False))
def test_a_change_turns_the_former_block_into_the_present_one(
    num_words: int, words: set[int], random_: random.Random
) -> None:
    former = random_.randbytes(2 * num_words)
    present = changed(former, {word for word in words if word < num_words})
    change = change_between(former, present)
    if change is not None:
        block = bytearray(former)
        apply_change(change, memoryview(block))
        assert block == present and len(change) <= 0.75 * len(former)


@pytest.mark.parametrize(
    "words", [set(), {0}, {65_535}, {65_536}, {0, 300_000}, {524_287}, {200_000, 200_001}]
)
def test_long_steps_and_the_ends_of_a_block_of_full_size(words: set[int]) -> None:
    former = os.urandom(1 << 20)
    present = changed(former, words)
    change = change_between(former, present)
    assert change is not None and len(change) <= 4 * (len(words) + 8)
    block = bytearray(former)
    apply_change(change, memoryview(block))
    assert block == present


def test_what_changes_much_or_has_half_a_word_is_sent_whole() -> None:
    former = os.urandom(4096)
    assert change_between(former, os.urandom(4096)) is None
    assert change_between(former[:4095], former[:4095]) is None
    assert change_between(former, changed(former, set(range(0, 2048, 4)))) is not None
    assert change_between(former, changed(former, set(range(0, 2048, 2)))) is None


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 60))
def test_bytes_that_are_no_change_write_nothing_outside_and_nothing_at_all_if_refused(
    change: bytes, num_words: int
) -> None:
    guard = bytes(64)
    memory = bytearray(guard + b"\x07" * (2 * num_words) + guard)
    try:
        apply_change(change, memoryview(memory)[64 : 64 + 2 * num_words])
    except WorkerFailed:
        assert set(memory[64:-64]) <= {7}
    assert memory[:64] == memory[-64:] == guard
