"""A thought before a verdict: its room in the GenRM's context, and where it ends. Pure.

With `genrms[].think` a question is two requests. The first is free text; the second is the question's tokens,
the thought's as they were sampled, those of `think.end`, and the verdict. Only the second is bound to a form,
and only what it says is read, so a thought that quotes a verdict is none.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from yatt.judging.soft import place_of_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtEnd:
    """What ends thoughts.

    Attributes:
        ids: the tokens of `think.end`, which follow a thought.
        text: that ends it where the model writes it: `think.end` without blanks around it; may be empty.
        tokens: the one token of this text, if it is one. A control token has no text in an answer.
    """

    ids: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a request for a thought."""
        return (self.text,) if self.text else ()


def thought_end(end: str, encode: Callable[[str], list[int]]) -> ThoughtEnd:
    """Returns what ends thoughts.

    Args:
        end: `think.end`.
        encode: gives the ids of a trusted text, without what a tokenizer adds before one.
    """
    text = end.strip()
    ids = encode(text) if text else []
    return ThoughtEnd(ids=tuple(encode(end)), text=text, tokens=tuple(ids) if len(ids) == 1 else ())


def thought_room(budget: int, *, limit: int, others: int) -> int:
    """Returns the most tokens of a thought: the budget, or what question, end and verdict leave of it.

    Args:
        limit: tokens of the GenRM's context.
        others: tokens of question, end and the longest verdict.
    """
    return max(0, min(budget, limit - others))


def thought_size(
    ids: list[int], end: ThoughtEnd, eos_ids: Collection[int], decode: Callable[[list[int]], str]
) -> int:
    """Returns how many of the first sampled tokens are the thought: those before the token in which its end
    begins; all if there is no end.

    Args:
        eos_ids: tokens that end an answer.
        decode: gives the text of tokens, without control tokens.
    """
    stops = {*eos_ids, *end.tokens}
    size = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    text = decode(ids[:size])
    offset = text.find(end.text) if end.text else -1
    if offset < 0:
        return size
    return place_of_token(offset, text, lambda count: decode(ids[:count]), size)
