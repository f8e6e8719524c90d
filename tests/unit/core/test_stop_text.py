"""A stop text across a seam is found wherever it lies, and ends the turn where an engine would have."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import decoders

from yatt.core.samples.stop_text import stop_across

PIECES = ["a", "b", ".", "ab", ".b", "", "a.b"]
"""What each token says; one of them nothing."""


def decode(ids: list[int]) -> str:
    return "".join(PIECES[each] for each in ids)


def by_hand(ids: list[int], num_before: int, stops: list[str]) -> int | None:
    """The first token at whose end any stop text that begins before the seam and ends after it is whole."""
    seam = len(decode(ids[:num_before]))
    for end in range(num_before + 1, len(ids) + 1):
        text = decode(ids[:end])
        for stop in stops:
            starts = range(max(0, seam - len(stop) + 1), seam)
            if any(text.startswith(stop, at) for at in starts):
                return end
    return None


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    num_before=st.integers(0, 12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_a_stop_text_across_pieces_is_found_as_in_the_whole_text(
    ids: list[int], num_before: int, stops: list[str]
) -> None:
    found = stop_across(ids, num_before, stops, decode)
    wanted = by_hand(ids, num_before, stops) if 0 < num_before < len(ids) else None
    assert found == wanted


@pytest.mark.parametrize("head", ["ab", "你", "ab你好世界", "你好。", ""])
def test_a_character_of_several_tokens_is_one_character(head: str) -> None:
    """Tokens that are bytes, by the real decoder, which may show a whole run of them as unfinished."""
    stop = "结束标志"
    ids = list(f"{head}{stop}cd".encode())
    begin, ends = len(head.encode()), len(f"{head}{stop}".encode())
    decoder = decoders.ByteFallback()

    def of_bytes(some: list[int]) -> str:
        return "".join(decoder.decode([f"<0x{each:02X}>" for each in some]))

    for seam in range(begin + 1, ends):
        assert stop_across(ids, seam, [stop], of_bytes) == ends, seam
        assert stop_across(ids, seam, [stop], lambda some: bytes(some).decode(errors="replace")) == ends, seam
    assert stop_across(ids, begin + 1, ["结"], of_bytes) == begin + 3
    assert begin == 0 or stop_across(ids, begin, ["结"], of_bytes) is None


def test_a_stop_text_that_lies_on_one_side_is_the_engines() -> None:
    assert stop_across([0, 1, 2, 0], 2, ["ab", ".a"], decode) is None
    assert stop_across([0, 1, 2, 0], 2, ["b."], decode) == 3
