"""megatron-core's sharded state to checkpoint files and back.

megatron-core says which box of which global tensor each rank holds (`sharded_state_dict`, optimizer
in its fully reshardable form); the files are ours. Trainers draw no random numbers once built
(dropout is refused), so there is no generator state to keep.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from yatt.checkpoint.manifest import Manifest
from yatt.checkpoint.shards import Shard, read_shards, write_shards
from yatt.checkpoint.store import Store
from yatt.clock import monotonic_s
from yatt.errors import CheckpointError
from yatt.records.message import ShardsSaved
from yatt.trainer.model import Policy

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_shards(policy: Policy, store: Store, prefix: str) -> ShardsSaved:
    """Write this rank's part of the state under an attempt-private prefix. Collective.

    Rank 0 fills `common`.
    """
    begin_s = monotonic_s()
    state, _, _ = load_preprocess(_sharded_state(policy, is_loading=False))
    sharded, common = extract_sharded_base(state)
    shards = [_shard_of(tensor) for tensor in _tensors(sharded) if is_main_replica(tensor.replica_id)]
    rank = dist.get_rank()
    files = (write_shards(store, f"{prefix}/rank-{rank:05d}.safetensors", shards),) if shards else ()
    common |= {"scheduler": policy.scheduler.state_dict()}
    return ShardsSaved(
        files=files,
        common=json.dumps(common).encode() if rank == 0 else b"{}",
        stall_s=monotonic_s() - begin_s,
    )


def restore(policy: Policy, store: Store, manifest: Manifest) -> None:
    """Fill model, optimizer and schedule from a checkpoint of any layout. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    state, nonpersistent, factories = load_preprocess(_sharded_state(policy, is_loading=True))
    sharded, _ = extract_sharded_base(state)
    tensors = list(_tensors(sharded))
    # A tensor to be filled must not be the live one: merging factories and loading copy from it.
    wanted = [_shard_of(tensor, torch.empty_like(tensor.data)) for tensor in tensors]
    read_shards(store, manifest.files, wanted)
    filled = {
        id(tensor): shard.tensor.view(tensor.local_shape)
        for tensor, shard in zip(tensors, wanted, strict=True)
    }
    dict_list_map_inplace(lambda leaf: filled.get(id(leaf), leaf), sharded)
    loaded = merge(merge(_with_tuples(json.loads(bytes(manifest.common))), nonpersistent), sharded)
    loaded = apply_factory_merges(loaded, factories)
    for index, model in enumerate(policy.models):
        _load_model(model, loaded[f"model{index}"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**SHARDING, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        f"model{index}": model.sharded_state_dict(metadata=metadata)
        for index, model in enumerate(policy.models)
    }
    state["optimizer"] = policy.optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=metadata
    )
    return state


def _tensors(sharded: dict[str, Any]) -> Iterator[ShardedTensor]:
    """The tensors; other sharded objects are Transformer Engine's fp8 state, which is not used."""
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedTensor):
            yield leaf


def _shard_of(tensor: ShardedTensor, target: torch.Tensor | None = None) -> Shard:
    data = tensor.data if target is None else target
    return Shard(
        key=tensor.key,
        global_shape=tuple(tensor.global_shape),
        offset=tuple(tensor.global_offset),
        tensor=data.view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)),
        may_grow=tensor.allow_shape_mismatch,
    )


def _load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    tensors = {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    lost = [name for name in missing if not name.endswith("_extra_state")]
    if lost or unknown:
        raise CheckpointError(f"the checkpoint is of another model: missing {lost}, unknown {unknown}")


def _with_tuples(common: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and AdamW's betas are one."""
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["betas"] = tuple(group["betas"])
    return dict(common)
