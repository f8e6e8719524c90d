"""Log-probs and values of all sampled tokens of a batch, by models as they are, in any layout."""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from yatt.records import message as m
from yatt.trainer.forward.passes import completion_logprobs, counts_tokens, reader_of
from yatt.trainer.update import critic, update


def sampled_logprobs(worker: Any, order: m.Train) -> list[float]:
    """Of every sample in the order of the facts, one token after the other. Collective."""
    learner = worker._ready.learner
    rollouts = update.share_rollouts(order.rollouts, learner.policy.device)
    for features in learner.pictures:
        update._share_pictures(features, order.iteration, rollouts)
    micros = list(itertools.chain(*update.mini_batches(learner, order, rollouts)))
    reader = reader_of(learner.policy, learner.config.rollout.temperature)
    got = completion_logprobs(learner.policy.chunks, micros, reader, lambda: None, learner.routes.old)
    flat = torch.zeros(sum(fact.num_completion_tokens for fact in order.facts))
    if counts_tokens():
        for micro, logprobs_T in zip(micros, got, strict=True):
            flat[micro.flat_T] = logprobs_T
    dist.all_reduce(flat)
    found: list[float] = flat.tolist()
    return found


def sampled_values(worker: Any, order: m.Train) -> list[float]:
    """The critic's values of the same tokens. Collective."""
    learner = worker._ready.learner
    rollouts = update.share_rollouts(order.rollouts, learner.policy.device)
    steps = update.mini_batches(learner, order, rollouts)
    found: list[float] = critic.token_values(learner.critic, steps, order.facts, lambda: None).tolist()
    return found
