"""Sizes that follow from a run's config: nodes, GPUs, slabs, engines on a slab."""

from collections.abc import Iterator

from yatt.config.schema import GenRMSection, RolloutSection, RunConfig


def num_trainer_nodes(config: RunConfig) -> int:
    """Returns the number of trainer nodes; they are the first nodes."""
    return config.placement.trainer_nodes if config.placement.mode == "disaggregated" else config.launch.nodes


def node_gpus(config: RunConfig) -> tuple[int, ...]:
    """Returns the number of GPUs of each node."""
    launch, trainers = config.launch, num_trainer_nodes(config)
    rest = launch.engine_gpus_per_node or launch.gpus_per_node
    return (launch.gpus_per_node,) * trainers + (rest,) * (launch.nodes - trainers)


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


def slab_gpus(config: RunConfig) -> int:
    """Returns the GPUs per slab: the smallest set that one engine of any kind can use. It is as wide as the
    widest engine; narrower ones are on it side by side."""
    return max(size for _, size in engine_sizes(config))


def engines_per_slab(config: RunConfig, role: str) -> int:
    """Returns the number of engines that a role has on one slab."""
    return slab_gpus(config) // engine_gpus(config)[role]


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
    return sum(node_gpus(config)[node] // slab_gpus(config) for node in engine_nodes(config))


def engine_roles(config: RunConfig) -> tuple[str, ...]:
    """Returns the roles with engines: rollout, then each GenRM's."""
    return ("rollout", *(f"genrm:{genrm.name}" for genrm in config.engine_genrms))


def slab_limits(config: RunConfig, role: str) -> tuple[int, int]:
    """Returns the fewest and the most slabs that a role may have with a dynamic split."""
    place = config.placement
    return place.min_slabs.get(role, 1), place.max_slabs.get(role, num_slabs(config))


def first_split(config: RunConfig) -> dict[str, int]:
    """Returns the number of slabs that each role with engines has at first, where rollout and GenRMs have
    slabs at the same time."""
    judges, roles = config.placement.genrm_slabs, engine_roles(config)
    each, more = divmod(judges, max(len(roles) - 1, 1))
    found = {role: each + (index < more) for index, role in enumerate(roles[1:])}
    return {"rollout": num_slabs(config) - judges, **found}
