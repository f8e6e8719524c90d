"""Loads and exports the weights of a megatron-core model, bit by bit: Hugging Face folder <-> shards.

Both directions work parameter by parameter, so no process holds a second copy of the model.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from yatt.adapters.files.patience import LIMIT_S, with_retries
from yatt.errors import ConfigError
from yatt.models.quantized import BLOCK, SCALE, scale_shape
from yatt.models.rows import EMBEDDING, OUTPUT, ROUTER_BIAS, WeightRow
from yatt.models.tensors import file_shapes, hf_shapes, turned_shape
from yatt.weights.tensor_file import TensorFile

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The process groups that share one copy of the model.

    Args:
        tp: ranks that share each layer's matrices.
        pp: ranks that share the layers.
        ep: ranks that share the experts of one layer.
        expert_tp: ranks that share each expert's matrices.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup

    def sharing(self, row: WeightRow) -> dist.ProcessGroup:
        """The group whose ranks each have a cut of this parameter."""
        return self.expert_tp if row.is_expert else self.tp


class HFTensors:
    """Reads tensors of a Hugging Face folder by name, on request. If the folder fails, reads are retried.

    Args:
        limit_s: longest wait of each read for a folder that fails.
        tick: called after each part of a tensor, and after each failure, so that waiting is not a stall.
        zeros: names of tensors that are zero if the folder has none.

    Raises:
        ConfigError: the folder has no safetensors.
    """

    def __init__(
        self,
        folder: str,
        *,
        limit_s: float = LIMIT_S,
        tick: Callable[[], None] = lambda: None,
        zeros: Sequence[str] = (),
    ) -> None:
        self._folder, self._limit_s, self._tick, self._zeros = Path(folder), limit_s, tick, zeros
        files = self._patiently(lambda: sorted(self._folder.glob("*.safetensors")))
        if not files:
            raise ConfigError(f"model.path: {folder} has no *.safetensors; convert the model to safetensors.")
        self._file_of: dict[str, TensorFile] = {}
        for file in files:
            opened = self._patiently(partial(TensorFile, file))
            self._file_of.update(dict.fromkeys(opened.names(), opened))

    def read(self, name: str) -> Tensor:
        """Reads one tensor to the CPU, in the folder's dtype; in float32 if it is in FP8 with scales.

        Raises:
            ConfigError: the folder has no tensor of that name.
        """
        tensor = self._read(name)
        return (
            dequantised_weight(tensor, self._read(name + SCALE))
            if tensor.dtype is torch.float8_e4m3fn
            else tensor
        )

    def read_parameter(self, row: WeightRow) -> Tensor:
        """Reads one whole parameter to the CPU.

        Raises:
            ConfigError: one of its tensors is missing, or has another shape than the table promises.
        """
        if all(name in self._zeros and name not in self._file_of for name in row.hf_names):
            return torch.zeros(row.full_shape)
        if (own := row.stacked) is None:
            return fuse_tensors(row, [self.read(name) for name in row.hf_names])
        if (found := self._file(own.name).shape(own.name)) != turned_shape(row):
            _check_shape(own.name, found, file_shapes([row])[own.name])
        block = self._read(own.name, own.index)
        if block.dtype is torch.float8_e4m3fn:
            raise ConfigError(f"model.path: {own.name} is in FP8; experts in one tensor are not read so.")
        return block if found == turned_shape(row) else block.T.contiguous()

    def _file(self, name: str) -> TensorFile:
        if name not in self._file_of:
            raise ConfigError(
                f"model.path: {self._folder} has no tensor {name}; its config.json promises one."
            )
        return self._file_of[name]

    def _read(self, name: str, block: int | None = None) -> Tensor:
        return self._patiently(partial(self._file(name).read, name, self._tick, block))

    def _patiently(self, work: Callable[[], T]) -> T:
        def failed(error: Exception) -> None:
            self._tick()
            _LOG.warning("the model cannot be read (%s); trying again, up to %g s", error, self._limit_s)

        return with_retries(work, limit_s=self._limit_s, on_failure=failed)


def dequantised_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """The weight in float32: each block's elements times its scale.

    Args:
        weight: float8_e4m3fn [rows, columns].
        scales: float32 [rows / 128, columns / 128], rounded up.

    Raises:
        ConfigError: the scales have another shape.
    """
    if tuple(scales.shape) != scale_shape(tuple(weight.shape)):
        raise ConfigError(
            f"model.path: a weight of shape {tuple(weight.shape)} in FP8 has scales of shape "
            f"{tuple(scales.shape)}; {scale_shape(tuple(weight.shape))} is needed."
        )
    if not torch.isfinite(scales.float()).all():
        raise ConfigError("model.path: a weight in FP8 has scales that are not finite; copy the model again.")
    every = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * every[: weight.shape[0], : weight.shape[1]]


def named_weights(models: Sequence[nn.Module], groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's weights with their names in the whole model: its parameters and the routers' biases,
    which are buffers."""
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, nn.Parameter) or name.endswith(ROUTER_BIAS):
                yield global_name(name, model, groups.ep), tensor


