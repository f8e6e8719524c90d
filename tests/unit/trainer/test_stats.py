"""Metrics of an iteration that are counted from the table of facts."""

import pytest
import torch

from yatt.control.rollouts.groups.groups import new_group
from yatt.core.samples.rewards import Shaping
from yatt.records.message import SampleFact, pack_floats, pack_ids, unpack_floats
from yatt.trainer.forward.stats import batch_metrics, sample_advantages

LONGEST = 4


@pytest.mark.parametrize("masks", [True, False])
def test_a_completion_is_cut_if_its_engine_says_so_however_long_it_is(masks):
    """One may end with the last token it may have; a long prompt may leave less room than is allowed."""
    group = new_group(0, 0, "prompt", [1, 2], 4)
    ends = [(LONGEST, "stop"), (LONGEST, "length"), (LONGEST - 1, "length"), (1, "stop")]
    for sample, (length, reason) in zip(group.samples, ends, strict=True):
        sample.extend(pack_ids([7] * length), pack_floats([-1.0] * length), 0)
        sample.finish_reason, sample.scores = reason, {"exact": 0.0}
    facts = group.facts({"exact": 1.0}, Shaping(max_tokens=LONGEST, masks_truncated=masks))
    metrics = batch_metrics(facts, torch.zeros(1))
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["response_length/masked_ratio"] == 0.5 * masks
    assert metrics["response_length/max"] == LONGEST


def test_a_samples_advantage_is_the_mean_over_its_tokens():
    facts = [
        SampleFact(number, prompt_group=0, reward=0.0, num_prompt_tokens=1, num_completion_tokens=length)
        for number, length in ((7, 3), (8, 0), (9, 1))
    ]
    advantages_F = torch.tensor([1.0, 2.0, 6.0, -0.25])
    assert unpack_floats(sample_advantages(facts, advantages_F)) == [3.0, 0.0, -0.25]


def test_the_batchs_metrics_have_verls_names():
    facts = [
        SampleFact(
            number, prompt_group=0, reward=reward, num_prompt_tokens=prompt, num_completion_tokens=length
        )
        for number, reward, prompt, length in ((0, 0.5, 3, 2), (1, -1.0, 5, 1), (2, 2.0, 4, 6))
    ]
    advantages_F = torch.tensor([1.0, 2.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 10.0])
    metrics = batch_metrics(facts, advantages_F)
    for name in ("critic/score", "critic/rewards"):
        assert [metrics[f"{name}/{part}"] for part in ("mean", "max", "min")] == [0.5, 2.0, -1.0]
    assert [metrics[f"critic/advantages/{part}"] for part in ("mean", "max", "min")] == [1.0, 10.0, -4.0]
    assert [metrics[f"response_length/{part}"] for part in ("mean", "max", "min")] == [3.0, 6.0, 1.0]
    assert [metrics[f"prompt_length/{part}"] for part in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
