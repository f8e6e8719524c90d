"""Two whole iterations are those of a plain loop: transformers, torch.optim.AdamW, and GRPO as it is written.

Old log-probs, importance weights of the sampler, the clipped ratio, the token mean, the clipped gradient, the
warm-up and the update, in plain Python, one sequence at a time; weights after two iterations are compared.
"""

import math

import pytest
import torch

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import advantages, aggregated, completion_logprobs, saved
from tests.integration.trainer.pictured import (
    pictures_in,
    prepare_pictures,
    transformers_logprobs,
    with_pictures,
)
from tests.integration.trainer.program import samples
from tests.integration.trainer.test_families import ALGORITHM, EP, EXPERT_TP, SP, TINY, TP
from tests.integration.trainer.test_seeing_layouts import names_in_files
from tests.tiny_vision import KINDS as SEEING_KINDS, make_vision_model
from yatt.records import message as m

pytestmark = pytest.mark.slow
LR, EPS, WARM_UP, DECAY, CLIP, LARGEST_NORM, HIGHEST = 1e-3, 1e-4, 2, 0.01, 0.2, 1.0, 2.0
KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")
SPREAD, EXPERTS = {TP: 2, **SP}, {EP: 2, EXPERT_TP: 1}


def train_plainly(model, logprobs_of=completion_logprobs, given=lambda iteration: samples(iteration)):
    """Two iterations of two steps; a matrix decays, a norm does not."""
    weights = dict(model.named_parameters())
    groups = [
        {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, steps = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=EPS), 0
    for iteration in (1, 2):
        facts, rollouts = given(iteration)
        gains = advantages([fact.reward for fact in facts])
        with torch.no_grad():
            old = [logprobs_of(model, rollout) for rollout in rollouts]
        numbers = range(len(rollouts))
        for half in (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]):
            rows = [
                token_losses(logprobs_of(model, rollouts[n]), rollouts[n], gains[n], old[n]) for n in half
            ]
            optimizer.zero_grad()
            aggregated("token-mean", rows).backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), LARGEST_NORM)
            steps += 1
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, steps / WARM_UP)
            optimizer.step()


def token_losses(logprobs, rollout, gain, old):
    sampler = [p for turn in rollout.turns if turn.is_sampled for p in m.unpack_floats(turn.logprobs)]
    weights = torch.tensor(
        [min(math.exp(p - q), HIGHEST) for p, q in zip(old.tolist(), sampler, strict=True)]
    )
    ratio = (logprobs - old).exp()
    return -torch.minimum(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)) * weights


@pytest.mark.parametrize("kind", KINDS)
def test_two_iterations_have_the_weights_of_a_plain_loop(tmp_path, kind):
    import transformers

    folder = make_model(tmp_path / "model", kind, num_hidden_layers=3, **TINY[kind])
    actions = [["train", 1], ["train", 2], ["publish", "final"]]
    spread = SPREAD | (EXPERTS if kind != "qwen3" else {})
    job = {"name": "two", "model": str(folder), "layout": spread, "algorithm": ALGORITHM, "actions": actions}
    got = run_world(tmp_path / "world", 2, [job])["two"].weights("final")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    train_plainly(model)
    moved = max((tensor - before[name]).abs().max().item() for name, tensor in model.named_parameters())
    assert moved > 1e-3, "it learns"
    for name, tensor in model.named_parameters():
        for saved_name, expected in saved(name, tensor.detach()):
            assert (got[saved_name] - expected).abs().max() < 1e-5, saved_name


@pytest.mark.parametrize("kind", SEEING_KINDS)
def test_two_iterations_with_pictures_have_the_weights_of_a_plain_loop(tmp_path, kind):
    """A whole run of the trainer: its tower learns too, by the processor's own pixels in the plain loop."""
    folder = make_vision_model(tmp_path / "model", kind)
    pictures = prepare_pictures(tmp_path / "media", folder)
    job = {
        "name": "two", "model": folder, "pictures": pictures, "algorithm": ALGORITHM,
        "vision": {"train": "all"},
        "layout": SPREAD | (EXPERTS if kind.endswith("_moe") else {}),
        "actions": [["train", 1], ["train", 2], ["publish", "final"]],
    }  # fmt: skip
    got = run_world(tmp_path / "world", 2, [job])["two"].weights("final")
    model, logprobs_of = transformers_logprobs(folder)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    table = pictures_in(tmp_path / "media")
    train_plainly(model, logprobs_of, lambda iteration: with_pictures(*samples(iteration), table))
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in model.named_parameters()}
    towers = [each for name, each in moved.items() if "visual" in name or "vision_tower" in name]
    assert max(towers) > 1e-3, "the tower learns"
    name_of = names_in_files(folder)
    for name, tensor in model.named_parameters():
        for saved_name, expected in saved(name, tensor.detach()):
            assert (got[name_of(saved_name)] - expected).abs().max() < 1e-5, saved_name