def router_biases(model: nn.Module) -> list[Any]:
    """The routers of a model that have a bias, in `expert_bias`."""
    return [module for module in model.modules() if getattr(module, "expert_bias", None) is not None]


def global_name(name: str, model: Any, ep: dist.ProcessGroup) -> str:
    """Name with the numbers of layer and expert in the whole model instead of those on this rank, and the
    expert's in place of where megatron-core has it: ``mlp.experts.7.linear_fc1.weight``."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    layer, leaf = int(match[1]) + model.decoder.layers[0].layer_number - 1, match[2]
    if (expert := LOCAL_EXPERT.match(leaf)) is not None:
        number = int(expert[1]) + ep.rank() * (model.config.num_moe_experts // ep.size())
        leaf = f"mlp.experts.{number}.{leaf[expert.end() :]}"
    return f"decoder.layers.{layer}.{leaf}"


@torch.no_grad()
def load_weights(
    models: Sequence[nn.Module],
    source: HFTensors,
    rows: Sequence[WeightRow],
    groups: ParallelGroups,
    tick: Callable[[], None],
) -> None:
    """Fills every parameter of this rank's model chunks from the folder.

    Args:
        tick: called after each parameter.

    Raises:
        ConfigError: a tensor is missing or has another size; or the table has no row for a parameter.
    """
    table = {row.name: row for row in rows}
    for name, parameter in named_weights(models, groups):
        row = parameter_row(table, name)
        full = source.read_parameter(row)
        sharing = groups.sharing(row)
        shard = cut_shard(row, full, cut_of(row, parameter), rank=sharing.rank(), size=sharing.size())
        if shard.shape != parameter.shape:
            raise ConfigError(
                f"model.family: the row {name} gives {tuple(shard.shape)} for a parameter of "
                f"{tuple(parameter.shape)}."
            )
        parameter.copy_(shard)
        tick()


def parameter_row(table: Mapping[str, WeightRow], name: str) -> WeightRow:
    """The row of a parameter. The last pipeline stage's copy of tied embeddings has that of the embedding.

    Raises:
        ConfigError: there is none.
    """
    if name in table:
        return table[name]
    if name == OUTPUT:
        return table[EMBEDDING]
    raise ConfigError(f"model.family: the table has no row for the parameter {name}.")


@torch.no_grad()
def export_weights(
    models: Sequence[nn.Module], rows: Sequence[WeightRow], groups: ParallelGroups
) -> Iterator[tuple[WeightRow, Tensor]]:
    """Yields whole parameters one by one, the same on every rank.

    Collective over all groups: every rank must exhaust the iterator.

    Raises:
        ConfigError: the table has a row without a parameter.
    """
    mine = dict(named_weights(models, groups))
    example = next(iter(mine.values()))
    for row, stage, expert_rank in _owners(rows, set(mine), groups, example.device):
        if row.name in mine:
            dim = cut_of(row, mine[row.name])
            shards = (
                [mine[row.name].data] if dim is None else _gather(mine[row.name].data, groups.sharing(row))
            )
            full = join_shards(row, shards, dim)[: row.num_rows].contiguous()
        else:
            dtype = torch.float32 if row.is_fixed else example.dtype
            full = torch.empty(row.file_shape, dtype=dtype, device=example.device)
        if row.is_expert and groups.ep.size() > 1 and stage == groups.pp.rank():
            dist.broadcast(full, group_src=expert_rank, group=groups.ep)
        if groups.pp.size() > 1:
            dist.broadcast(full, group_src=stage, group=groups.pp)
        yield row, full


def _owners(
    rows: Sequence[WeightRow], mine: set[str], groups: ParallelGroups, device: torch.device
) -> list[tuple[WeightRow, int, int]]:
    """Each row with the pipeline rank that has it and, of an expert, its rank among those that share them.

    Raises:
        ConfigError: no rank has a row.
    """
    ranks = groups.pp.rank(), groups.ep.rank()
    owners = torch.tensor([ranks if row.name in mine else (-1, -1) for row in rows], device=device)
    for group in (groups.ep, groups.pp):
        dist.all_reduce(owners, op=dist.ReduceOp.MAX, group=group)
    found = [(row, *pair) for row, pair in zip(rows, owners.tolist(), strict=True)]
    for row, stage, _ in found:
        if stage < 0:
            raise ConfigError(
                f"model.family: the table has a row for {row.name}, which the model does not have."
            )
    return found


def write_index(folder: Path, file_of: dict[str, str], size_bytes: int) -> None:
    """Writes Hugging Face's `model.safetensors.index.json`, which maps tensors to files."""
    index = {"metadata": {"total_size": size_bytes}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def fuse_tensors(row: WeightRow, tensors: Sequence[Tensor]) -> Tensor:
    """Combines Hugging Face tensors, in the order of `row.hf_names`, into the whole parameter.

    Raises:
        ConfigError: a tensor has not the rows that the table promises.
    """
    for (name, wanted), tensor in zip(hf_shapes(row).items(), tensors, strict=True):
        _check_shape(name, tuple(tensor.shape), wanted)
    return _interleaved(row, _parts(row, dict(zip(row.hf_names, tensors, strict=True))))


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ConfigError(
            f"model.path: the tensor {name} has shape {found}; its config.json promises {wanted}."
        )


def pick_tensors(row: WeightRow, full: Tensor) -> list[Tensor]:
    """Inverse of `fuse_tensors`: the Hugging Face tensors in a whole parameter."""
    heights = [part.num_rows // row.groups for part in row.parts]
    grouped = full.reshape(row.groups, sum(heights), *full.shape[1:])
    parts = [part.reshape(-1, *full.shape[1:]) for part in torch.split(grouped, heights, 1)]
    found: dict[str, list[Tensor]] = {}
    for part, tensor in zip(row.parts, parts, strict=True):
        found.setdefault(part.name, []).append(tensor)
    return [torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in found.values()]


def cut_of(row: WeightRow, parameter: Tensor) -> int | None:
    """The dimension that tensor parallelism cuts; None: each rank has the whole parameter.

    By the sizes: Transformer Engine marks every weight as cut, and experts' second matrices at the wrong
    dimension (`Linear.reset_parameters`, where megatron-core passes no parallel mode).
    """
    if row.is_tower:
        return None
    if parameter.shape[0] != row.full_shape[0]:
        return 0
    return 1 if tuple(parameter.shape) != row.full_shape else None


def cut_shard(row: WeightRow, full: Tensor, dim: int | None, *, rank: int, size: int) -> Tensor:
    """The shard of tensor-parallel rank `rank`; zeros pad the vocabulary to a multiple of `size`.

    Rows are cut part by part, so that a rank has its share of each.
    """
    if dim is None or size == 1:
        return full
    if dim == 1:
        return full.chunk(size, 1)[rank]
    if row.is_padded:
        full = F.pad(full, (0, 0, 0, -full.shape[0] % size))
    if row.groups > 1 or len(row.parts) == 1:
        return full.chunk(size, 0)[rank]
    return torch.cat(
        [part.chunk(size, 0)[rank] for part in torch.split(full, [p.num_rows for p in row.parts])]
    )


def join_shards(row: WeightRow, shards: list[Tensor], dim: int | None) -> Tensor:
    """Inverse of `cut_shard`, but keeps the vocabulary padding."""
    if len(shards) == 1 or dim is None:
        return shards[0]
    if dim == 1:
        return torch.cat(shards, 1)
    if row.groups > 1 or len(row.parts) == 1:
        return torch.cat(shards)
    heights = [part.num_rows // len(shards) for part in row.parts]
    split = [torch.split(shard, heights) for shard in shards]
    return torch.cat([pieces[index] for index in range(len(heights)) for pieces in split])


def _parts(row: WeightRow, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The rows of each part: consecutive rows of its tensor."""
    found, taken = [], dict.fromkeys(tensors, 0)
    for part in row.parts:
        begin = taken[part.name]
        found.append(tensors[part.name][begin : begin + part.num_rows])
        taken[part.name] = begin + part.num_rows
    return found


def _interleaved(row: WeightRow, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if row.groups == 1:
        return torch.cat(parts)
    grouped = [part.reshape(row.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
