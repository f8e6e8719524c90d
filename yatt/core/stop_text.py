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
    first = max(0, num_before - TOKENS_PER_CHARACTER * longest)
    before = decode(list(ids[first:num_before]))
    whole = len(before.rstrip(UNFINISHED))
    seam = whole + (whole < len(before))  # an unfinished character has begun before the seam
    for end in range(num_before + 1, len(ids) + 1):
        text = decode(list(ids[first:end]))
        if any(_lies_across(stop, text, whole, seam) for stop in stops):
            return end
        if len(text.rstrip(UNFINISHED)) >= seam + longest - 1:
            return None
    return None


def _lies_across(stop: str, text: str, whole: int, seam: int) -> bool:
    """Whether a stop text begins before the seam and ends after what is whole before it."""
    at = text.find(stop, max(0, whole - len(stop) + 1))
    return 0 <= at < seam
