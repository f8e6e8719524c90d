"""Rules between sections: sizes that must divide, roles that must fit, names that must exist.

Pure: uses only the config's values. `yatt.launch.checks.preflight` checks everything on the filesystem.
"""

import os
import re
from collections.abc import Iterator

from yatt.config.engine_keys import engine_faults
from yatt.config.learning import learning_faults
from yatt.config.schema import RunConfig
from yatt.config.sections.algorithm import GROUP_BASELINES
from yatt.config.sizes import (
    block_nodes as block_nodes,
    engine_gpus as engine_gpus,
    engine_nodes as engine_nodes,
    engine_roles as engine_roles,
    engine_sizes as engine_sizes,
    engine_spans as engine_spans,
    engines_per_slab as engines_per_slab,
    first_split as first_split,
    max_num_seqs as max_num_seqs,
    may_take_turns as may_take_turns,
    node_gpus as node_gpus,
    num_slabs as num_slabs,
    num_trainer_nodes as num_trainer_nodes,
    slab_gpus as slab_gpus,
    slab_limits as slab_limits,
)
from yatt.config.widths import width_faults
from yatt.errors import Finding, mistake_in
from yatt.paths import LOCAL_NAME_BYTES, LOCAL_SOCKET
from yatt.records.episode import ENVIRONMENT

SOCKET_PATH = 107
"""Maximum bytes of a socket's path on Linux."""

GENRM_SETS = "placement.genrm_gpu_sets"
VALIDATED = ("val-core/", "val-aux/", "val/")
"""Begins of the keys of a validation's metrics."""


def broken_relations(config: RunConfig) -> list[Finding]:
    """Returns every broken rule between sections, with the key that is best changed."""
    if faults := [*_nodes(config)]:
        return faults  # sizes cannot be checked before the nodes are divided
    of_sampling = (_placement, _split, _rewards, _rehearsal, engine_faults) if not config.is_given else ()
    if not config.trains:
        return [*_sockets(config), *(fault for faults in of_sampling for fault in faults(config))]
    return [
        *_sockets(config),
        *_layout(config),
        *(fault for faults in of_sampling for fault in faults(config)),
        *_batches(config),
        *learning_faults(config),
        *_modes(config),
        *_profile(config),
    ]


def _nodes(config: RunConfig) -> Iterator[Finding]:
    place, nodes = config.placement, config.launch.nodes
    if place.mode == "disaggregated":
        if not 1 <= place.trainer_nodes < nodes:
            cure = (
                f"write 1 to {nodes - 1}, or more launch.nodes"
                if nodes > 1
                else "write 2 or more launch.nodes"
            )
            yield mistake_in(
                "placement.trainer_nodes",
                f"{place.trainer_nodes} of {nodes} nodes (launch.nodes): disaggregated needs at least one "
                f"trainer node and one engine node; {cure}.",
            )
        return
    if place.trainer_nodes:
        yield mistake_in(
            "placement.trainer_nodes",
            f"in {place.mode} every node trains; remove it, or write mode: disaggregated.",
        )
    if config.launch.engine_gpus_per_node:
        yield mistake_in(
            "launch.engine_gpus_per_node",
            f"in {place.mode} every node trains; remove it, or write placement.mode: disaggregated.",
        )


def _sockets(config: RunConfig) -> Iterator[Finding]:
    launch = config.launch
    size, room = (
        len(os.fsencode(launch.scratch_dir)),
        SOCKET_PATH - LOCAL_NAME_BYTES - len(f"//{LOCAL_SOCKET}"),
    )
    if size > room:
        yield mistake_in(
            "launch.scratch_dir",
            f"{launch.scratch_dir} has {size} bytes; a socket's path may have {SOCKET_PATH}, which leaves "
            f"{room} for the folder. Write a shorter one, for example /tmp.",
        )


def upload_limit(config: RunConfig) -> float:
    """Returns the bytes per second that one trainer node may upload; 0: no limit."""
    own, whole = config.checkpoint.max_bytes_per_s, config.checkpoint.max_run_bytes_per_s
    limits = [float(limit) for limit in (own, whole / num_trainer_nodes(config)) if limit]
    return min(limits, default=0.0)


