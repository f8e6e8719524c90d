"""Weights for others: to the engines of a node through memory files, to people as a Hugging Face folder.

Engines find ``index.json`` last, with ``{"policy_version", "files"}``; each file appears whole,
under its name, by rename. Writing the same version again overwrites it with the same.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor

from yatt.trainer.batches import MicroBatch, Sample, Slice, micro_batch
from yatt.trainer.model import Policy
from yatt.trainer.passes import Tick, completion_logprobs, reader_of, speaks_for_its_tokens
from yatt.weights.convert import export_weights, write_index

BUCKET_BYTES = 256 << 20
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)


def publish_weights(policy: Policy, folder: Path, policy_version: int, *, writes: bool) -> int:
    """Write all weights to `folder` on the ranks that write. Collective over all ranks.

    Returns:
        Bytes of all weights.
    """
    files, size = _write_buckets(policy, folder, writes=writes)
    if writes:
        index = json.dumps({"policy_version": policy_version, "files": list(files)})
        _replace(folder / "index.json", index.encode())
    return size


def export_hf(policy: Policy, folder: Path, *, writes: bool) -> None:
    """Write the policy's weights as a Hugging Face folder. Collective."""
    files, size = _write_buckets(policy, folder, writes=writes)
    if writes:
        write_index(folder, {name: file for file, names in files.items() for name in names}, size)


def copy_side_files(source: Path, folder: Path) -> None:
    """Config and tokenizer of one Hugging Face folder to another."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def probe_logprobs(policy: Policy, sequences: list[list[int]], cut: Slice, tick: Tick) -> list[Tensor]:
    """Log-prob (temperature 1) of every token but the first of each sequence. Collective over all ranks.

    Args:
        sequences: token ids, two or more each.

    Returns:
        float32 on CPU, the same on every rank.
    """
    micros, start = [], 0
    for ids in sequences:
        unused = np.zeros(len(ids) - 1, np.float32)
        sample = Sample(
            ids=np.array(ids, np.int64), num_prompt_tokens=1, sampler_logprobs=unused, start=start
        )
        micros.append(micro_batch([sample], [unused], cut, policy.device))
        start += len(unused)
    flat = torch.zeros(start, device=policy.device)
    if micros:
        missing = -len(micros) % (policy.mcore.virtual_pipeline_model_parallel_size or 1)
        micros += [micro_batch([], [], cut, policy.device)] * missing
        got = completion_logprobs(policy.chunks, micros, reader_of(policy, 1.0), tick)
        _fill(flat, micros, got)
    lengths = [len(ids) - 1 for ids in sequences]
    return list(torch.split(flat.cpu(), lengths)) if lengths else []


def _fill(flat: Tensor, micros: list[MicroBatch], got: list[Tensor]) -> None:
    """Put each token's number in its place, and every rank's numbers together."""
    if speaks_for_its_tokens() and mpu.get_data_parallel_rank() == 0:
        for micro, logprobs_T in zip(micros, got, strict=True):
            flat[micro.flat_T] = logprobs_T
    dist.all_reduce(flat)


def _write_buckets(policy: Policy, folder: Path, *, writes: bool) -> tuple[dict[str, list[str]], int]:
    """Names in each file, and bytes of all."""
    if writes:
        folder.mkdir(exist_ok=True)  # never its parent: a run folder that is gone stays so
    files: dict[str, list[str]] = {}
    total = 0
    for number, bucket in enumerate(_buckets(policy, copies=writes)):
        name = f"model-{number + 1:05d}.safetensors"
        files[name] = list(bucket)
        total += sum(tensor.nbytes for tensor in bucket.values())
        if writes:
            partial = folder / f".{name}.{os.getpid()}"
            save_file({key: tensor.cpu() for key, tensor in bucket.items()}, partial, {"format": "pt"})
            partial.replace(folder / name)
    return files, total


def _buckets(policy: Policy, *, copies: bool) -> Iterator[dict[str, Tensor]]:
    """Weights by name; copied if they are to be written, since parts of fused ones share memory."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in export_weights(policy.models, policy.shape, policy.groups):
        bucket[name] = tensor.contiguous().clone() if copies else tensor
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
