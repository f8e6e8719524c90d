"""Soft verdicts: the mean score of the words that a judge could have written, by their probabilities. Pure.

A judge that writes Y with probability 0.6 and one that writes it with 0.99 write the same word. The share of
each word among those of the verdict is a softmax over T times their log-probs, T being the temperature at
which they were sampled: T times a log-prob differs from the logit by a constant only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from yatt.records.judged import ListedToken

Words = Mapping[str, tuple[int, ...]]
"""By word: the tokens that it may begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftVerdict:
    """A mean over words.

    Attributes:
        score: the mean of their scores.
        confidence: the largest share of a word.
        elsewhere: probability of tokens that begin no word of the verdict.
    """

    score: float
    confidence: float
    elsewhere: float


BEFORE = ("", " ", "\n", "(", "[", ":", ">", "*", '"', "=")
"""What may stand before a word: vocabularies join some of it to the word's first letter."""


def first_tokens(
    words: Sequence[str], encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], most: int
) -> dict[str, tuple[int, ...]]:
    """Returns the tokens that each word may begin with, as it stands and after `BEFORE`.

    Args:
        encode: gives the ids of a text, without special tokens.
        most: most tokens of all words.

    Raises:
        ValueError: two words begin with the same token, or a word has no token of its own.
    """
    found: dict[str, list[int]] = {word: [] for word in words}
    owners: dict[int, str] = {}
    for before in BEFORE:
        firsts = {word: _first_token(before, word, encode, decode) for word in words if word[0] != before}
        for word, token in firsts.items():
            is_shared = list(firsts.values()).count(token) > 1 or owners.get(token or 0, word) != word
            if before == "" and (token is None or is_shared):
                other = next((each for each in words if each != word and firsts[each] == token), "")
                says = f"{word!r} and {other!r} begin with the same token"
                raise ValueError(says if other else f"{word!r} has no token of its own")
            if token is None or is_shared:
                continue  # of a vocabulary without what stands before, or of no word
            owners[token] = word
            if token not in found[word] and len(found[word]) < max(1, most // len(words)):
                found[word].append(token)
    return {word: tuple(tokens) for word, tokens in found.items()}


def _first_token(
    before: str, word: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> int | None:
    """Returns the token in which a word's first character stands, in a text that begins with `before`."""
    ids = encode(before + word)
    for count in range(1, len(ids) + 1):
        if decode(ids[:count]).lstrip(f" \n{before}"):
            return ids[count - 1]
    return None


def soft_verdict(
    words: Words, logprobs: Mapping[int, float], scores: Mapping[str, float], temperature: float
) -> SoftVerdict | None:
    """Returns the mean score of the words that could have stood in a place; None if none could.

    Args:
        logprobs: of the words' first tokens there, in the distribution that was sampled from.
        temperature: at which it was; 0: greedy, log-probs are the model's own.
    """
    power = temperature or 1.0
    logits = {
        word: [power * logprobs[token] for token in tokens if logprobs.get(token, -math.inf) > -math.inf]
        for word, tokens in words.items()
    }
    return _mean(logits, scores, math.fsum(math.exp(min(0.0, each)) for each in logprobs.values()))


def soft_verdict_of_texts(place: ListedToken, scores: Mapping[str, float]) -> SoftVerdict | None:
    """As `soft_verdict`, from the alternatives that a service lists as texts, with the model's own log-probs:
    one belongs to the word that it begins, or to the one that begins it; if it begins two, to none."""
    logits, mass = dict[str, list[float]](), 0.0
    for text, logprob in place.alternatives.items():
        shown = text.strip()
        owners = [word for word in scores if shown and word.startswith(shown)]
        owners = owners or [word for word in scores if shown.startswith(word)]
        if len(owners) == 1 and logprob > -math.inf:
            logits.setdefault(owners[0], []).append(logprob)
            mass += math.exp(min(0.0, logprob))
    return _mean(logits, scores, mass)


def _mean(
    logits: Mapping[str, Sequence[float]], scores: Mapping[str, float], mass: float
) -> SoftVerdict | None:
    top = max((each for found in logits.values() for each in found), default=-math.inf)
    if not math.isfinite(top):
        return None
    weights = {word: math.fsum(math.exp(each - top) for each in found) for word, found in logits.items()}
    whole = math.fsum(weights.values())
    return SoftVerdict(
        score=math.fsum(weight / whole * scores[word] for word, weight in weights.items()),
        confidence=max(weights.values()) / whole,
        elsewhere=min(1.0, max(0.0, 1.0 - mass)),
    )


def on_grid(score: float, grid: float, scores: Sequence[float]) -> float:
    """Returns the score rounded to a multiple of `grid` times the range of the verdict's scores, above their
    least: a certain judge never says twice the same thousandth, and a group whose rewards differ by that much
    would be trained on as if it said something.

    Args:
        grid: 0, or one divided by a whole number, so that the largest score is on the grid too.
    """
    if not grid:
        return score
    least, width, steps = min(scores), max(scores) - min(scores), round(1 / grid)
    return least + width * round((score - least) / width * steps) / steps


def place_of_token(offset: int, text: str, decode: Callable[[int], str], count: int) -> int:
    """Returns the number of the token in which the character at `offset` of a text stands.

    Args:
        decode: gives the text of so many of the first tokens. Where these end in the middle of a character,
            it is not the beginning of `text`.
        count: number of tokens.
    """
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if decode(middle + 1)[: offset + 1] == text[: offset + 1]:
            high = middle
        else:
            low = middle + 1
    return low


def listed_at(offset: int, listed: Sequence[ListedToken]) -> ListedToken | None:
    """Returns the listed token in which the character at `offset` of their joined texts stands."""
    end = 0
    for token in listed:
        end += len(token.text)
        if end > offset:
            return token
    return None
