"""Shapes the sum of scores into a reward. Pure."""

from dataclasses import dataclass

EQUAL_REWARDS = 1e-6
"""Below this difference of rewards a group-relative estimator learns nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Length rules of the run file.

    Attributes:
        max_tokens: maximum length of a completion.
        buffer_tokens: number of last tokens over which the penalty grows; 0: no penalty.
        factor: penalty of a completion of maximum length.
        masks_truncated: truncated completions are not trained on.
    """

    max_tokens: int
    buffer_tokens: int = 0
    factor: float = 1.0
    masks_truncated: bool = False


def shaped_reward(reward: float, num_tokens: int, shaping: Shaping) -> float:
    """Returns the reward minus the soft overlong penalty.

    Source: DAPO (arXiv 2503.14476) eq. 13: 0 up to max - buffer, then linear down to -factor at max.
    """
    if not shaping.buffer_tokens:
        return reward
    over = num_tokens - (shaping.max_tokens - shaping.buffer_tokens)
    return reward - shaping.factor * min(1.0, max(0.0, over / shaping.buffer_tokens))
