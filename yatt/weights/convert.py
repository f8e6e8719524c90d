"""Loads and exports the weights of a megatron-core model, bit by bit: Hugging Face folder <-> shards.

Both directions work parameter by parameter, so no process holds a second copy of the model.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from yatt.adapters.patience import LIMIT_S, patiently
from yatt.errors import ConfigError
from yatt.weights.boxes import full_shape
from yatt.weights.names import EMBEDDING, Entry, entries
from yatt.weights.shape import ModelShape
from yatt.weights.tensor_file import TensorFile

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The process groups that share one copy of the model."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup


class HFTensors:
    """Reads tensors of a Hugging Face folder by name, on request. If the folder fails, reads are retried.

    Args:
        limit_s: longest wait of each read for a folder that fails.
        tick: called after each part of a tensor, and after each failure, so that waiting is not a stall.

    Raises:
        ConfigError: the folder has no safetensors.
    """

    def __init__(
        self, folder: str, *, limit_s: float = LIMIT_S, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._limit_s, self._tick = Path(folder), limit_s, tick
        files = self._patiently(lambda: sorted(self._folder.glob("*.safetensors")))
        if not files:
            raise ConfigError(f"model.path: {folder} has no *.safetensors; convert the model to safetensors.")
        self._file_of: dict[str, TensorFile] = {}
        for file in files:
            opened = self._patiently(partial(TensorFile, file))
            self._file_of.update(dict.fromkeys(opened.names(), opened))

    def read(self, name: str) -> Tensor:
        """Reads one tensor to the CPU, in the folder's dtype.

        Raises:
            ConfigError: the folder has no tensor of that name.
        """
        if name not in self._file_of:
            raise ConfigError(
                f"model.path: {self._folder} has no tensor {name}; its config.json promises one."
            )
        return self._patiently(partial(self._file_of[name].read, name, self._tick))

    def _patiently(self, work: Callable[[], T]) -> T:
        def failed(error: Exception) -> None:
            self._tick()
            _LOG.warning("the model cannot be read (%s); trying again, up to %g s", error, self._limit_s)

        return patiently(work, limit_s=self._limit_s, on_failure=failed)


def global_name(name: str, model: Any) -> str:
    """Name with the layer's number in the whole model instead of its number in this pipeline stage."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    first = model.decoder.layers[0].layer_number - 1
    return f"decoder.layers.{int(match[1]) + first}.{match[2]}"


@torch.no_grad()
def load_weights(
    models: Sequence[nn.Module],
    source: HFTensors,
    shape: ModelShape,
    tp: dist.ProcessGroup,
    tick: Callable[[], None],
) -> None:
    """Fills every parameter of this rank's model chunks from the folder.

    Args:
        tick: called after each parameter.

    Raises:
        ConfigError: a tensor is missing.
    """
    table = {entry.name: entry for entry in entries(shape)}
    for model in models:
        for name, parameter in model.named_parameters():
            wanted = global_name(name, model)
            entry = table.get(wanted) or table[EMBEDDING]
            full = fuse(entry, [source.read(hf_name) for hf_name in entry.hf_names], shape)
            shard = cut_shard(entry, full, rank=tp.rank(), size=tp.size())
            assert shard.shape == parameter.shape, f"{wanted}: {shard.shape} is not {parameter.shape}"
            parameter.copy_(shard)
            tick()


@torch.no_grad()
def export_weights(
    models: Sequence[nn.Module], shape: ModelShape, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yields Hugging Face names and full tensors one by one, the same on every rank.

    Collective over both groups: every rank must exhaust the iterator.
    """
    mine = {global_name(n, model): p.data for model in models for n, p in model.named_parameters()}
    example = next(iter(mine.values()))
    table = entries(shape)
    owners = torch.tensor([groups.pp.rank() if entry.name in mine else -1 for entry in table])
    owners = owners.to(example.device)
    dist.all_reduce(owners, op=dist.ReduceOp.MAX, group=groups.pp)
    for entry, owner in zip(table, owners.tolist(), strict=True):
        if owner == groups.pp.rank():
            full = join_shards(entry, _gather(mine[entry.name], groups.tp))[: full_shape(entry, shape)[0]]
            full = full.contiguous()
        else:
            full = example.new_empty(full_shape(entry, shape))
        if groups.pp.size() > 1:
            dist.broadcast(full, group_src=owner, group=groups.pp)
        yield from zip(entry.hf_names, unfuse(entry, full, shape), strict=True)


def write_index(folder: Path, file_of: dict[str, str], size_bytes: int) -> None:
    """Writes Hugging Face's `model.safetensors.index.json`, which maps tensors to files."""
    index = {"metadata": {"total_size": size_bytes}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def fuse(entry: Entry, parts: list[Tensor], shape: ModelShape) -> Tensor:
    """Combines Hugging Face tensors into the full megatron-core parameter."""
    if entry.cut == "qkv":
        grouped = [part.reshape(shape.num_kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unfuse(entry: Entry, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """Inverse of `fuse`."""
    if entry.cut == "qkv":
        queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
        sizes = [queries, shape.head_dim, shape.head_dim]
        grouped = full.reshape(shape.num_kv_heads, sum(sizes), *full.shape[1:])
        return [part.reshape(-1, *full.shape[1:]) for part in torch.split(grouped, sizes, 1)]
    return list(full.chunk(len(entry.hf_names), 0))


def cut_shard(entry: Entry, full: Tensor, *, rank: int, size: int) -> Tensor:
    """The shard of tensor-parallel rank `rank`; zeros pad the vocabulary to a multiple of `size`."""
    if entry.cut == "whole" or size == 1:
        return full
    if entry.cut == "columns":
        return full.chunk(size, 1)[rank]
    if entry.cut == "gate_up":
        return torch.cat([half.chunk(size, 0)[rank] for half in full.chunk(2, 0)])
    if entry.cut == "vocabulary":
        full = F.pad(full, (0, 0, 0, -full.shape[0] % size))
    return full.chunk(size, 0)[rank]


def join_shards(entry: Entry, shards: list[Tensor]) -> Tensor:
    """Inverse of `cut_shard`, but keeps the vocabulary padding."""
    if len(shards) == 1 or entry.cut == "whole":
        return shards[0]
    if entry.cut == "columns":
        return torch.cat(shards, 1)
    if entry.cut == "gate_up":
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards)


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
