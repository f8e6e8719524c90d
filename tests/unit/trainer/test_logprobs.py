"""Sharded log-probs and entropy against log_softmax of the whole, values and gradients."""

import pytest
import torch

from yatt.trainer.logprobs import VocabularyShard, token_logprobs


class _Alone:
    """A process group of one."""

    def rank(self):
        return 0

    def size(self):
        return 1


def reference(logits, labels, temperature):
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(1, labels[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 2])
def test_values_and_gradients_are_log_softmaxes(temperature, padding):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 13 + padding, generator=generator, requires_grad=True)
    labels = torch.randint(0, 13, (9,), generator=generator)
    got = token_logprobs(logits, labels, VocabularyShard(_Alone(), 13), temperature)
    expected = reference(logits[:, :13], labels, temperature)
    mix = torch.randn(2, 9, generator=generator)
    gradients = [
        torch.autograd.grad((mix[0] * pair[0] + mix[1] * pair[1]).sum(), logits)[0]
        for pair in (got, expected)
    ]
    for left, right in zip((*got, gradients[0]), (*expected, gradients[1]), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)


def test_no_tokens_are_no_trouble():
    logits = torch.randn(0, 5, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), VocabularyShard(_Alone(), 5), 1.0)
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)
