"""The training state as pieces of the host copy, and its restoration from a checkpoint of any layout.

Each data-parallel rank (context-parallel ranks count as such) saves the flat ranges that its part of the
distributed optimizer owns: the main copy and the optimizer's moments, and the same range of the model's own
parameter if it has another dtype. Nothing is gathered and nothing is written twice. megatron-core's own
`fully_reshardable` format is not used: it gathers the optimizer on every rank, and 0.16.1 saves shifted data
for buckets whose size is not a multiple of lcm(DP x CP, 128).

Trainers draw no random numbers after the build (dropout is refused), so no generator state is saved.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from yatt.checkpoint.commit.manifest_format import Manifest, OptimizerScalars, saved_scalars
from yatt.checkpoint.commit.pieces import FILE_BYTES, in_files
from yatt.checkpoint.local.local_first import Ranges
from yatt.checkpoint.local.shards import Shard, box_parts, planned_piece, read_shards
from yatt.errors import CheckpointError, ConfigError, words_of
from yatt.models.rows import WeightRow
from yatt.records.message import SavePlan
from yatt.trainer.mcore.mcore_config import DTYPES
from yatt.trainer.mcore.model import Policy
from yatt.trainer.mcore.optimizer_state import inner_optimizers, moments_of
from yatt.trainer.state.host_copy import HostCopy
from yatt.weights.boxes import blocks_of, boxes_of
from yatt.weights.convert import cut_of, named_weights, parameter_row

MODEL, MAIN = "model", "main"
GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Keys that identify a parameter group, as in megatron-core; but whether it has experts that are spread over
ranks depends on the layout, and its scalars do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """A weight of this rank. `is_copy`: another pipeline stage has the same tensor (tied embeddings).
    `is_fixed`: it is not trained (a router's bias, a frozen tower)."""

    row: WeightRow
    parameter: Tensor
    is_copy: bool
    is_fixed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """The flat range [begin, end) of a local parameter that this rank's optimizer updates."""

    local: LocalParameter
    begin: int
    end: int
    main: Tensor
    state: dict[str, Tensor]


def save_plan(policy: Policy, host: HostCopy) -> SavePlan:
    """Describes where this rank's part of a checkpoint is in its host copy. No communication."""
    everything = _owned(policy, host.view)
    shards = [s for owned in everything if _writes(policy, owned) for s in _saved(policy, owned)]
    shards += [s for local in local_parameters(policy) if local.is_fixed for s in _saved_fixed(policy, local)]
    pieces = [planned_piece(part, *host.place(part.tensor)) for shard in shards for part in box_parts(shard)]
    files = in_files(pieces, lambda piece: piece.size_bytes, FILE_BYTES)
    return SavePlan(rank=dist.get_rank(), files=tuple(map(tuple, files)))


def snapshot_common(policy: Policy, kl_coef: float, critic: Policy | None) -> bytes:
    """Returns the JSON of the scalars that all ranks share, on rank 0; `{}` on others.

    Args:
        kl_coef: present coefficient of the KL penalty.
    """
    if dist.get_rank() != 0:
        return b"{}"
    more = {} if critic is None else {"critic": _common_of(critic)}
    return json.dumps(_common_of(policy) | {"kl_coef": kl_coef} | more).encode()


@torch.no_grad()
def restore_state(
    policy: Policy, host: HostCopy, store: Ranges, manifest: Manifest, tick: Callable[[], None]
) -> None:
    """Restores model, optimizer and schedule from a checkpoint of any layout. No communication.

    Can be called again after a failure, because it overwrites everything.

    Args:
        host: what is away is restored there.
        tick: called after each piece of a tensor.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model, or inconsistent.
        ConfigError: it has the state of another kind of optimizer, or none.
    """
    saved, names = _scalars_of(policy, manifest), moments_of(policy.optimizer)
    if saved.step is None:
        raise ConfigError(
            f"checkpoint {manifest.iteration} has weights only, no state of an optimizer; write "
            "run.from_checkpoint.take: weights."
        )
    _check_kind(f"{policy.prefix}optimizer.kind", manifest, saved.moments, names)
    owned = list(_owned(policy, host.view))
    _check_state_of_tower(manifest, owned, names)
    restore_weights(policy, host, store, manifest, tick)
    wanted = [shard for one in owned for name in names for shard in _blank(policy, one.local, one, name)]
    read_shards(store, manifest.files, wanted, tick)
    for one in owned:
        if "step" in one.state:
            one.state["step"].fill_(saved.step)
    _set_groups(policy, saved.param_groups)
    _set_schedule(policy, saved.scheduler)


def _scalars_of(policy: Policy, manifest: Manifest) -> OptimizerScalars:
    saved = saved_scalars(manifest)
    if not policy.prefix:
        return saved
    if saved.critic is None:
        raise ConfigError(
            f"algorithm.adv_estimator: gae has a critic, and checkpoint {manifest.iteration} has no state of "
            "one; write run.from_checkpoint.take: weights, with which the critic begins as critic.path says."
        )
    return saved.critic


def _check_kind(key: str, manifest: Manifest, saved: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    if saved != wanted:
        raise ConfigError(
            f"{key}: checkpoint {manifest.iteration} has the state of another optimizer "
            f"({', '.join(saved) or 'none'}, not {', '.join(wanted) or 'none'}); write the kind and "
            "sgd_momentum of the run that saved it, or run.from_checkpoint.take: weights."
        )


def _check_state_of_tower(manifest: Manifest, owned: Sequence[_Owned], moments: Sequence[str]) -> None:
    saved = {piece.key for file in manifest.files for piece in file.tensors}
    lacking = (
        one.local.row.name
        for one in owned
        for kind in moments
        if one.local.row.is_tower and f"{kind}.{one.local.row.name}" not in saved
    )
    if (name := next(lacking, None)) is not None:
        raise ConfigError(
            f"vision.train: checkpoint {manifest.iteration} has no state of the optimizer for {name}, which "
            "was not trained there; write run.from_checkpoint.take: weights."
        )


def saved_kl_coefficient(manifest: Manifest, default: float) -> float:
    """The coefficient of the KL penalty after that iteration; `default` if an older checkpoint has none."""
    saved = saved_scalars(manifest).kl_coef
    return default if saved is None else saved


@torch.no_grad()
def restore_weights(
    policy: Policy, host: HostCopy, store: Ranges, manifest: Manifest, tick: Callable[[], None]
) -> None:
    """Restores only the model and the optimizer's main copies; moments and schedule are not changed.

    Raises:
        CheckpointError: as in `restore_state`.
    """
    owned = list(_owned(policy, host.view))
    key = MODEL if _has_main_copies(policy) else MAIN
    saved = {piece.key: piece.dtype for file in manifest.files for piece in file.tensors}
    borrowed = [
        _Borrowed(local, torch.empty(local.parameter.numel(), dtype=DTYPES[dtype]), kind)
        for local in local_parameters(policy)
        for kind, dtype in _other_kind(policy, local, saved)
    ]
    given = {one.local.row.name for one in borrowed}
    wanted = [
        shard
        for local in local_parameters(policy)
        if local.row.name not in given
        for shard in _blank(policy, local, None, _fixed_kind(policy, local) if local.is_fixed else key)
    ]
    if _has_main_copies(policy):
        wanted += [
            shard
            for one in owned
            if one.local.row.name not in given
            for shard in _blank(policy, one.local, one, MAIN)
        ]
    wanted += [shard for one in borrowed for shard in _shards(policy, one.local, one.kind, one.flat, 0)]
    read_shards(store, manifest.files, wanted, tick)
    _lend(borrowed, owned)
    for one in owned:
        mine = one.local.parameter.view(-1)[one.begin : one.end]
        if not torch.equal(mine, one.main.to(mine.device, mine.dtype)):
            raise CheckpointError(
                f"checkpoint {manifest.iteration}: elements {one.begin} to {one.end} of "
                f"{one.local.row.name} are not the rounded main copies that were saved with them"
            )


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A tower's parameter that was saved in another kind and dtype: where it was frozen, or is now."""

    local: LocalParameter
    flat: Tensor
    kind: str


def _other_kind(policy: Policy, local: LocalParameter, saved: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the kind and dtype of a tower's parameter, if it was not saved as it is wanted."""
    if not local.row.is_tower:
        return
    has_main = _has_main_copies(policy)
    wanted = (_fixed_kind(policy, local),) if local.is_fixed else (MODEL, MAIN) if has_main else (MAIN,)
    if all(f"{kind}.{local.row.name}" in saved for kind in wanted):
        return
    found = next((kind for kind in (MAIN, MODEL) if f"{kind}.{local.row.name}" in saved), None)
    if found is not None:  # else whoever reads says what is missing
        yield found, saved[f"{found}.{local.row.name}"]


def _lend(borrowed: Sequence[_Borrowed], owned: Sequence[_Owned]) -> None:
    """Fills parameters and their main copies with what was read."""
    flats = {one.local.row.name: one.flat for one in borrowed}
    for one in borrowed:
        one.local.parameter.copy_(one.flat.view(one.local.parameter.shape))
    for each in owned:
        if (flat := flats.get(each.local.row.name)) is not None:
            mine = flat[each.begin : each.end].to(each.local.parameter.dtype)
            each.main.copy_(mine)


def _has_main_copies(policy: Policy) -> bool:
    """Whether main copies differ from the parameters. In float32 they are views of them and saved once."""
    return policy.mcore.params_dtype is not torch.float32


def local_parameters(policy: Policy) -> Iterator[LocalParameter]:
    """Yields this rank's parameters with their rows of the weight table."""
    table = {row.name: row for row in policy.rows}
    for name, parameter in named_weights(policy.models, policy.groups):
        yield LocalParameter(
            row=parameter_row(table, name),
            parameter=parameter,
            is_copy=name not in table,
            is_fixed=not (isinstance(parameter, nn.Parameter) and parameter.requires_grad),
        )


def _owned(policy: Policy, view: Callable[[Tensor], Tensor]) -> Iterator[_Owned]:
    """Yields what this rank's optimizer updates.

    Args:
        view: from a tensor to its content, which may be on the host.
    """
    for local in local_parameters(policy):
        for part in inner_optimizers(policy.optimizer):
            place = part.model_param_group_index_map.get(local.parameter)
            if place is None:
                continue
            main = part.optimizer.param_groups[place[0]]["params"][place[1]]
            flat = part._get_model_param_range_map(local.parameter)["param"]
            state = {name: view(tensor) for name, tensor in part.optimizer.state[main].items()}
            yield _Owned(local=local, begin=flat.start, end=flat.end, main=view(main.detach()), state=state)


def _writes(policy: Policy, owned: _Owned) -> bool:
    """Whether this rank writes the range. Of the ranks that have a whole parameter, one writes it."""
    local = owned.local
    is_first = cut_of(local.row, local.parameter) is not None or policy.groups.sharing(local.row).rank() == 0
    return is_first and not local.is_copy


def _saved(policy: Policy, owned: _Owned) -> Iterator[Shard]:
    tensors = {
        MAIN: owned.main,
        **{name: owned.state[name] for name in moments_of(policy.optimizer)},
    }
    if _has_main_copies(policy):
        tensors[MODEL] = owned.local.parameter.detach().view(-1)[owned.begin : owned.end]
    for kind, tensor in tensors.items():
        yield from _shards(policy, owned.local, kind, tensor, owned.begin)


def _fixed_kind(policy: Policy, local: LocalParameter) -> str:
    """The kind of what is not trained: a frozen tower has the model's dtype, a router's bias float32."""
    return MODEL if _has_main_copies(policy) and not local.row.is_fixed else MAIN


def _saved_fixed(policy: Policy, local: LocalParameter) -> Iterator[Shard]:
    """What is not trained, from one of the ranks that have it."""
    is_first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0 and policy.groups.tp.rank() == 0
    if is_first:
        kind = _fixed_kind(policy, local)
        yield from _shards(policy, local, kind, local.parameter.detach().view(-1), 0)


def _blank(policy: Policy, local: LocalParameter, owned: _Owned | None, kind: str) -> Iterator[Shard]:
    """Yields the live tensors to restore, set to 0, because checkpoints contain no vocabulary padding."""
    if owned is None:
        tensor = local.parameter.detach().view(-1)
    else:
        tensor = owned.main if kind == MAIN else owned.state[kind]
    tensor.zero_()
    yield from _shards(policy, local, kind, tensor, owned.begin if owned else 0)


def _shards(policy: Policy, local: LocalParameter, kind: str, flat: Tensor, begin: int) -> Iterator[Shard]:
    """Yields views of `flat` (elements of the local parameter from `begin` on) as boxes of the global one."""
    group = policy.groups.sharing(local.row)
    blocks = blocks_of(local.row, cut_of(local.row, local.parameter), rank=group.rank(), size=group.size())
    for box in boxes_of(blocks, begin, begin + flat.numel()):
        first = box.start - begin
        yield Shard(
            key=f"{policy.prefix}{kind}.{local.row.name}",
            global_shape=local.row.full_shape,
            offset=box.offset,
            tensor=flat[first:][: _numel(box.shape)].view(box.shape),
        )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _common_of(policy: Policy) -> dict[str, Any]:
    """Scalars with the same value on every rank."""
    groups = [{key: v for key, v in g.items() if key != "params"} for g in policy.optimizer.param_groups]
    inner = [each.optimizer for each in inner_optimizers(policy.optimizer)]
    steps = {float(state["step"]) for each in inner for state in each.state.values() if "step" in state}
    assert len(steps) <= 1, f"parameters were updated {sorted(steps)} times"
    return {
        "step": max(steps, default=0.0),  # a fused Adam keeps it in its parameter groups
        "moments": moments_of(policy.optimizer),
        "param_groups": groups,
        "scheduler": policy.scheduler.state_dict(),
    }


FUSED_STEP = "step"
"""A fused Adam has it in its parameter groups, from its first step on."""

CONFIGURED = frozenset({"max_lr", "min_lr", "betas", "eps", "momentum", "wd_mult", "lr_mult"})
"""Scalars of a parameter group that come from the optimizer's settings."""

OF_LAYOUT = frozenset({"is_expert_parallel"})
"""What a parameter group is in this run's layout: the scalars may be those of another saved group with its
identity."""


def _set_groups(policy: Policy, saved: Sequence[Mapping[str, Any]]) -> None:
    """Copies saved scalars into the parameter groups, whose order may differ between ranks. Configured values
    are kept, because a run may continue from another run's state with other settings."""
    by_identity = {_identity(group): group for group in saved}
    for group in policy.optimizer.param_groups:
        found = by_identity.get(_identity(group))
        if found is None:
            raise CheckpointError(f"the checkpoint has no parameter group {_identity(group)}")
        for key in found.keys() & {*group, FUSED_STEP} - {*CONFIGURED, *OF_LAYOUT, "params"}:
            if _kind(found[key]) is not _kind(group.get(key, 0)):
                raise CheckpointError(f"the checkpoint's parameter group has {key}: {found[key]!r}")
            group[key] = found[key]


def _kind(value: Any) -> type:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)


def _set_schedule(policy: Policy, saved: Mapping[str, Any]) -> None:
    """Restores the number of steps; everything else is configured (`yatt.trainer.mcore.model`)."""
    policy.scheduler.num_steps = 0  # loading adds the saved number
    num_steps = saved.get("num_steps")
    try:
        if type(num_steps) is not int or num_steps < 0:
            raise ValueError(f"num_steps is {num_steps!r}")
        policy.scheduler.load_state_dict(dict(saved))
    except (LookupError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise CheckpointError(f"the checkpoint's schedule cannot be restored ({words_of(error)})") from error


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in GROUP_KEYS)
