"""Scores of several completions of one prompt, as one number."""

from collections import Counter
from collections.abc import Sequence
from math import comb


def subset_sizes(n: int) -> list[int]:
    """Returns the sizes for which `best_of` is reported, as verl does: powers of two below n, and n itself.
    Empty for one completion."""
    sizes = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*sizes, n] if n > 1 else []


def best_of(scores: Sequence[float], size: int) -> float:
    """Returns the expected maximum of a random subset of the scores, without replacement.

    The i-th smallest score (from 0) is the maximum of comb(i, size - 1) of the comb(n, size) subsets. For
    scores of 0 and 1 this is pass@k of Chen et al. (2021), arXiv 2107.03374. verl's `best@N/mean` estimates
    another number by 1000 random draws: it draws with replacement.

    Args:
        size: from 1 (the mean) to the number of scores (the maximum).
    """
    total = comb(len(scores), size)
    return sum(score * (comb(i, size - 1) / total) for i, score in enumerate(sorted(scores)))


def majority_score(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Returns the score of the answer that most completions gave: that of the first of them.

    Of answers that are equally frequent the one that comes first counts. Empty answers have no vote; without
    any vote it is 0.

    verl's `maj@N/mean` is another number: the mean over draws of N of the completions with replacement.
    """
    votes = Counter(answer for answer in answers if answer)
    return scores[answers.index(votes.most_common(1)[0][0])] if votes else 0.0
