"""Counts the bytes that one rank of a real trainer holds: kept storages, and the peak of live ones.

    python counting.py FOLDER RANK WORLD_SIZE

FOLDER/jobs.json lists the jobs. A job builds the policy in its layout, trains on sequences of the given
lengths and leaves its counts in FOLDER/<name>/rank-N.json.
"""

import gc
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.trainer.program import make_config
from yatt.adapters.node_local.host_segment import CRITIC, CRITIC_STATE, STATE, WEIGHTS
from yatt.records.episode import Likeliest


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators have made and that are still alive."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._known = known
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = product(*args) if func is torch.ops.aten.mm.default else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._known or not size:
            return
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix product through float32: a processor without bfloat16 takes ten times as long for that.
    What this needs meanwhile is none of the trainer's, and is not seen."""
    if left.dtype != torch.bfloat16:
        return torch.mm(left, right)
    return torch.mm(left.float(), right.float()).bfloat16()


def kept_bytes(host: Any) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, by what the host copy holds."""
    found = {"weights": 0, "gradients": 0, "optimizer": 0, "critic": 0}
    parts = {WEIGHTS: "weights", STATE: "optimizer", CRITIC: "critic", CRITIC_STATE: "optimizer"}
    for held in host._held.values():
        part = parts.get(held.area, "")
        part = part or ("gradients" if held.host is None else "")
        if part:
            found[part] += held.size_bytes
    return {**found, "host": host.host_bytes}


def count(job: dict, folder: Path) -> dict[str, Any]:
    from yatt.adapters.inputs.model_family import model_of_run
    from yatt.models.model import with_value_head
    from yatt.trainer.device import prepare_process
    from yatt.trainer.mcore import cpu_matmul, model as policies
    from yatt.trainer.state.model_tensors import add_critic, host_copy_of

    config = make_config(job["model"], job["layout"])
    device = prepare_process(config, 0)
    cpu_matmul.MIN_ROWS = 1 << 30  # oneDNN's own buffers are none of the trainer's
    policies.join_model_parallel(config.trainer, 0)
    policy = policies.build_policy(config, model_of_run(config.model), device, None, lambda: None)
    host = host_copy_of(policy, [], folder / f"host-{dist.get_rank():05d}", 1)
    if job.get("has_critic"):
        model = with_value_head(model_of_run(config.model))
        critic = policies.build_policy(config, model, device, None, lambda: None)
        add_critic(host, critic, is_apart=False)
        return kept_bytes(host)
    counts: dict[str, Any] = kept_bytes(host)
    known = set(host._held)
    for _ in range(2):  # the first pass makes buffers that stay
        counts |= trained(policy, config, job, known)
    return counts


def taught_sample(sample: Any, count: int, generator: torch.Generator) -> Any:
    """The sample with that many likeliest tokens of a teacher."""
    if not count:
        return sample
    drawn = torch.rand(sample.num_completion_tokens, 60, generator=generator).topk(count)
    packed = (drawn.indices.int(), drawn.values.log_softmax(-1))
    taught = Likeliest(count, *(each.numpy().tobytes() for each in packed), 1.0)
    return replace(sample, likeliest=((0, taught),))


def logprobs_of(reader: Any, micro: Any, given: Any) -> torch.Tensor:
    """Log-probs of the tokens, less their divergence from a teacher."""
    taught = micro.sampled.taught
    if taught is None:
        return reader(micro, given)[0]
    logprobs_T, _, kl = reader.taught(micro, given, taught)
    return logprobs_T - taught.coefs_T * kl.kl_T


def trained(policy: Any, config: Any, job: dict, known: set[int]) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from yatt.trainer.attention.batches import SequenceLayout, micro_batch, one_turn
    from yatt.trainer.forward import passes

    layout = config.trainer
    cp = layout.context_parallel_size
    align = (layout.tensor_model_parallel_size if layout.sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    cut = SequenceLayout(align=align, cp_size=cp, cp_rank=mpu.get_context_parallel_rank())
    generator = torch.Generator().manual_seed(0)
    micros = []
    for lengths in job["micro_batches"]:
        start, samples = 0, []
        for length in lengths:
            ids = torch.randint(0, 60, (length + 1,), generator=generator).tolist()
            sample = one_turn(ids[:1], ids[1:], start)
            samples.append(taught_sample(sample, job["layout"].get("top_k", 0), generator))
            start += length
        micros.append(micro_batch(samples, [s.sampler_logprobs for s in samples], cut, policy.device))
    reader = passes.reader_of(policy, 1.0)
    live, layers = LiveBytes(known), []

    def finish(index: int, micro: Any, given: Any) -> Any:
        logprobs_T = logprobs_of(reader, micro, given)
        return -logprobs_T.sum(), torch.tensor(len(micro.labels_T), dtype=torch.int32), {}

    def begin(*_: Any) -> None:
        layers.append(-live.now)

    def end(*_: Any) -> None:
        layers[-1] += live.now

    modules = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, TransformerLayer)]
    hooks = [m.register_forward_pre_hook(begin) for m in modules]
    hooks += [m.register_forward_hook(end) for m in modules]
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    gc.collect()
    with live:
        passes.run_pass(policy.chunks, micros, finish, lambda: None, trains=True)
        peak = live.peak
        policy.optimizer.step()
    for hook in hooks:
        hook.remove()
    return {"layers": layers, "peak": peak}


def main() -> None:
    from megatron.core import parallel_state as mpu

    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    for job in json.loads((folder / "jobs.json").read_text()):
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        (place := folder / job["name"]).mkdir(exist_ok=True)
        (place / f"rank-{rank}.json").write_text(json.dumps(count(job, place)))
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
