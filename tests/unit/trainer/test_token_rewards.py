"""Rewards of tokens reach the tokens that they were given for, in every layout."""

import numpy as np
import pytest

from yatt.records import message as m
from yatt.records.episode import Turn

torch = pytest.importorskip("torch")


def turn(ids: list[int], *, rewards: list[float] | None = None, is_sampled: bool = True) -> Turn:
    """A turn whose log-probs are its rewards, so that one shows where the other is."""
    packed = m.pack_floats(rewards or [-9.0] * len(ids)) if is_sampled else b""
    return Turn(m.pack_ids(ids), is_sampled, packed, token_rewards=packed if rewards else b"")


def rollout(number: int, *turns: Turn) -> m.Rollout:
    return m.Rollout(sample_id=number, turns=(turn([1, 2, 3], is_sampled=False), *turns))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cp", [1, 2])
def test_a_token_has_its_own_reward_whatever_the_layout(cp: int) -> None:
    from yatt.trainer.attention.batches import SequenceLayout, micro_batch, sample_of

    turns = [
        turn([4, 5], rewards=[-0.5, 0.25]),
        turn([6, 7], is_sampled=False),
        turn([8, 9], rewards=[1.0, 2.0]),
    ]
    rewarded = sample_of(rollout(0, *turns), 0)
    plain = sample_of(rollout(1, turn([4, 5, 6, 7])), 4)
    half = sample_of(rollout(2, turns[0], turns[1], turn([8])), 8)
    assert plain.token_rewards is None
    assert half.token_rewards is not None and half.token_rewards.tolist() == [-0.5, 0.25, 0.0]
    samples = [rewarded, plain, half]
    weights = [np.ones(each.num_completion_tokens, np.float32) for each in samples]
    seen: dict[int, float] = {}
    for rank in range(cp):
        cut = SequenceLayout(align=2 * cp, cp_size=cp, cp_rank=rank)
        micro = micro_batch(samples, weights, cut, torch.device("cpu"))
        assert micro.sampled.rewards_T is not None
        seen |= dict(zip(micro.flat_T.tolist(), micro.sampled.rewards_T.tolist(), strict=True))
        own = micro.sampler_T != -9.0  # the others have no reward
        assert torch.equal(micro.sampled.rewards_T[own], micro.sampler_T[own])
        assert micro_batch([plain], weights[1:2], cut, torch.device("cpu")).sampled.rewards_T is None
    assert [seen[index] for index in range(11)] == [-0.5, 0.25, 1.0, 2.0, 0, 0, 0, 0, -0.5, 0.25, 0.0]
