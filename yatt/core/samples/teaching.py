"""What a teacher gives the tokens of a completion: rewards, or its likeliest tokens. Pure."""

import math
from collections.abc import Sequence

import msgspec

from yatt.records.episode import Likeliest, Turn
from yatt.records.message import pack_floats, unpack_floats

MOST_LOGPROB = 1e-3
"""Log-probs of likeliest tokens may be above 0 by rounding, and not by more."""


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


def distilled_turns(turns: Sequence[Turn], likeliest: Likeliest, coef: float) -> list[Turn]:
    """Returns the turns with the teacher's likeliest tokens at the places of their sampled tokens.

    Args:
        likeliest: of all tokens of all turns; those of an environment's turns have no effect.
        coef: factor of the loss that is made of them.
    """
    found, at = list[Turn](), 0
    for turn in turns:
        own = likeliest.of_tokens(at, at + turn.num_tokens)
        at += turn.num_tokens
        if turn.is_sampled and turn.num_tokens:
            turn = msgspec.structs.replace(turn, likeliest=msgspec.structs.replace(own, coef=coef))
        found.append(turn)
    return found


def likeliest_fault(likeliest: Likeliest | None, count: int, num_tokens: int) -> str:
    """Returns what is wrong with an engine's answer; empty if it has `count` tokens at each of so many
    places."""
    if likeliest is None or likeliest.count != count:
        return f"no {count} likeliest tokens"
    wanted = 4 * count * num_tokens
    if len(likeliest.ids) != wanted or len(likeliest.logprobs) != wanted:
        return f"no {count} likeliest tokens at some places"
    if not num_tokens:
        return ""
    ids, logprobs = memoryview(likeliest.ids).cast("i"), memoryview(likeliest.logprobs).cast("f")
    if min(ids) < 0:
        return "ids that are no tokens"
    if not math.isfinite(sum(logprobs)) or max(logprobs) > MOST_LOGPROB:  # a sum is as infinite as any part
        return "log-probs that are none"
    return ""
