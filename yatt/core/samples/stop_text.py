"""A stop text that was cut by a break-off: one part of it was sampled before, the rest after. Pure.

An engine looks for `rollout.stop` only in what it samples itself. A completion that goes on in another
request, after a pause or a move, would run past a stop text that lies across the seam.
"""

from collections.abc import Callable, Sequence

TOKENS_PER_CHARACTER = 4
"""Most tokens of a character: its bytes."""

UNFINISHED = "\ufffd"
"""What a tokenizer shows for a character of which tokens are missing."""


def stop_across(
    ids: Sequence[int], num_before: int, stops: Sequence[str], decode: Callable[[list[int]], str]
) -> int | None:
    """Returns how many tokens of a turn end with a stop text that lies across the seam; None if none does.

    Args:
        ids: the turn's tokens.
        num_before: number of tokens that were sampled before the seam.
        decode: gives the text of tokens.
    """
    longest = max(map(len, stops), default=0)
    if not longest or not 0 < num_before < len(ids):
        return None
    begin, whole, seam = _seam(ids, num_before, longest, decode)
    for end in range(num_before + 1, len(ids) + 1):
        text = decode(list(ids[begin:end]))
        if text.endswith(UNFINISHED):
            continue
        if any(_lies_across(stop, text, whole, seam) for stop in stops):
            return end
        if len(text) >= seam + longest - 1:
            return None
    return None


def _seam(
    ids: Sequence[int], num_before: int, longest: int, decode: Callable[[list[int]], str]
) -> tuple[int, int, int]:
    """Returns the token at which the text that is looked at begins, how many characters of it are whole
    before the seam, and how many have begun.

    A tokenizer may show a whole run of bytes as unfinished if one character of it is. So the text is taken
    from and to the boundaries of characters, which are at most three tokens away.
    """
    first = max(0, num_before - TOKENS_PER_CHARACTER * (longest + 1))
    ends = range(num_before, max(first, num_before - TOKENS_PER_CHARACTER + 1) - 1, -1)
    for begin in range(first, max(-1, first - TOKENS_PER_CHARACTER), -1):
        for end in ends:
            text = decode(list(ids[begin:end]))
            if not text.startswith(UNFINISHED) and not text.endswith(UNFINISHED):
                return begin, len(text), len(text) + (end < num_before)
    before = len(decode(list(ids[first:num_before])))  # the text has such a character itself
    return first, before, before


def _lies_across(stop: str, text: str, whole: int, seam: int) -> bool:
    """Whether a stop text begins before the seam and ends after what is whole before it."""
    at = text.find(stop, max(0, whole - len(stop) + 1))
    return 0 <= at < seam
