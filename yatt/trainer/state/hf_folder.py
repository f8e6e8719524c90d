"""Writes the policy as a Hugging Face folder for people. A rename makes each complete file visible."""

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from yatt.adapters.files.patience import LIMIT_S, with_retries
from yatt.models.rows import WeightRow
from yatt.trainer.forward.passes import Tick
from yatt.trainer.mcore.model import Policy
from yatt.weights.convert import export_weights, pick_tensors, write_index

BUCKET_BYTES = 256 << 20


def export_hf(policy: Policy, folder: Path, tick: Tick, *, writes: bool) -> None:
    """Writes the policy's weights, in buckets, as a Hugging Face folder. Collective.

    Raises:
        OSError: the folder's filesystem fails permanently, or for longer than the limit.
    """
    step = partial(with_retries, limit_s=LIMIT_S, on_failure=lambda _: tick())
    if writes:
        step(partial(folder.mkdir, exist_ok=True))  # no parents: do not recreate a removed run folder
    file_of: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(_buckets(policy, copies=writes)):
        name = f"model-{number + 1:05d}.safetensors"
        file_of |= dict.fromkeys(bucket, name)
        total += sum(tensor.nbytes for tensor in bucket.values())
        if writes:
            step(partial(_save_bucket, bucket, folder / name))
        tick()
    if writes:
        with_retries(partial(write_index, folder, file_of, total))


def _save_bucket(bucket: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({key: tensor.cpu() for key, tensor in bucket.items()}, unfinished, {"format": "pt"})
    except SafetensorError as error:  # its text contains the filesystem's error number
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(number := int(found[1]), os.strerror(number), str(path)) from error
    unfinished.replace(path)


def _buckets(policy: Policy, *, copies: bool) -> Iterator[dict[str, Tensor]]:
    """Yields weights by name; copies of them if `copies`, because parts of fused weights share memory."""
    bucket: dict[str, Tensor] = {}
    size = 0
    stacks = _Stacks()
    for row, full in export_weights(policy.models, policy.rows, policy.groups):
        for name, tensor in stacks.tensors_of(row, full, copies=copies):
            bucket[name] = tensor
            size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


class _Stacks:
    """Makes tensors of files from whole parameters; the experts of a layer wait until all are there."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Tensor, set[int]]] = {}

    def tensors_of(self, row: WeightRow, full: Tensor, *, copies: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that are complete with this parameter; their values only if `copies`."""
        if (own := row.stacked) is None:
            for name, tensor in zip(row.hf_names, pick_tensors(row, full), strict=True):
                yield name, tensor.contiguous().clone() if copies else tensor
            return
        if own.name not in self._waiting:
            shape = (own.count, row.width, row.num_rows)
            device = "cpu" if copies else "meta"
            self._waiting[own.name] = torch.empty(shape, dtype=full.dtype, device=device), set()
        stack, there = self._waiting[own.name]
        stack[own.index].copy_(full.T)
        there.add(own.index)
        if len(there) == own.count:
            del self._waiting[own.name]
            yield own.name, stack
