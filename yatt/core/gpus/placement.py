"""The placement: a table of the role that holds each slab in each phase.

A slab is the smallest set of a node's GPUs that one engine of any kind can use; on a node that only trains
it is the whole node. A role whose engines need fewer GPUs has several of them side by side on each of its
slabs. If an engine needs more GPUs than a node has, it spans consecutive nodes: a slab is then a whole node,
and the nodes of a *block* always have one role together. Only this module and the rules of the config depend
on the placement mode. Roles are ``trainer``, ``rollout`` and ``genrm:NAME``.

The *trainer nodes* are the nodes with trainer ranks. They have the data shards, the prompt groups made from
them, validation, and all state of a checkpoint. Engine nodes only run engines, have no state, and may be
lost. Trainer nodes are the first nodes, so a trainer node's index is also the number of its data shard.

An evaluation has no trainer ranks: the nodes with data shards and prompt groups are the trainer nodes all the
same, and no phase gives a slab to the trainer.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from yatt.config.check import (
    block_nodes,
    engine_gpus,
    engine_spans,
    node_gpus,
    num_slabs,
    num_trainer_nodes,
    slab_gpus,
)
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sizes import only_judges

TRAINER = "trainer"
ROLLOUT = "rollout"


def genrm_role(name: str) -> str:
    """Returns the role of one GenRM."""
    return f"genrm:{name}"


def answering_role(genrm: GenRMSection) -> str:
    """Returns the role whose engines answer a GenRM's questions."""
    return ROLLOUT if genrm.is_policy else genrm_role(genrm.name)


def genrm_of_role(role: str) -> str:
    """Returns the name of a role's GenRM; empty: the role is none of a GenRM."""
    return role.partition(":")[2]


@dataclass(frozen=True, slots=True, order=True)
class Slab:
    """A set of GPUs of one node; `gpus` are local indices on `node`."""

    node: int
    index: int
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        """The slab's name in logs and events."""
        return f"n{self.node}s{self.index}"


Holders = dict[Slab, str]


