"""One trainer rank on a real GPU, by real orders: it learns, leaves no byte behind, hands its weights on."""

import gc
import time
from pathlib import Path

import pytest

from tests.gpu.rank import Rank
from tests.packages import needs
from tests.tiny_models import VOCAB_SIZE
from yatt.records import message as m

pytestmark = [needs("megatron"), pytest.mark.gpu]

MIB = 1 << 20
PROBE = [[(7 * row + 3 * at) % VOCAB_SIZE for at in range(24)] for row in range(3)]


class Trainer(Rank):
    """A rank that learns from the samples of the other tests, and publishes with one probe."""

    def learn(self, iteration: int) -> dict[str, float]:
        from tests.integration.trainer.program import train_order

        return self.worker.handle(train_order(iteration, 2)).metrics

    def publish(self, folder: Path) -> list[list[float]]:
        return super().publish(folder, PROBE)


@pytest.fixture(scope="module")
def before_bytes(cuda) -> int:
    import torch

    return torch.cuda.memory_allocated()


@pytest.fixture(scope="module")
def trainer(model, before_bytes) -> Trainer:
    return Trainer(model, "float32")


def worst(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def hf_tensors(folder: Path, files: list[Path]) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def test_published_weights_are_bit_for_bit_those_that_were_loaded(model, tmp_path):
    import torch

    from yatt.engine.weights.published import read_publication
    from yatt.weights.published import PublishedWeights

    trainer = Trainer(model, "float32")
    trainer.publish(tmp_path / "v1")
    publication = read_publication(str(tmp_path / "v1"), 1)
    sent = dict(PublishedWeights(publication.stems, publication.stamp))
    kept = hf_tensors(model, list(model.glob("*.safetensors")))
    assert sent.keys() == kept.keys()
    assert all(torch.equal(sent[name], kept[name]) for name in kept)


def test_off_the_device_no_byte_is_left_and_all_comes_back(trainer, before_bytes, tmp_path, say):
    import torch

    trainer.learn(1)
    probe = trainer.publish(tmp_path / "a")
    awake, free_awake = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    host = trainer.worker._ready.host
    held, began_s = host.device_bytes, time.perf_counter()
    trainer.worker.handle(m.Sleep())
    torch.cuda.synchronize()
    slept_s = time.perf_counter() - began_s
    asleep, free_asleep = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    assert host.device_bytes == 0
    assert awake - asleep >= held
    assert asleep - before_bytes <= 8 * MIB
    assert free_asleep - free_awake >= 0.9 * held
    began_s = time.perf_counter()
    trainer.worker.handle(m.Wake())
    torch.cuda.synchronize()
    say(
        f"offload: {held / MIB:.0f} MiB away in {slept_s * 1e3:.0f} ms, back in "
        f"{(time.perf_counter() - began_s) * 1e3:.0f} ms; {(asleep - before_bytes) / MIB:.1f} MiB stay"
    )
    assert host.device_bytes == held
    assert trainer.publish(tmp_path / "b") == probe


def test_a_host_copy_is_registered_with_cuda_also_where_an_earlier_one_was(model):
    for _ in range(3):
        rank = Trainer(model, "float32")
        areas = {
            held.area: held.host.is_pinned() for held in rank.worker._ready.host._held.values() if held.area
        }
        assert areas == {"weights": True, "state": True}
        del rank
        gc.collect()


def test_training_steps_are_finite_and_move_the_policy(trainer, tmp_path, say):
    before = trainer.publish(tmp_path / "a")
    began_s = time.perf_counter()
    metrics = [trainer.learn(iteration) for iteration in (2, 3)]
    say(f"two iterations of two optimizer steps: {time.perf_counter() - began_s:.2f} s")
    assert all(0 < row["actor/grad_norm"] < 1e4 for row in metrics)
    assert worst(before, trainer.publish(tmp_path / "b")) > 1e-4


def test_an_optimizer_on_the_host_learns_the_same_and_needs_three_parts(model, tmp_path, monkeypatch, say):
    import torch

    from yatt.trainer.mcore import parted_step

    monkeypatch.setattr(parted_step, "PART_BYTES", 1 << 16)
    probes, peaks = [], []
    for is_away in (False, True):
        trainer = Trainer(model, "bfloat16", offload_optimizer=is_away)
        trainer.learn(1)
        torch.cuda.reset_peak_memory_stats()
        before, began_s = torch.cuda.memory_allocated(), time.perf_counter()
        trainer.learn(2)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        say(f"optimizer away: {is_away}, an iteration of two steps in {time.perf_counter() - began_s:.3f} s")
        held = trainer.worker._ready.host._held.values()
        state = sum(each.size_bytes for each in held if each.area == "state")
        probes.append(trainer.publish(tmp_path / str(is_away)))
        del trainer
        gc.collect()
    here, away = (peak / MIB for peak in peaks)
    say(f"peak beside what stays: {here:.2f} MiB, away {away:.2f}; state {state / MIB:.2f}")
    assert probes[0] == probes[1], "to the bit"
    assert peaks[1] < peaks[0] + state / 2


def test_the_fallback_engine_takes_the_weights_and_agrees(trainer, model, tmp_path, say):
    pytest.importorskip("transformers")
    from yatt.engine.build import build_engine
    from yatt.engine.protocol import EngineOptions

    expected = trainer.publish(tmp_path / "v1")
    options = EngineOptions(
        model=str(model), dtype="float32", device="cuda", eos_ids=(2,), max_model_tokens=128, max_num_seqs=8
    )
    engine = build_engine("transformers", options)
    engine.start()
    try:
        engine.load_weights(1, str(tmp_path / "v1"))
        difference = worst(expected, engine.score(PROBE))
    finally:
        engine.close()
    say(f"log-probs of trainer and transformers engine differ by {difference:.1e} at most")
    assert difference < 1e-3


def test_bfloat16_says_what_float32_says_up_to_rounding(trainer, model, tmp_path, say):
    low = Trainer(model, "bfloat16")
    exact = Trainer(model, "float32")
    difference = worst(exact.publish(tmp_path / "exact"), low.publish(tmp_path / "low"))
    norms = [each.learn(1)["actor/grad_norm"] for each in (exact, low)]
    say(f"bfloat16: log-probs within {difference:.1e}, gradient norms {norms[0]:.4f} and {norms[1]:.4f}")
    assert difference < 0.1
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
