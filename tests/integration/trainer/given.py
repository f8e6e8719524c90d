"""Samples whose completions are given, and their losses by definition: transformers' model, one sequence at a
time, and nothing of yatt."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file

from tests.integration.trainer.paper_losses import saved
from tests.integration.trainer.program import samples
from tests.integration.trainer.valued import SCORE
from tests.tiny_models import reference_model
from yatt.core.samples.balance import Cost, plan_iteration
from yatt.records import message as m

END = 3
CAP = 70
"""Tokens of a micro-batch: several of each mini-batch, and room for the longest pair."""

Samples = tuple[tuple[m.SampleFact, ...], tuple[m.Rollout, ...]]


def given_samples(kind: str, iteration: int) -> Samples:
    """Of sft with an observation between two turns; of others pairs, neighbours of one prompt."""
    facts, rollouts = samples(iteration, has_observations=kind == "sft")
    if kind == "sft":
        return tuple(msgspec.structs.replace(fact, prompt_group=fact.sample_id) for fact in facts), rollouts
    pairs = [msgspec.structs.replace(fact, prompt_group=fact.sample_id // 2) for fact in facts]
    if kind == "dpo":
        return tuple(pairs), rollouts
    return tuple(map(_read_only, pairs)), tuple(map(_with_end, rollouts))


def _with_end(rollout: m.Rollout) -> m.Rollout:
    """A text whose score is read: nothing of it is sampled but one token after it."""
    prompt, said = rollout.turns
    end = m.Turn(m.pack_ids([END]), is_sampled=True, logprobs=bytes(4), finish_reason="stop")
    return msgspec.structs.replace(rollout, turns=(prompt, m.Turn(said.token_ids), end))


def _read_only(fact: m.SampleFact) -> m.SampleFact:
    said = fact.num_completion_tokens
    return msgspec.structs.replace(fact, num_completion_tokens=1, num_observation_tokens=said)


def given_order(
    kind: str, iteration: int, *, keeps_groups: bool, num_steps: int = 2, is_held_out: bool = False
) -> m.Train:
    """This rank's order, as the leader and its controller would make it."""
    from megatron.core import parallel_state as mpu

    facts, rollouts = given_samples(kind, iteration)
    num_groups = len({fact.prompt_group for fact in facts})
    plan = plan_iteration(
        facts, groups_per_step=num_groups // num_steps, dp_size=mpu.get_data_parallel_world_size(),
        cap_tokens=CAP, cost=Cost(), keeps_groups=keeps_groups,
    )  # fmt: skip
    rank = mpu.get_data_parallel_rank()
    mine = {number for step in plan for micro in step.micro_batches[rank] for number in micro}
    is_first = mpu.get_pipeline_model_parallel_rank() == 0 and mpu.get_tensor_and_context_parallel_rank() == 0
    held = tuple(rollout for rollout in rollouts if rollout.sample_id in mine) if is_first else ()
    return m.Train(iteration=iteration, facts=facts, plan=plan, rollouts=held, is_held_out=is_held_out)


class Defined(NamedTuple):
    """Of a mini-batch: its loss, the gradient under Hugging Face names, and what pairs compare."""

    loss: float
    gradient: dict[str, torch.Tensor]
    chosen: list[float]
    rejected: list[float]


def defined_loss(
    folder: Path, kind: str, settings: dict, *, policy: dict[str, torch.Tensor] | None = None,
    mode: str = "token-mean", whole: bool = False,
) -> Defined:  # fmt: skip
    """The definitions, with the model in `folder` as the reference.

    Args:
        policy: weights of the policy; None: those of the folder.
        whole: of both mini-batches.
    """
    reference, model = reference_model(folder).float(), reference_model(folder).float()
    score = None
    if policy is not None:
        model.load_state_dict(policy)
    if kind == "reward_model":
        score = torch.nn.Parameter(load_file(folder / "model.safetensors")[SCORE])
    _, rollouts = given_samples(kind, 1)
    half = rollouts if whole else rollouts[: len(rollouts) // 2]
    chosen, rejected = list[float](), list[float]()
    if kind == "sft":
        each = [_logprobs(model, rollout) for rollout in half]
        loss = (
            -torch.cat(each).mean() if mode == "token-mean" else -torch.stack([e.mean() for e in each]).mean()
        )
    else:
        losses = []
        for one, other in zip(half[0::2], half[1::2], strict=True):
            found, compared = _pair_loss((model, reference, score), one, other, kind, settings)
            losses.append(found)
            chosen.append(compared[0].item())
            rejected.append(compared[1].item())
        loss = torch.stack(losses).mean()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradient = dict(pair for name, grad in named.items() for pair in saved(name, grad))
    if score is not None:
        gradient = {k: v for k, v in gradient.items() if k != "lm_head.weight"} | {SCORE: score.grad}
    return Defined(loss.item(), gradient, chosen, rejected)


def _pair_loss(models, one: m.Rollout, other: m.Rollout, kind: str, settings: dict):
    model, reference, score = models
    if kind == "reward_model":
        first, second = (_score(model, score, rollout) for rollout in (one, other))
        loss = torch.log1p(torch.exp(second - first))
        return loss + settings.get("center_coef", 0.0) * (first + second) ** 2, (first, second)
    beta, smoothing = settings.get("beta", 0.1), settings.get("label_smoothing", 0.0)
    own = [_logprobs(model, rollout) for rollout in (one, other)]
    with torch.no_grad():
        theirs = [_logprobs(reference, rollout) for rollout in (one, other)]
    first, second = (beta * (a.sum() - b.sum()) for a, b in zip(own, theirs, strict=True))
    loss = (1 - smoothing) * torch.log1p(torch.exp(second - first))
    loss = loss + smoothing * torch.log1p(torch.exp(first - second))
    return loss - settings.get("sft_coef", 0.0) * own[0].mean(), (first, second)


def _ids(rollout: m.Rollout) -> tuple[list[int], list[int]]:
    """All tokens, and the places of those that are trained on."""
    ids, sampled = list[int](), list[int]()
    for turn in rollout.turns:
        of_turn = m.unpack_ids(turn.token_ids)
        sampled += range(len(ids), len(ids) + len(of_turn)) if turn.is_sampled else ()
        ids += of_turn
    return ids, sampled


def _logprobs(model, rollout: m.Rollout) -> torch.Tensor:
    ids, sampled = _ids(rollout)
    logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logits[[place - 1 for place in sampled], [ids[place] for place in sampled]]


def _score(model, score, rollout: m.Rollout) -> torch.Tensor:
    """The value head on the last token of the text, which ends before the end token."""
    ids, _ = _ids(rollout)
    return (model.model(torch.tensor([ids[:-1]])).last_hidden_state[0, -1] @ score.T)[0]