def _layout(config: RunConfig) -> Iterator[Finding]:
    t, world = config.trainer, num_trainer_nodes(config) * config.launch.gpus_per_node
    model_parallel = t.tensor_model_parallel_size * t.pipeline_model_parallel_size * t.context_parallel_size
    if world % model_parallel:
        yield mistake_in(
            "trainer.tensor_model_parallel_size",
            f"tensor x pipeline x context parallel = {model_parallel} does not divide the {world} GPUs "
            f"(trainer nodes x launch.gpus_per_node); change these sizes.",
        )
    if t.virtual_pipeline_model_parallel_size > 1 and t.pipeline_model_parallel_size == 1:
        yield mistake_in(
            "trainer.virtual_pipeline_model_parallel_size",
            "interleaving needs pipeline_model_parallel_size above 1; write 1.",
        )
    expert_parallel = t.expert_tp_size * t.expert_model_parallel_size * t.pipeline_model_parallel_size
    if t.expert_model_parallel_size > 1 and world % expert_parallel:
        yield mistake_in(
            "trainer.expert_model_parallel_size",
            f"expert tensor x expert x pipeline parallel = {expert_parallel} does not divide the {world} "
            "GPUs (trainer nodes x launch.gpus_per_node); change these sizes, or write "
            "expert_tensor_parallel_size: 1.",
        )
    yield from width_faults(config)


def _placement(config: RunConfig) -> Iterator[Finding]:
    place = config.placement
    if place.mode == "colocated" and place.genrm_gpu_sets:
        yield mistake_in(GENRM_SETS, "colocated does not split GPUs; remove it, or write mode: partial.")
    if place.mode == "colocated":
        return
    genrms = config.engine_genrms
    if not genrms:
        if place.mode == "partial":
            yield mistake_in(
                "placement.mode",
                "partial splits GPUs between rollout and GenRM, but no GenRM has an engine; write colocated.",
            )
        elif place.genrm_gpu_sets:
            yield mistake_in(GENRM_SETS, f"{place.genrm_gpu_sets}, but no GenRM has an engine; remove it.")
        return
    block = block_nodes(config)
    least, most = len(genrms) * block, num_slabs(config) - block
    if not least <= place.genrm_gpu_sets <= most:
        allowed = f"{least} to {most}" if most > least else f"{least}"
        fix = f"write {allowed}, or use" if most >= least else "use"
        each, one = (f"{block} GPU sets", block) if block > 1 else ("one GPU set", "one")
        yield mistake_in(
            GENRM_SETS,
            f"{place.genrm_gpu_sets} of {num_slabs(config)} GPU sets for {len(genrms)} GenRM(s): each GenRM "
            f"needs at least {each} and rollout at least {one}; {fix} more nodes or GPUs.",
        )


def _split(config: RunConfig) -> Iterator[Finding]:
    place, roles = config.placement, engine_roles(config)
    if place.split == "fixed":
        for key in ("min_gpu_sets", "max_gpu_sets"):
            if getattr(place, key):
                yield mistake_in(
                    f"placement.{key}",
                    "has no effect on a fixed split; remove it, or write split: dynamic.",
                )
        return
    if place.mode == "colocated" or len(roles) == 1:
        yield mistake_in(
            "placement.split",
            "dynamic moves GPU sets between rollout and GenRMs, which need a GenRM with an engine and "
            "placement.mode partial or disaggregated; write split: fixed.",
        )
    if config.run.deterministic:
        yield mistake_in("placement.split", "dynamic depends on timing (run.deterministic); write fixed.")
    yield from _slab_limits(config, roles)
    if place.mode != "colocated":
        yield from _first_split(config)


def _slab_limits(config: RunConfig, roles: tuple[str, ...]) -> Iterator[Finding]:
    place = config.placement
    for key, limits in (("min_gpu_sets", place.min_gpu_sets), ("max_gpu_sets", place.max_gpu_sets)):
        for role in limits:
            if role not in roles:
                says = f"'{role}' is no role with engines; write one of {', '.join(roles)}."
                yield mistake_in(f"placement.{key}", says)
    for role in roles:
        least, most = slab_limits(config, role)
        if most < least:
            yield mistake_in(
                "placement.max_gpu_sets", f"{role}: {most} is below min_gpu_sets {least}; change one."
            )
    needed, total = sum(slab_limits(config, role)[0] for role in roles), num_slabs(config)
    if needed > total:
        yield mistake_in(
            "placement.min_gpu_sets", f"{needed} in all, but there are {total}; write smaller numbers."
        )
    if sum(min(slab_limits(config, role)[1], total) for role in roles) < total:
        yield mistake_in(
            "placement.max_gpu_sets", f"leaves some of {total} GPU sets to nobody; write larger numbers."
        )


