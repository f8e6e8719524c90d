"""Teachers of the samples in `program`, and the distillation loss and its gradient by definition: float64,
transformers' model, one sequence at a time, and nothing of yatt."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from tests.tiny_models import reference_model
from yatt.records import message as m
from yatt.records.episode import Likeliest

VOCAB, N, TEMPERATURE = 62, 4, 0.8
TEACHERS = {0: (5, 0.7), 1: (9, 1.3), 2: (5, 0.7), 3: None}
"""By prompt group: number of likeliest tokens, and factor of the loss; the last group has no teacher."""

BEYOND = VOCAB + 1
"""A token that only the teacher has, in its vocabulary's padding."""


def with_teachers(
    facts: Sequence[m.SampleFact], rollouts: Sequence[m.Rollout], *, has_rewards: bool
) -> tuple[tuple[m.SampleFact, ...], tuple[m.Rollout, ...]]:
    """Facts and rollouts with what the teachers say; without rewards if there are none."""
    if not has_rewards:
        facts = [msgspec.structs.replace(fact, reward=0.0) for fact in facts]
    return tuple(facts), tuple(_taught(rollout) for rollout in rollouts)


def _taught(rollout: m.Rollout) -> m.Rollout:
    said = TEACHERS[rollout.sample_id // N]
    if said is None:
        return rollout
    generator, turns = torch.Generator().manual_seed(100 + rollout.sample_id), []
    for turn in rollout.turns:
        if turn.is_sampled:
            logits = 2 * torch.randn(turn.num_tokens, VOCAB + 2, generator=generator)
            if rollout.sample_id == 1:
                logits[:, BEYOND] += 4  # it is among the likeliest
            else:
                logits[:, VOCAB:] -= 20
            if rollout.sample_id == 2:
                logits[:, :3] += 25  # nothing is left for the others
            top = logits.log_softmax(-1).topk(said[0])
            ids, logs = top.indices.int().numpy().tobytes(), top.values.numpy().tobytes()
            turn = msgspec.structs.replace(turn, likeliest=Likeliest(said[0], ids, logs, said[1]))
        turns.append(turn)
    return msgspec.structs.replace(rollout, turns=tuple(turns))


class Distilled(NamedTuple):
    """Of the first mini-batch: gradient under Hugging Face names; of all samples, a list each: divergences,
    and the teacher's mass in its likeliest tokens."""

    gradient: dict[str, torch.Tensor]
    kl: list[list[float]]
    mass: list[list[float]]


def paper_distilled(
    folder: Path, facts: Sequence[m.SampleFact], rollouts: Sequence[m.Rollout], *, mode: str,
    masked: Collection[int] = (), ratios: tuple[float, float] | None = None, num_steps: int = 2,
) -> Distilled:  # fmt: skip
    """The mean over tokens, or over the means of samples, of the factor times the divergence.

    Args:
        ratios: limits of the ratio of policy to sampler; tokens outside of them are rejected.
    """
    model = reference_model(folder).double()
    rows, kl, mass = [], [], []
    for number, rollout in enumerate(rollouts):
        logs, labels, sampler = _policy(model, rollout)
        of_sample, factor, masses = _divergences(logs, rollout)
        kl.append(of_sample.tolist())
        mass.append(masses)
        if number >= len(rollouts) // num_steps:
            continue
        row = factor * of_sample
        if ratios is not None:
            ratio = (logs[range(len(labels)), labels].detach() - torch.tensor(sampler)).exp()
            row = row[(ratio >= ratios[0]) & (ratio <= ratios[1])]
        rows.append(row if number not in masked else None)
    if mode == "token-mean":
        loss = torch.cat([row for row in rows if row is not None]).mean()
    else:
        loss = sum(row.mean() for row in rows if row is not None) / len(rows)
    loss.backward()
    gradient = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return Distilled(gradient, kl, mass)


def _policy(model: Any, rollout: m.Rollout) -> tuple[torch.Tensor, list[int], list[float]]:
    """Log-probs of the whole vocabulary at the sampled tokens' places, these tokens, and the sampler's."""
    ids, sampled, sampler = list[int](), list[int](), list[float]()
    for turn in rollout.turns:
        of_turn = m.unpack_ids(turn.token_ids)
        sampled += range(len(ids), len(ids) + len(of_turn)) if turn.is_sampled else ()
        sampler += m.unpack_floats(turn.logprobs)
        ids += of_turn
    logits = model(torch.tensor([ids])).logits[0, [place - 1 for place in sampled]]
    return (logits / TEMPERATURE).log_softmax(-1), [ids[place] for place in sampled], sampler


def _divergences(logs: torch.Tensor, rollout: m.Rollout) -> tuple[torch.Tensor, float, list[float]]:
    """The forward KL divergence at each place: the wanted tokens one by one, all others as one."""
    found, factor, masses, place = [], 0.0, [], 0
    for turn in rollout.turns:
        for at in range(turn.num_tokens if turn.is_sampled else 0):
            own, place = logs[place], place + 1
            if (said := turn.likeliest) is None:
                found.append(own.sum() * 0)
                masses.append(math.nan)
                continue
            factor, span = said.coef, slice(said.count * at, said.count * (at + 1))
            ids, theirs = m.unpack_ids(said.ids)[span], m.unpack_floats(said.logprobs)[span]
            pairs = [(own[token], p) for token, p in zip(ids, theirs, strict=True) if token < VOCAB]
            each = sum(math.exp(p) * (p - q) for q, p in pairs)
            is_other = torch.ones(VOCAB, dtype=torch.bool)
            is_other[[token for token in ids if token < VOCAB]] = False
            mass = math.fsum(math.exp(p) for _, p in pairs)
            if (left := 1 - mass) > 0:
                each = each + left * (math.log(left) - own[is_other].logsumexp(0))
            found.append(each)
            masses.append(mass)
    return torch.stack(found), factor, masses
