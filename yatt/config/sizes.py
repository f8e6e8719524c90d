"""Sizes that follow from a run's config: nodes, GPUs, slabs, engines on a slab."""

from collections.abc import Iterator

from yatt.config.schema import GenRMSection, RolloutSection, RunConfig


def only_judges(config: RunConfig) -> bool:
    """Returns whether it is an evaluation of GenRMs: completions are given, and no policy samples."""
    return config.data.form == "groups"


def num_trainer_nodes(config: RunConfig) -> int:
    """Returns the number of trainer nodes; they are the first nodes. In an evaluation they are those with
    prompts."""
    return config.placement.trainer_nodes if config.placement.mode == "disaggregated" else config.launch.nodes


def node_gpus(config: RunConfig) -> tuple[int, ...]:
    """Returns the number of GPUs of each node: none where a node is for prompts and scores only."""
    launch, trainers = config.launch, num_trainer_nodes(config)
    own = launch.gpus_per_node if config.trains or config.placement.mode != "disaggregated" else 0
    return (own,) * trainers + (engine_node_gpus(config),) * (launch.nodes - trainers)


def engine_node_gpus(config: RunConfig) -> int:
    """Returns the number of GPUs of each node that runs engines."""
    return config.launch.engine_gpus_per_node or config.launch.gpus_per_node


def engine_gpus_key(config: RunConfig) -> str:
    """Returns the key that says how many GPUs these nodes have."""
    return "launch.engine_gpus_per_node" if config.launch.engine_gpus_per_node else "launch.gpus_per_node"


def engine_nodes(config: RunConfig) -> range:
    """Returns the nodes that run engines in any phase."""
    first = config.placement.trainer_nodes if config.placement.mode == "disaggregated" else 0
    return range(first, config.launch.nodes)


def engine_sizes(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yields the key of each engine's number of GPUs, and the number."""
    yield "rollout.tp_size", config.rollout.tp_size
    for index, genrm in enumerate(config.genrms):
        if genrm.has_engine:
            yield f"genrms[{index}].tp_size", genrm.tp_size


def rollout_context(config: RunConfig) -> int:
    """Returns the tokens of the longest sequence that the policy's engines take: a sample, or a question to
    the policy as its own judge, with the answer."""
    questions = [genrm.max_model_tokens for genrm in config.genrms if genrm.is_policy]
    return max(config.data.max_prompt_tokens + config.rollout.max_response_tokens, *questions, 0)


def slab_gpus(config: RunConfig) -> int:
    """Returns the GPUs per slab: as many as the widest engine has on one node; narrower engines are on it
    side by side. If an engine spans nodes, a slab is a whole node."""
    return min(max(size for _, size in engine_sizes(config)), engine_node_gpus(config))


def engine_spans(config: RunConfig) -> dict[str, int]:
    """Returns the number of nodes of one engine, by role."""
    gpus = engine_node_gpus(config)
    return {role: max(size // gpus, 1) for role, size in engine_gpus(config).items()}


def block_nodes(config: RunConfig) -> int:
    """Returns the number of consecutive engine nodes that have the same role together, because an engine
    spans them; 1 if none spans nodes."""
    return max(engine_spans(config).values())


def engines_per_slab(config: RunConfig, role: str) -> int:
    """Returns the number of engines that a role has on one slab; also 1 if an engine spans several."""
    return max(slab_gpus(config) // engine_gpus(config)[role], 1)


def engine_gpus(config: RunConfig) -> dict[str, int]:
    """Returns the number of GPUs of one engine, by role."""
    return {role: section.tp_size for role, section in _sections(config).items()}


def max_num_seqs(config: RunConfig, role: str) -> int:
    """Returns the maximum number of sequences that one engine of a role runs at the same time."""
    return _sections(config)[role].max_num_seqs


def _sections(config: RunConfig) -> dict[str, RolloutSection | GenRMSection]:
    sections: tuple[RolloutSection | GenRMSection, ...] = (config.rollout, *config.engine_genrms)
    return dict(zip(engine_roles(config), sections, strict=True))


def num_slabs(config: RunConfig) -> int:
    """Returns the number of slabs that engines may hold, on all nodes together."""
    return len(engine_nodes(config)) * (engine_node_gpus(config) // slab_gpus(config))


def engine_roles(config: RunConfig) -> tuple[str, ...]:
    """Returns the roles with engines: rollout, then each GenRM's."""
    return ("rollout", *(f"genrm:{genrm.name}" for genrm in config.engine_genrms))


def slab_limits(config: RunConfig, role: str) -> tuple[int, int]:
    """Returns the fewest and the most slabs that a role may have with a dynamic split."""
    place = config.placement
    return place.min_gpu_sets.get(role, 1), place.max_gpu_sets.get(role, num_slabs(config))


def may_take_turns(config: RunConfig) -> bool:
    """Whether a dynamic split may give all slabs to rollout, and then to each GenRM: the trainer uses them
    too, and no role has a limit."""
    place = config.placement
    is_free = not (place.min_gpu_sets or place.max_gpu_sets)
    return place.mode == "partial" and place.split == "dynamic" and is_free


def first_split(config: RunConfig) -> dict[str, int]:
    """Returns the number of slabs that each role with engines has at first, where rollout and GenRMs have
    slabs at the same time."""
    judges, roles, block = config.placement.genrm_gpu_sets, engine_roles(config), block_nodes(config)
    each, more = divmod(judges // block, max(len(roles) - 1, 1))
    found = {role: (each + (index < more)) * block for index, role in enumerate(roles[1:])}
    return {"rollout": num_slabs(config) - judges, **found}
