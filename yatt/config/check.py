"""Rules between sections: sizes that must divide, roles that must fit, names that must exist.

Pure: looks at values only. What needs the filesystem is checked by `yatt.launch.preflight`.
"""

from collections.abc import Iterator

from yatt.config.schema import RunConfig

Fault = tuple[str, str]  # key, what is wrong and what to write


def relations(config: RunConfig) -> list[Fault]:
    """Every broken rule between sections, with the key it is best mended at."""
    return [*_layout(config), *_placement(config), *_rewards(config), *_batches(config), *_modes(config)]


def _layout(config: RunConfig) -> Iterator[Fault]:
    t, world = config.trainer, config.launch.nodes * config.launch.gpus_per_node
    model_parallel = t.tensor_model_parallel_size * t.pipeline_model_parallel_size * t.context_parallel_size
    if world % model_parallel:
        yield (
            "trainer.tensor_model_parallel_size",
            f"tensor x pipeline x context parallel = {model_parallel} does not divide the {world} GPUs "
            f"(launch.nodes x launch.gpus_per_node).",
        )
    if t.virtual_pipeline_model_parallel_size > 1 and t.pipeline_model_parallel_size == 1:
        yield (
            "trainer.virtual_pipeline_model_parallel_size",
            "interleaving needs pipeline_model_parallel_size above 1; write 1.",
        )
    for key, size in _engine_sizes(config):
        if config.launch.gpus_per_node % size:
            yield key, f"{size} does not divide launch.gpus_per_node {config.launch.gpus_per_node}."


def _engine_sizes(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "rollout.tp_size", config.rollout.tp_size
    for index, genrm in enumerate(config.genrms):
        yield f"genrms[{index}].tp_size", genrm.tp_size


def slab_gpus(config: RunConfig) -> int:
    """GPUs of a slab: the smallest set that one engine of either kind can use."""
    return max(size for _, size in _engine_sizes(config))


def num_slabs(config: RunConfig) -> int:
    """Slabs of all nodes together."""
    return config.launch.nodes * (config.launch.gpus_per_node // slab_gpus(config))


def _placement(config: RunConfig) -> Iterator[Fault]:
    place = config.placement
    if place.mode == "colocated" and place.genrm_slabs:
        yield "placement.genrm_slabs", "colocated has no split; leave it out, or write mode: partial."
    if place.mode != "partial":
        return
    if not config.genrms:
        yield "placement.mode", "partial divides GPUs between rollout and GenRM, but genrms is empty."
    elif not len(config.genrms) <= place.genrm_slabs < num_slabs(config):
        yield (
            "placement.genrm_slabs",
            f"{place.genrm_slabs} of {num_slabs(config)} slabs for {len(config.genrms)} GenRM(s): each GenRM "
            f"needs at least one slab and rollout at least one; write {len(config.genrms)} to "
            f"{num_slabs(config) - 1} (more nodes or GPUs if that is empty).",
        )


def _rewards(config: RunConfig) -> Iterator[Fault]:
    names = [r.name for r in config.rewards] + [g.name for g in config.genrms]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield "rewards", f"the name '{name}' is used twice among rewards and genrms; rename one."
    weights = [r.weight for r in config.rewards] + [g.weight for g in config.genrms]
    if not any(weights):
        yield "rewards", "no reward with a weight other than 0; add one under rewards or genrms."
    wanted = config.validation.reward
    if wanted and wanted not in [r.name for r in config.rewards]:
        known = ", ".join(r.name for r in config.rewards) or "none"
        yield "validation.reward", f"'{wanted}' is not among rewards (known: {known})."
    if wanted and not config.data.val_files:
        yield "data.val_files", "validation.reward is set, but there are no val_files."


def _batches(config: RunConfig) -> Iterator[Fault]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.trainer.max_tokens_per_micro_batch < longest:
        yield (
            "trainer.max_tokens_per_micro_batch",
            f"{config.trainer.max_tokens_per_micro_batch} cannot hold one longest sample of {longest} tokens "
            f"(data.max_prompt_tokens + rollout.max_response_tokens); write {longest} or more.",
        )
    if config.rollout.n < 2 and config.algorithm.adv_estimator in ("grpo", "dr_grpo", "rloo"):
        yield (
            "rollout.n",
            f"{config.algorithm.adv_estimator} compares completions of one prompt; write 2 or more.",
        )


def _modes(config: RunConfig) -> Iterator[Fault]:
    if config.algorithm.kl_in != "none" and config.algorithm.kl_coef == 0:
        yield "algorithm.kl_coef", "kl_in is on but kl_coef is 0; write a coefficient or kl_in: none."
    if config.validation.every and not config.validation.reward:
        yield "validation.reward", "validation.every is set; name the reward that validates."
    if config.launch.device == "cpu" and config.model.spec == "te":
        yield "model.spec", "Transformer Engine needs CUDA; write torch or auto."