def _first_split(config: RunConfig) -> Iterator[Finding]:
    place, total = config.placement, num_slabs(config)
    split = first_split(config)
    for role, num in split.items() if min(split.values()) > 0 else ():  # else the number itself is refused
        least, most = slab_limits(config, role)
        if not least <= num <= most:
            yield mistake_in(
                GENRM_SETS,
                f"{place.genrm_gpu_sets} begins with {num} of {total} GPU sets for {role}, but "
                f"min_gpu_sets and max_gpu_sets allow {least} to {most}; change one of them.",
            )


def _rewards(config: RunConfig) -> Iterator[Finding]:
    names = [r.name for r in config.rewards] + [g.name for g in config.genrms]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield mistake_in("rewards", f"the name '{name}' is used twice among rewards and genrms; rename one.")
    if ENVIRONMENT in names:
        yield mistake_in("rewards", f"the name '{ENVIRONMENT}' is that of the environment; use another one.")
    weights = [r.weight for r in config.rewards] + [g.weight for g in config.genrms]
    if not any(weights):
        yield mistake_in("rewards", "no reward has a weight other than 0; add one under rewards or genrms.")
    yield from _judging(config)
    by, names = config.algorithm.filter_by, [r.name for r in config.rewards] + [g.name for g in config.genrms]
    if by and by not in names:
        yield mistake_in(
            "algorithm.filter_by", f"'{by}' is no reward or GenRM; write one of: {', '.join(names)}."
        )
    if by and not config.algorithm.filter_groups:
        yield mistake_in(
            "algorithm.filter_by", "has no effect without filter_groups; write filter_groups: true."
        )
    wanted = config.validation.reward
    if wanted and wanted not in [r.name for r in config.rewards]:
        known = ", ".join(r.name for r in config.rewards) or "none"
        yield mistake_in(
            "validation.reward", f"'{wanted}' is not the name of a reward; write one of: {known}."
        )
    if wanted and not config.data.val_files:
        yield mistake_in(
            "data.val_files", "validation.reward is set, but val_files is empty; write at least one file."
        )


def _judging(config: RunConfig) -> Iterator[Finding]:
    for index, genrm in enumerate(config.genrms):
        if genrm.judging.by in ("pairwise", "listwise") and config.rollout.n < 2:
            yield mistake_in(
                f"genrms[{index}].judging.by",
                f"{genrm.judging.by} compares completions; write rollout.n: 2 or more.",
            )
        for number, criterion in enumerate(genrm.judging.criteria):
            if criterion.rule and criterion.rule not in {reward.name for reward in config.rewards}:
                yield mistake_in(
                    f"genrms[{index}].judging.criteria[{number}].rule",
                    f"no entry of rewards is named '{criterion.rule}'; add it (weight: 0 counts nothing).",
                )
        if genrm.judging.needs_truth and not config.data.ground_truth_key:
            yield mistake_in(
                f"genrms[{index}].judging.pairs",
                "ground_truth needs data.ground_truth_key; name the column.",
            )
        if genrm.sees == "all" and not config.environment.images:
            yield mistake_in(
                f"genrms[{index}].sees",
                "all is for pictures of an environment; write environment.images: true, or sees: prompt.",
            )
        if genrm.api.url and config.run.deterministic:
            yield mistake_in(
                f"genrms[{index}].api",
                "a service may answer a rerun differently; write run.deterministic: false.",
            )


def _batches(config: RunConfig) -> Iterator[Finding]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.trainer.max_tokens_per_micro_batch < longest:
        yield mistake_in(
            "trainer.max_tokens_per_micro_batch",
            f"{config.trainer.max_tokens_per_micro_batch} cannot hold the longest sample of {longest} tokens "
            f"(data.max_prompt_tokens + rollout.max_response_tokens); write {longest} or more.",
        )
    yield from _ahead(config)
    yield from _oversampling(config)
    estimator = config.algorithm.adv_estimator if not (config.algorithm.path or config.is_given) else ""
    if config.rollout.n < 2 and estimator in GROUP_BASELINES:
        yield mistake_in(
            "rollout.n",
            f"{estimator} compares completions of one prompt; write 2 or more.",
        )


