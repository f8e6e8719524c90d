"""The same model, completions and advantages through TRL's GRPOTrainer and through ours."""

import itertools

import pytest
import torch

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.program import NUM_SAMPLES, N, samples
from yatt.records import message as m

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]
MODES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
ITERATION, LENGTH = 1, 9
MASKED = [1, 5]
"""Samples that count as cut: not trained on, though their rewards are in the baseline."""


@pytest.fixture(scope="session")
def ours(models, tmp_path_factory):
    """One optimizer step over all samples, for each loss aggregation; the importance correction is off."""
    jobs = [
        {
            "name": loss_type,
            "model": str(models["qwen3"]),
            "layout": {"mini_batch_size": 4},
            "algorithm": {
                "loss_agg_mode": mode,
                "correction": {"rule": "none"},
                "kl_in": "none",
                "clip_ratio_high": 0.28,
            },
            "actions": [["train", ITERATION]],
        }
        for loss_type, mode in MODES.items()
    ]
    jobs += [{**job, "name": f"{job['name']} masked", "masked": MASKED} for job in jobs]
    return run_world(tmp_path_factory.mktemp("trl"), 1, jobs)


def padded(rows, fill):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, fill)


def trl_inputs(masked):
    """Left-padded prompts, right-padded completions, GRPO advantages as TRL computes them."""
    facts, rollouts = samples(ITERATION)
    prompts = [m.unpack_ids(rollout.turns[0].token_ids) for rollout in rollouts]
    completions = [m.unpack_ids(rollout.turns[1].token_ids) for rollout in rollouts]
    rewards = torch.tensor([fact.reward for fact in facts], dtype=torch.float64).view(-1, N)
    centered = rewards - rewards.mean(1, keepdim=True)
    advantages = (centered / (rewards.std(1, keepdim=True) + 1e-6)).view(-1).float()
    return {
        "prompt_ids": padded([row[::-1] for row in prompts], 0).flip(1),
        "prompt_mask": padded([[1] * len(row) for row in prompts], 0).flip(1),
        "completion_ids": padded(completions, 0),
        "completion_mask": padded(
            [[int(index not in masked)] * len(row) for index, row in enumerate(completions)], 0
        ),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(
            float(sum(len(row) for index, row in enumerate(completions) if index not in masked))
        ),
    }


def trl_loss_and_norm(folder, loss_type, scratch, masked=()):
    import tokenizers
    import transformers
    import trl

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>"
    )
    settings = trl.GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=0.8,
        max_completion_length=LENGTH,
        num_generations=N,
        per_device_train_batch_size=NUM_SAMPLES,
        gradient_checkpointing=False,
        report_to="none",
    )
    import datasets

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * NUM_SAMPLES}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    loss = trainer._compute_loss(model, trl_inputs(masked))
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(list(itertools.chain(squares))).sum().sqrt().item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", MODES)
def test_loss_and_gradient_norm_are_trls(ours, models, tmp_path, loss_type):
    loss, norm = trl_loss_and_norm(models["qwen3"], loss_type, tmp_path)
    metrics = ours[loss_type].notes[0]["metrics"][0]
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, abs=1e-5, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", MODES)
def test_masked_completions_are_trained_on_as_little_as_in_trl(ours, models, tmp_path, loss_type):
    loss, norm = trl_loss_and_norm(models["qwen3"], loss_type, tmp_path, MASKED)
    metrics = ours[f"{loss_type} masked"].notes[0]["metrics"][0]
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, abs=1e-5, rel=1e-5)
    assert metrics["response_length/masked_ratio"] == len(MASKED) / NUM_SAMPLES
