"""Values, generalised advantages and a critic's gradient by their definitions: transformers' model, one
sequence at a time, and nothing of yatt."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.integration.trainer.paper_losses import saved
from tests.integration.trainer.program import samples
from tests.tiny_models import reference_model
from yatt.records import message as m

SCORE = "score.weight"


def add_score(folder: Path) -> None:
    """Gives a model folder a value head that is not trivial, as a reward model has one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    width = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(4)
    tensors[SCORE] = torch.randn(1, width, generator=generator) * 0.2
    save_file(tensors, file, {"format": "pt"})


def _ids_of(rollout: m.Rollout) -> tuple[list[int], list[int]]:
    """All tokens of a sample, and the places of those that were sampled."""
    ids, sampled = list[int](), list[int]()
    for turn in rollout.turns:
        of_turn = m.unpack_ids(turn.token_ids)
        sampled += range(len(ids), len(ids) + len(of_turn)) if turn.is_sampled else ()
        ids += of_turn
    return ids, sampled


def folder_values(folder: Path, iteration: int) -> list[float]:
    """Values of an iteration's samples by a model folder that transformers loads as it is, in float32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    values = list[float]()
    for rollout in samples(iteration, has_observations=True)[1]:
        ids, sampled = _ids_of(rollout)
        with torch.no_grad():
            value_T = model.score(model.model(torch.tensor([ids])).last_hidden_state[0])[:, 0]
        values += value_T[[place - 1 for place in sampled]].tolist()
    return values


class Valued(NamedTuple):
    """Of the first iteration's samples, in order: values, and what follows from them, a list per sample."""

    values: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]]
    gradient: dict[str, torch.Tensor]


def paper_critic(
    folder: Path, *, gamma: float, lam: float, masked: Collection[int] = (), num_steps: int = 2
) -> Valued:
    """Values of samples with observations; and the gradient of the first mini-batch's loss, whose values are
    the old ones, under Hugging Face names."""
    model = reference_model(folder).float()
    score = torch.nn.Parameter(load_file(folder / "model.safetensors")[SCORE])
    facts, rollouts = samples(1, has_observations=True)
    values, advantages, returns, losses = [], [], [], list[torch.Tensor]()
    for number, (fact, rollout) in enumerate(zip(facts, rollouts, strict=True)):
        ids, sampled = _ids_of(rollout)
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        mine = (hidden @ score.T)[[place - 1 for place in sampled], 0]
        each, count = mine.detach().double().tolist(), len(sampled)
        then = [*each, 0.0]
        errors = [
            (fact.reward if t == count - 1 else 0.0) + gamma * then[t + 1] - each[t] for t in range(count)
        ]
        gains = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]
        values.append(each)
        advantages.append(gains)
        returns.append([gain + value for gain, value in zip(gains, each, strict=True)])
        if number < len(facts) // num_steps and number not in masked:
            losses.append((mine - torch.tensor(returns[-1])).square() / 2)
    torch.cat(losses).mean().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradient = dict(pair for name, grad in named.items() for pair in saved(name, grad)) | {SCORE: score.grad}
    return Valued(values, advantages, returns, gradient)
