"""Chunked, sharded log-probs and entropy against log_softmax of the whole: values, gradients and memory."""

import subprocess
import sys

import pytest
import torch

from tests.integration.trainer.conftest import child_environment
from yatt.trainer.forward import logprobs
from yatt.trainer.forward.logprobs import VocabularyShard, chunk_rows, token_logprobs


class _Alone:
    """A process group of one."""

    def rank(self):
        return 0

    def size(self):
        return 1


def reference(hidden, weight, labels, temperature):
    logs = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logs.gather(1, labels[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("mix", [(1.0, 1.0), (1.0, None), (None, 1.0)], ids=["both", "log-probs", "entropy"])
@pytest.mark.parametrize("chunk", [4, 9, 100])
def test_values_and_gradients_are_log_softmaxes(monkeypatch, temperature, padding, mix, chunk):
    monkeypatch.setattr(logprobs, "MIN_CHUNK", chunk)
    monkeypatch.setattr(logprobs, "MAX_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
    weight = torch.randn(13 + padding, 6, generator=generator, requires_grad=True)
    labels = torch.randint(0, 13, (9,), generator=generator)
    got = token_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), 13), temperature)
    expected = reference(hidden.double(), weight[:13].double(), labels, temperature)
    factors = torch.randn(2, 9, generator=generator)
    gradients = []
    for pair in (got, expected):
        loss = sum((factor * value).sum() for factor, value, on in zip(factors, pair, mix, strict=True) if on)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for left, right in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(left, right.float(), atol=2e-5, rtol=1e-5)


def test_entropy_and_log_probs_stay_exact_where_logits_are_large():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.eye(16)[:5] * 200, torch.randn(40, 16, generator=generator)
    labels = torch.arange(5)
    got = token_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), 40), 1.0)
    expected = reference(hidden.double(), weight.double(), labels, 1.0)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right.float(), atol=1e-4, rtol=1e-5)


def test_no_tokens_are_no_trouble():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    token_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), 5), 1.0)[0].sum().backward()
    assert hidden.grad.shape == (0, 4)
    assert torch.equal(weight.grad, torch.zeros(5, 4))


def test_a_chunk_has_a_bounded_number_of_rows_and_bytes():
    assert (chunk_rows(62), chunk_rows(32_000), chunk_rows(151_936)) == (1024, 524, 128)


MEMORY = """
import sys
from pathlib import Path
import torch
from tests.unit.trainer.test_logprobs import _Alone
from yatt.trainer.forward.logprobs import VocabularyShard, token_logprobs

num_rows, num_entries, size = 2048, 65536, 64

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10

generator = torch.Generator().manual_seed(0)
hidden = torch.randn(num_rows, size, generator=generator).bfloat16().requires_grad_()
weight = torch.randn(num_entries, size, generator=generator).bfloat16().requires_grad_()
labels = torch.randint(0, num_entries, (num_rows,), generator=generator)
Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident size
before = peak_bytes()
values, entropy = token_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), num_entries), 0.9)
(values.sum() + 0.01 * entropy.sum()).backward()
print((peak_bytes() - before) / (num_rows * num_entries))
"""


@pytest.mark.slow
def test_the_head_takes_at_most_5_bytes_a_token_and_entry():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=child_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) <= 5.0
