"""Rules about the engines' GPUs: their numbers fill a node, or whole nodes; and what needs several."""

from collections.abc import Iterator

from yatt.config.schema import GenRMSection, RolloutSection, RunConfig
from yatt.config.sizes import engine_gpus_key, engine_node_gpus, engine_nodes, engine_sizes
from yatt.errors import Finding, mistake_in


def width_faults(config: RunConfig) -> Iterator[Finding]:
    """Faults of the engines' numbers of GPUs, which must fill a node, and the slab of the widest engine."""
    yield from _experts(config)
    gpus, sizes = engine_node_gpus(config), dict(engine_sizes(config))
    named = engine_gpus_key(config)
    widest = max(sizes, key=lambda key: sizes[key])
    if sizes[widest] > gpus:
        yield from _spans(config, sizes, widest, named)
        return
    slab = sizes[widest]
    fitting = ", ".join(str(each) for each in range(1, slab + 1) if slab % each == 0)
    for key, size in sizes.items():
        if gpus % size:
            yield mistake_in(key, f"{size} does not divide {named} {gpus}; write a divisor.")
        elif slab % size:
            yield mistake_in(
                key,
                f"{size} does not divide {widest} {slab}: such engines would not fill a GPU set, which "
                f"has {slab} GPUs; write one of {fitting}, or another {widest}.",
            )


def _spans(config: RunConfig, sizes: dict[str, int], widest: str, named: str) -> Iterator[Finding]:
    """Faults where an engine spans nodes: a slab is a node, and blocks of nodes have one role."""
    gpus, nodes = engine_node_gpus(config), len(engine_nodes(config))
    most = sizes[widest]
    whole = ", ".join(str(gpus * n) for n in range(1, nodes + 1) if nodes % n == 0)
    for key, size in sizes.items():
        if size % gpus and gpus % size:
            yield mistake_in(
                key, f"{size} neither divides {named} {gpus} nor is a multiple of it; write one of these."
            )
        elif size > gpus and most % size:
            yield mistake_in(
                key, f"{size} does not divide {widest} {most}; write a divisor of it, or another {widest}."
            )
    if not most % gpus and nodes % (most // gpus):
        yield mistake_in(
            widest,
            f"{most} GPUs are {most // gpus} nodes ({named}: {gpus}), and the number of nodes with "
            f"engines, {nodes}, is no multiple of that; write {whole}, or change launch.nodes.",
        )
    if config.placement.genrm_gpu_sets % max(most // gpus, 1):
        yield mistake_in(
            "placement.genrm_gpu_sets",
            f"with {widest} {most}, {most // gpus} nodes have one role together; write a multiple of "
            f"{most // gpus}.",
        )
    if config.placement.split == "dynamic":
        yield mistake_in(
            "placement.split", f"{widest} {most} spans nodes, whose GPU sets do not move; write fixed."
        )
    yield from _spanning_engines(config)


def engine_sections(config: RunConfig) -> list[tuple[str, RolloutSection | GenRMSection]]:
    """Returns the sections of everything that has engines, by key."""
    judges = [(f"genrms[{i}]", g) for i, g in enumerate(config.genrms) if g.has_engine]
    return [("rollout", config.rollout), *judges]


def _spanning_engines(config: RunConfig) -> Iterator[Finding]:
    gpus = engine_node_gpus(config)
    for key, section in engine_sections(config):
        if section.tp_size > gpus and section.engine == "transformers":
            yield mistake_in(
                f"{key}.engine", f"tp_size {section.tp_size} spans nodes, which needs vllm; write vllm."
            )


def _experts(config: RunConfig) -> Iterator[Finding]:
    for name, section in engine_sections(config):
        key = f"{name}.expert_parallel"
        if not section.expert_parallel:
            continue
        if section.tp_size == 1:
            yield mistake_in(key, f"has no effect with {name}.tp_size: 1; remove it, or raise tp_size.")
        if section.engine not in ("auto", "vllm"):
            yield mistake_in(key, f"needs engine vllm, not {section.engine}; remove it.")
        if config.launch.device == "cpu":
            yield mistake_in(key, "needs CUDA, but launch.device is cpu; remove it.")