def _ahead(config: RunConfig) -> Iterator[Finding]:
    ahead, age = config.rollout.ahead, config.rollout.max_policy_age
    if not ahead:
        return
    if config.placement.mode != "disaggregated":
        yield mistake_in(
            "rollout.ahead",
            f"with placement.mode: {config.placement.mode} engines and trainers take turns on the same GPUs, "
            "so nothing can be sampled while the trainer works; write 0, or placement.mode: disaggregated.",
        )
    if config.run.deterministic:
        yield mistake_in(
            "rollout.ahead",
            "which policy version samples a completion would depend on timing after a restart "
            "(run.deterministic); write 0.",
        )
    if ahead > age:
        yield mistake_in(
            "rollout.ahead",
            f"{ahead} batches ahead are sampled by a policy that is {ahead} versions older, but "
            f"rollout.max_policy_age is {age}; write {age} or less, or a higher max_policy_age.",
        )


def _oversampling(config: RunConfig) -> Iterator[Finding]:
    most = max(1, 1 + config.rollout.max_policy_age - config.rollout.ahead)
    if config.rollout.oversample > 1 and config.run.deterministic:
        yield mistake_in(
            "rollout.oversample",
            "which completions an iteration cuts depends on timing, so results would differ "
            "(run.deterministic); write 1.",
        )
    elif config.rollout.oversample > most:
        yield mistake_in(
            "rollout.oversample",
            f"rollout.max_policy_age: {config.rollout.max_policy_age}{_less(config.rollout.ahead)} allows "
            f"{most} at most: tokens of more groups would become too old before they are trained on, and be "
            f"discarded; write {most} or less, or a higher max_policy_age.",
        )


def _less(ahead: int) -> str:
    return f" with rollout.ahead: {ahead}" if ahead else ""


def _modes(config: RunConfig) -> Iterator[Finding]:
    origin = config.run.from_checkpoint.url
    if origin and origin.rstrip("/") == config.checkpoint.url.rstrip("/"):
        yield mistake_in(
            "run.from_checkpoint.url",
            "equals checkpoint.url; a new run needs its own store: change one of them.",
        )
    metric = config.checkpoint.best_metric
    lacking, cure = "validation.reward", "write the name of a reward"
    if config.is_given:
        lacking, cure = "data.val_files", "write at least one file"
    if metric.startswith(VALIDATED) and not config.validates:
        yield mistake_in(
            "checkpoint.best_metric",
            f"{metric} is a metric of validation, but {lacking} is empty; {cure}, or another metric.",
        )
    if config.validation.every and not config.validates:
        yield mistake_in(lacking, f"is empty, but validation.every is set; {cure}.")
    if (url := config.logging.webhook_url) and not re.fullmatch(r"https?://[^/\s]+\S*", url):
        yield mistake_in(
            "logging.webhook_url", "is not a URL; write one that begins with https:// or http://."
        )
    if config.launch.device == "cpu" and config.model.spec == "te":
        yield mistake_in("model.spec", "Transformer Engine needs CUDA; write torch or auto.")


def _profile(config: RunConfig) -> Iterator[Finding]:
    profile, world = config.profile, num_trainer_nodes(config) * config.launch.gpus_per_node
    if max(profile.ranks) >= world:
        yield mistake_in(
            "profile.ranks", f"has {max(profile.ranks)}, the run has ranks 0 to {world - 1}; write these."
        )
    total = config.trainer.total_iterations
    if profile.iterations and max(profile.iterations) > total:
        yield mistake_in(
            "profile.iterations",
            f"has {max(profile.iterations)}, trainer.total_iterations is {total}; write at most that.",
        )
    need_cuda = [kind for kind in profile.kinds if kind != "torch"]
    if need_cuda and config.launch.device == "cpu":
        yield mistake_in(
            "profile.kinds", f"{need_cuda[0]} needs CUDA, but launch.device is cpu; write torch."
        )


def _rehearsal(config: RunConfig) -> Iterator[Finding]:
    if config.model.trainer == "scripted" and config.rollout.engine != "scripted":
        yield mistake_in(
            "model.trainer",
            f"a scripted trainer publishes no weights for rollout.engine: {config.rollout.engine}; write "
            "rollout.engine: scripted too, or model.trainer: megatron.",
        )