@dataclass(frozen=True)
class Placement:
    """The holder of every slab in each phase, and values derived from it.

    Attributes:
        sampling: holders while completions are sampled.
        scoring: holders in each scoring phase after sampling, in order; empty if GenRMs score meanwhile.
        training: holders while the trainer works.
        engine_gpus: number of GPUs of one engine of each engine role.
        shared: slabs that change between rollout and GenRMs (`placement.split: dynamic`); `sampling` is how
            they begin.
        spans: number of nodes of one engine of each engine role.
        prompt_nodes: number of trainer nodes of an evaluation; 0: those with trainer ranks.
    """

    slabs: tuple[Slab, ...]
    sampling: Holders
    scoring: tuple[Holders, ...]
    training: Holders
    engine_gpus: Mapping[str, int] = field(default_factory=dict)
    shared: frozenset[Slab] = frozenset()
    spans: Mapping[str, int] = field(default_factory=dict)
    prompt_nodes: int = 0

    @cached_property
    def turns(self) -> tuple[Holders, ...]:
        """Holders in each scoring phase of a batch for which roles take turns: `scoring`, or, where shared
        slabs are the trainer's too, all of them for each GenRM. Empty if roles never can."""
        if not self.shared or any(self.training[slab] != TRAINER for slab in self.shared):
            return self.scoring
        judges = [role for role in self.engine_roles if role != ROLLOUT]
        return tuple(dict.fromkeys(self.slabs, role) for role in judges)

    def first_roles_of(self, slab: Slab) -> tuple[str, ...]:
        """Returns every role that holds this slab in some phase, before any slab has changed its role."""
        phases = (self.sampling, *self.scoring, self.training)
        return tuple(dict.fromkeys(phase[slab] for phase in phases if slab in phase))

    def roles_of(self, slab: Slab) -> tuple[str, ...]:
        """Returns every role that may hold this slab in some phase."""
        more = self.engine_roles if slab in self.shared else ()
        return tuple(dict.fromkeys((*self.first_roles_of(slab), *more)))

    @cached_property
    def engine_roles(self) -> tuple[str, ...]:
        """Rollout and the GenRMs with engines."""
        found = dict.fromkeys(role for phase in (self.sampling, *self.scoring) for role in phase.values())
        return tuple(role for role in found if role != TRAINER)

    def engines_on(self, slab: Slab, role: str) -> tuple[tuple[int, ...], ...]:
        """Returns the GPUs of each engine of a role on a slab that this role can hold, in order. An engine
        that spans nodes has a process for each GPU, and these GPUs are returned one by one."""
        size = self.engine_gpus.get(role, len(slab.gpus)) if self.spans.get(role, 1) == 1 else 1
        return tuple(slab.gpus[first : first + size] for first in range(0, len(slab.gpus), size))

    def num_engines_on(self, slab: Slab) -> dict[str, int]:
        """Maps each engine role that can hold the slab to the number of its engines there. An engine that
        spans nodes counts on its first one."""
        return {role: self._num_engines(slab, role) for role in self.roles_of(slab) if role != TRAINER}

    def _num_engines(self, slab: Slab, role: str) -> int:
        if self.spans.get(role, 1) > 1:
            return int(self.nodes_of(slab, role)[0] == slab.node)
        return len(self.engines_on(slab, role))

    def nodes_of(self, slab: Slab, role: str) -> tuple[int, ...]:
        """Returns the nodes of the engine of a role that uses this slab, in the order of its ranks."""
        span = self.spans.get(role, 1)
        first = slab.node - (slab.node - self.first_engine_node) % span
        return tuple(range(first, first + span))

    @cached_property
    def first_engine_node(self) -> int:
        """The first node with an engine."""
        return min(
            slab.node
            for phase in (self.sampling, *self.scoring)
            for slab, role in phase.items()
            if role != TRAINER
        )

    @cached_property
    def blocks(self) -> tuple[frozenset[int], ...]:
        """Sets of nodes that are of use only together, because an engine spans them. Nodes whose engines are
        all narrow are in none."""
        found = set()
        for slab in self.slabs:
            widest = max(self.roles_of(slab), key=lambda role: self.spans.get(role, 1))
            if self.spans.get(widest, 1) > 1:
                found.add(frozenset(self.nodes_of(slab, widest)))
        return tuple(sorted(found, key=min))

    def with_blocks(self, nodes: Set[int]) -> frozenset[int]:
        """Returns the nodes, and those that are of no use without one of them."""
        return frozenset(nodes).union(*(block for block in self.blocks if block & nodes))

    @cached_property
    def num_engines(self) -> dict[str, Counter[int]]:
        """Maps each engine role to the number of its engines per node, on all slabs that it can hold."""
        counts: dict[str, Counter[int]] = {role: Counter() for role in self.pools}
        for slab in self.slabs:
            for role, count in self.num_engines_on(slab).items():
                counts[role][slab.node] += count
        return counts

    @cached_property
    def slabs_by_node(self) -> dict[int, tuple[Slab, ...]]:
        """Maps each node to its slabs, in the order of their index."""
        found: dict[int, list[Slab]] = {node: [] for node in range(self.prompt_nodes)}
        for slab in self.slabs:
            found.setdefault(slab.node, []).append(slab)
        return {node: tuple(slabs) for node, slabs in found.items()}

    @cached_property
    def num_slabs(self) -> dict[str, Counter[int]]:
        """Maps each role to the number of slabs per node that it holds in some phase."""
        counts: dict[str, Counter[int]] = {}
        for slab in self.slabs:
            for role in self.roles_of(slab):
                counts.setdefault(role, Counter())[slab.node] += 1
        return counts

    @cached_property
    def trainer_nodes(self) -> tuple[int, ...]:
        """Nodes with trainer ranks; of an evaluation, those with prompts."""
        return tuple(range(self.prompt_nodes)) or tuple(sorted(self.num_slabs[TRAINER]))

    @cached_property
    def pools(self) -> dict[str, frozenset[int]]:
        """Maps each engine role to the nodes that can run it."""
        return {role: frozenset(nodes) for role, nodes in self.num_slabs.items() if role != TRAINER}

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return sum(len(slab.gpus) for slab in self.slabs)

    # ---- trainer ranks --------------------------------------------------------------------------

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """Global rank of each trainer node's first trainer rank, then the number of all ranks."""
        slabs = [slab for slab in self.slabs if TRAINER in self.roles_of(slab)]
        each = [sum(len(slab.gpus) for slab in slabs if slab.node == owner) for owner in self.trainer_nodes]
        return tuple(accumulate(each, initial=0))

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self._first_ranks[-1]

    def first_rank(self, node: int) -> int:
        """Returns the global rank of a trainer node's first trainer rank."""
        return self._first_ranks[self.trainer_nodes.index(node)]

    def node_of(self, global_rank: int) -> int:
        """Returns the node of a trainer rank."""
        return self.trainer_nodes[bisect.bisect_right(self._first_ranks, global_rank) - 1]

    # ---- weights --------------------------------------------------------------------------------

    def weight_ranks(self, node: int, stage_ranks: int, pp_size: int) -> tuple[int, ...]:
        """Returns the trainer ranks whose weights this node's engines read: one for each part of the model.

        A rank of the node itself, if it has the part. Otherwise nodes take different ranks that have it, so
        that every trainer node sends as much as the others. Ranks are in megatron-core's order
        tp-cp-ep-dp-pp.

        Args:
            stage_ranks: consecutive ranks that have every weight of a pipeline stage together.
        """
        each = self.world_size // pp_size
        copies = each // stage_ranks
        turn = sorted(self.pools[ROLLOUT]).index(node)
        ranks = []
        for part in range(stage_ranks * pp_size):
            pp_rank, place = divmod(part, stage_ranks)
            having = [pp_rank * each + copy * stage_ranks + place for copy in range(copies)]
            local = [rank for rank in having if self.node_of(rank) == node]
            ranks.append(local[0] if local else having[turn % copies])
        return tuple(ranks)

    def weight_part(self, node: int) -> int:
        """Returns the number of a node among those of its rollout engine: which slices its ranks have."""
        return (node - self.first_engine_node) % self.spans.get(ROLLOUT, 1)

    def weight_chains(
        self, stage_ranks: int, pp_size: int, *, in_parts: bool = False
    ) -> dict[tuple[int, int], tuple[int, ...]]:
        """Maps trainer ranks and parts to the nodes that fetch these weights from another node, in order.

        Args:
            in_parts: nodes fetch slices, so a chain has nodes with the same ones; else all have part 0.
        """
        chains: dict[tuple[int, int], tuple[int, ...]] = {}
        for node in sorted(self.pools.get(ROLLOUT, ())):
            part = self.weight_part(node) if in_parts else 0
            for rank in self.weight_ranks(node, stage_ranks, pp_size):
                if self.node_of(rank) != node:
                    chains[rank, part] = (*chains.get((rank, part), ()), node)
        return chains


