"""Rewards of tokens from a teacher. Pure."""

from collections.abc import Sequence

import msgspec

from yatt.records.episode import Turn
from yatt.records.message import pack_floats, unpack_floats


def rewarded_turns(
    turns: Sequence[Turn], teacher_logprobs: Sequence[float], coef: float
) -> tuple[list[Turn], float]:
    """Returns the turns with rewards of their sampled tokens, and the mean before `coef`.

    The reward of a token is `coef` times the teacher's log-prob less the sampler's. Its mean over the
    policy's own tokens is the negative reverse KL divergence to the teacher; as the advantage of each
    token, without a discount, it is that divergence's gradient.

    Source: arXiv 2306.13649 (on-policy distillation), with reverse KL.

    Args:
        teacher_logprobs: of all tokens of all turns; those of an environment's turns have no effect.
    """
    found, differences, at = list[Turn](), list[float](), 0
    for turn in turns:
        own = teacher_logprobs[at : at + turn.num_tokens]
        at += turn.num_tokens
        if turn.is_sampled and turn.num_tokens:
            gained = [t - s for t, s in zip(own, unpack_floats(turn.logprobs), strict=True)]
            before = unpack_floats(turn.token_rewards) if turn.token_rewards else [0.0] * len(gained)
            rewards = [old + coef * gain for old, gain in zip(before, gained, strict=True)]
            turn = msgspec.structs.replace(turn, token_rewards=pack_floats(rewards))
            differences += gained
        found.append(turn)
    return found, sum(differences) / max(1, len(differences))
