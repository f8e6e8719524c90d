"""Chunked, sharded log-probs and entropy against log_softmax of the whole: values, gradients and memory."""

import subprocess
import sys

import pytest
import torch

from tests.integration.trainer.conftest import child_environment
from yatt.algo.kl import likeliest_kl
from yatt.trainer.forward import logprobs
from yatt.trainer.forward.logprobs import VocabularyShard, chunk_rows, token_logprobs, wanted_logprobs


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


def wanted_reference(hidden, weight, wanted, temperature):
    """Log-probs of the wanted entries, 0 where none is, and of all others together, in float64."""
    logs, is_there = (hidden @ weight.t() / temperature).log_softmax(-1), wanted >= 0
    mine = logs.gather(1, wanted.clamp(min=0)) * is_there
    is_wanted = torch.zeros(logs.shape).scatter_add_(1, wanted.clamp(min=0), is_there.float()) > 0
    return mine, logs.masked_fill(is_wanted, -torch.inf).logsumexp(1)


@pytest.mark.parametrize("mix", [(1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("chunk", [4, 100])
def test_wanted_entries_and_all_others_have_log_softmaxes_values_and_gradients(monkeypatch, mix, chunk):
    monkeypatch.setattr(logprobs, "MIN_CHUNK", chunk)
    monkeypatch.setattr(logprobs, "MAX_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
    weight = torch.randn(15, 6, generator=generator, requires_grad=True)  # two entries are padding
    labels = torch.randint(0, 13, (9,), generator=generator)
    wanted = torch.rand(9, 13, generator=generator).topk(5).indices
    wanted[:4, 3:], wanted[8] = -1, -1
    got = wanted_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), 13), 0.7, wanted.int())
    plain = token_logprobs(hidden, weight, labels, VocabularyShard(_Alone(), 13), 0.7)
    assert torch.equal(got.labels_R, plain[0]) and torch.equal(got.entropy_R, plain[1])
    pair = reference(hidden.double(), weight[:13].double(), labels, 0.7)
    expected = (*pair, *wanted_reference(hidden.double(), weight[:13].double(), wanted, 0.7))
    found = (got.labels_R, got.entropy_R, got.wanted_RK * (wanted >= 0), got.rest_R)
    factors = [torch.randn(each.shape, generator=generator) for each in found]
    gradients = []
    for values in (found, expected):
        loss = sum((f * value).sum() for f, value, on in zip(factors, values, mix, strict=True) if on)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for left, right in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(left, right.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("left", [0.0, 1e-7, 0.3])
def test_where_almost_nothing_is_left_for_the_others_the_divergence_is_exact(left):
    """The policy gives them e^-60; 1 less the sum of the wanted would be 0 or noise, and so its gradient."""
    hidden = torch.full((1, 1), 1.0, requires_grad=True)
    logits = torch.tensor([0.5, 0.0, -1.0, -60.0, -61.0])
    weight = logits[:, None].clone().requires_grad_()
    wanted = torch.tensor([[2, 0, 1]])
    teacher = (torch.tensor([[0.2, 0.3, 0.5]]) * (1 - left)).log()
    got = wanted_logprobs(hidden, weight, torch.tensor([1]), VocabularyShard(_Alone(), 5), 1.0, wanted.int())
    kl = likeliest_kl(teacher, got.wanted_RK, got.rest_R)
    (found,) = torch.autograd.grad(kl.kl_T.sum(), weight)
    exact = weight.detach().double().requires_grad_()
    mine, rest = wanted_reference(hidden.detach().double(), exact, wanted, 1.0)
    p = teacher.double().exp()
    other = 1 - p.sum() if left else torch.zeros(())
    loss = (p * (p.log() - mine)).sum() + torch.special.xlogy(other, other) - other * rest.sum()
    (expected,) = torch.autograd.grad(loss, exact)
    assert kl.kl_T.item() == pytest.approx(loss.item(), abs=2e-5)
    torch.testing.assert_close(found, expected.float(), atol=2e-6, rtol=1e-5)
    assert abs(torch.log1p(-got.wanted_RK.exp().sum()) - rest) > 40
    assert torch.isfinite(found).all() and kl.mass_T.item() == pytest.approx(1 - left, abs=1e-6)


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

num_rows, num_entries, size = 2048, 65536, 8

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