def placement_of(config: RunConfig) -> Placement:
    """Returns the placement of a checked config."""
    if config.is_given:
        return _trainers_only(config)
    if only_judges(config):
        return _judge_only(config)
    disaggregated = config.placement.mode == "disaggregated"
    trainers = num_trainer_nodes(config)
    slabs: list[Slab] = []
    for node, gpus in enumerate(node_gpus(config)):
        size = gpus or 1 if disaggregated and node < trainers else slab_gpus(config)
        slabs += [
            Slab(node, index, tuple(range(index * size, (index + 1) * size))) for index in range(gpus // size)
        ]
    names = [genrm_role(genrm.name) for genrm in config.engine_genrms]
    sizes, spans, block = engine_gpus(config), engine_spans(config), block_nodes(config)
    prompt_nodes = 0 if config.trains else trainers
    if config.placement.mode == "colocated":
        scoring = tuple(dict.fromkeys(slabs, name) for name in names)
        sampling = dict.fromkeys(slabs, ROLLOUT)
        training = dict.fromkeys(slabs, TRAINER) if config.trains else sampling
        return Placement(
            tuple(slabs), sampling, scoring, training, sizes, spans=spans, prompt_nodes=prompt_nodes
        )
    engines = [slab for slab in slabs if not (disaggregated and slab.node < trainers)]
    assert len(engines) == num_slabs(config), "check.num_slabs counts the same GPU sets"
    sampling = dict.fromkeys(slabs, TRAINER) | dict.fromkeys(engines, ROLLOUT)
    judges = engines[len(engines) - config.placement.genrm_gpu_sets :]
    sampling.update({slab: names[i // block % len(names)] for i, slab in enumerate(judges)})
    training = sampling if disaggregated or not config.trains else dict.fromkeys(slabs, TRAINER)
    shared = frozenset(engines if config.placement.split == "dynamic" else ())
    return Placement(tuple(slabs), sampling, (), training, sizes, shared, spans, prompt_nodes)


def _trainers_only(config: RunConfig) -> Placement:
    """Returns the placement without engines: the trainer has every node all the time."""
    gpus = tuple(range(config.launch.gpus_per_node))
    slabs = tuple(Slab(node, 0, gpus) for node in range(config.launch.nodes))
    trainers = dict.fromkeys(slabs, TRAINER)
    return Placement(slabs, trainers, (), trainers)


def _judge_only(config: RunConfig) -> Placement:
    """Returns the placement of an evaluation of one GenRM: its engines have every slab all the time. There is
    none for a judge behind a URL."""
    roles, size = [genrm_role(genrm.name) for genrm in config.engine_genrms], slab_gpus(config)
    slabs = tuple(
        Slab(node, index, tuple(range(index * size, (index + 1) * size)))
        for node, gpus in enumerate(node_gpus(config) if roles else ())
        for index in range(gpus // size)
    )
    holders = dict.fromkeys(slabs, *roles[:1])
    sizes, spans = engine_gpus(config), engine_spans(config)
    return Placement(slabs, holders, (), holders, sizes, spans=spans, prompt_nodes=config.launch.nodes)


def dp_lead_ranks(*, tp_size: int, cp_size: int, dp_size: int) -> tuple[int, ...]:
    """Returns each dp_rank's first model-parallel global rank, in megatron-core's order tp-cp-ep-dp-pp."""
    return tuple(dp_rank * tp_size * cp_size for dp_rank in range(dp_size))
