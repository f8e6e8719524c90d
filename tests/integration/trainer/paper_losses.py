"""Gradients of a mini-batch by the definitions of the papers: transformers' model, one sequence at a time.

Nothing of yatt is used: ratios, weights, removed tokens, advantages and denominators are written
out in plain Python for the first optimizer step, where the policy is its own old policy.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.integration.trainer.program import N, samples
from tests.tiny_models import reference_model
from yatt.records import message as m

TEMPERATURE, MAX_LENGTH = 0.8, 9


def advantages(rewards: list[float]) -> list[float]:
    """GRPO: (r - mean) / (std + 1e-6) in each group of N."""
    found = []
    for first in range(0, len(rewards), N):
        group = rewards[first : first + N]
        mean = sum(group) / N
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (N - 1))
        found += [(r - mean) / (std + 1e-6) for r in group]
    return found


def level_ratios(level: str, each: list[float]) -> list[float]:
    if level == "token":
        return each
    whole = math.prod(each)
    return [whole if level == "sequence" else whole ** (1 / len(each))] * len(each)


def weights_of(rule: str, level: str, low: float, high: float, each: list[float]) -> list[float]:
    found = level_ratios(level, each)
    if rule == "truncate":
        return [min(r, high) for r in found]
    return [r if low <= r <= high else 0.0 for r in found] if rule == "mask" else [1.0] * len(each)


def kept_of(rejection: dict, each: list[float]) -> list[bool]:
    kept = [True] * len(each)
    if rejection.get("level", "none") != "none":
        low, high = rejection["low"], rejection["high"]
        kept = [low <= r <= high for r in level_ratios(rejection["level"], each)]
    if any(r < rejection.get("veto", 0.0) for r in each):
        kept = [False] * len(each)
    return kept


def paper_gradient(
    model_folder: Path, algorithm: dict, *, has_observations: bool = False, num_steps: int = 2,
    masked: Collection[int] = (), given: "Given | None" = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Gradient of the first of so many mini-batches under Hugging Face names, float32."""
    model, loss = _loss(
        model_folder, algorithm, share=1 / num_steps, has_observations=has_observations, masked=masked,
        given=given,
    )  # fmt: skip
    loss.backward()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = dict(
        pair for name, p in model.named_parameters() if name not in tied for pair in saved(name, p.grad)
    )
    return {released_name(name, model.config.model_type): tensor for name, tensor in found.items()}


def paper_loss(model_folder: Path, algorithm: dict, masked: Collection[int] = ()) -> float:
    """Loss of all samples as one mini-batch."""
    return _loss(model_folder, algorithm, share=1.0, masked=masked)[1].item()


def mean_entropy(model_folder: Path, rejection: dict, masked: Collection[int] = ()) -> float:
    """Mean entropy of all tokens that are neither rejected nor of masked samples, by the definition."""
    import transformers

    model, found = transformers.AutoModelForCausalLM.from_pretrained(model_folder).float(), []
    for number, rollout in enumerate(samples(1)[1]):
        (prompt, completion) = (m.unpack_ids(turn.token_ids) for turn in rollout.turns)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logs = torch.log_softmax(logits / TEMPERATURE, -1)
        each = [math.exp(p) for p in ratio_logs(logs, completion, rollout)]
        kept = kept_of(rejection, each) if number not in masked else [False] * len(completion)
        entropies = (-(logs.exp() * logs).sum(-1)).tolist()
        found += [value for value, is_kept in zip(entropies, kept, strict=True) if is_kept]
    return sum(found) / len(found)


def ratio_logs(logs: torch.Tensor, completion: Sequence[int], rollout: m.Rollout) -> list[float]:
    sampler = m.unpack_floats(rollout.turns[1].logprobs)
    return [row[token].item() - q for row, token, q in zip(logs, completion, sampler, strict=True)]


class Given(NamedTuple):
    """A model and samples in place of the usual ones, and what gives the log-probs of a sample."""

    model: Any
    facts: Sequence[m.SampleFact]
    rollouts: Sequence[m.Rollout]
    logprobs_of: Callable[[Any, m.Rollout], torch.Tensor]


def usual(model_folder: Path, *, has_observations: bool) -> Given:
    """A text model and samples without pictures."""
    model = reference_model(model_folder).float()
    return Given(model, *samples(1, has_observations=has_observations), completion_logprobs)


def _loss(
    model_folder: Path, algorithm: dict, *, share: float, has_observations: bool = False,
    masked: Collection[int] = (), given: Given | None = None,
):  # fmt: skip
    model, facts, rollouts, logprobs_of = given or usual(model_folder, has_observations=has_observations)
    gains = advantages([fact.reward for fact in facts])
    correction = {"rule": "truncate", "level": "token", "low": 0.0, "high": 2.0} | algorithm["correction"]
    rows = []
    for rollout, gain in list(zip(rollouts, gains, strict=True))[: int(len(rollouts) * share)]:
        logprobs = logprobs_of(model, rollout)
        sampler = [p for turn in rollout.turns if turn.is_sampled for p in m.unpack_floats(turn.logprobs)]
        each = [math.exp(p - q) for p, q in zip(logprobs.tolist(), sampler, strict=True)]
        weights = torch.tensor(weights_of(**correction, each=each))
        kept = torch.tensor(kept_of(algorithm.get("rejection", {}), each))
        ratio = (logprobs - logprobs.detach()).exp()
        rows.append((-gain * ratio * weights)[kept])
    return model, aggregated(algorithm["loss_agg_mode"], rows, masked)


def released_name(name: str, model_type: str) -> str:
    """A tensor's name in files: Mixtral's and MiniMax's have other names than transformers' modules."""
    if model_type in ("mixtral", "minimax_m2") and ".mlp." in name:
        leaves = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
        for old, new in leaves.items():
            name = name.replace(old, new)
    return name


def saved(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under the names of a saved model: transformers has all experts of a layer in one."""
    head, _, leaf = name.rpartition(".")
    if not head.endswith(".mlp.experts"):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        parts = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {"down_proj": 0}
        for part, index in parts.items():
            yield f"{head}.{number}.{part}.weight", expert.chunk(len(parts))[index]


def aggregated(mode: str, rows: list[torch.Tensor], masked: Collection[int] = ()) -> torch.Tensor:
    """The mini-batch's loss from the token losses of the samples that have any left. As in TRL, a masked
    sample counts in a mean over samples, its tokens do not count in one over tokens."""
    if mode == "token-mean":
        return torch.cat([row for number, row in enumerate(rows) if number not in masked]).mean()
    rows = [row * (number not in masked) for number, row in enumerate(rows) if len(row)]
    sums = torch.stack([row.sum() for row in rows])
    if mode == "seq-mean-token-mean":
        sums = torch.stack([row.mean() for row in rows])
    elif mode == "seq-mean-token-sum-norm":
        sums = sums / MAX_LENGTH
    return sums.mean()


def completion_logprobs(model, rollout: m.Rollout) -> torch.Tensor:
    """Of the tokens that the policy sampled; whatever it was given is only input."""
    ids, sampled = [], []
    for turn in rollout.turns:
        of_turn = m.unpack_ids(turn.token_ids)
        sampled += range(len(ids), len(ids) + len(of_turn)) if turn.is_sampled else ()
        ids += of_turn
    logits = model(torch.tensor([ids])).logits[0, [place - 1 for place in sampled]] / TEMPERATURE
    return torch.log_softmax(logits, -1)[range(len(sampled)), [ids[place] for place in sampled]]
