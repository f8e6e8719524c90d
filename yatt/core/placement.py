"""Which role holds which slab in which phase: the placement modes, as a table of values.

A slab is the smallest set of a node's GPUs that one engine of either kind can use; on a node that only
trains it is the whole node. Nothing outside this module (and the rules of the config) knows the mode.
Roles are ``trainer``, ``rollout`` and ``genrm:NAME``.

Nodes with trainer ranks are the *trainer_nodes*: of shards of the prompts, of the groups made from them, of
validation and of all state that a checkpoint holds. The others only run engines, own nothing, and may
be lost. Trainer nodes are the first nodes, so a trainer node's index is also the number of its data shard.
"""

import bisect
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from yatt.config.check import node_gpus, num_slabs, num_trainer_nodes, slab_gpus
from yatt.config.schema import RunConfig

TRAINER = "trainer"
ROLLOUT = "rollout"


def genrm_role(name: str) -> str:
    """Role of one GenRM."""
    return f"genrm:{name}"


@dataclass(frozen=True, slots=True, order=True)
class Slab:
    """`gpus` are local indices on `node`."""

    node: int
    index: int
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        """For logs and events."""
        return f"n{self.node}s{self.index}"


Holders = dict[Slab, str]


@dataclass(frozen=True)
class Placement:
    """Holders of every slab in each phase, and what follows from them.

    Attributes:
        sampling: who holds what while completions are sampled.
        scoring: further phases after sampling, in order; empty where GenRMs score meanwhile.
        training: who holds what while the trainer works.
    """

    slabs: tuple[Slab, ...]
    sampling: Holders
    scoring: tuple[Holders, ...]
    training: Holders

    def roles_of(self, slab: Slab) -> tuple[str, ...]:
        """Every role that ever holds this slab."""
        phases = (self.sampling, *self.scoring, self.training)
        return tuple(dict.fromkeys(phase[slab] for phase in phases if slab in phase))

    @cached_property
    def slabs_by_node(self) -> dict[int, tuple[Slab, ...]]:
        """Each node's own, by index."""
        found: dict[int, list[Slab]] = {}
        for slab in self.slabs:
            found.setdefault(slab.node, []).append(slab)
        return {node: tuple(slabs) for node, slabs in found.items()}

    @cached_property
    def num_slabs(self) -> dict[str, Counter[int]]:
        """By role: how many slabs of each node it ever holds."""
        counts: dict[str, Counter[int]] = {}
        for slab in self.slabs:
            for role in self.roles_of(slab):
                counts.setdefault(role, Counter())[slab.node] += 1
        return counts

    @cached_property
    def trainer_nodes(self) -> tuple[int, ...]:
        """Nodes with trainer ranks."""
        return tuple(sorted(self.num_slabs[TRAINER]))

    @cached_property
    def pools(self) -> dict[str, frozenset[int]]:
        """Nodes that can run each engine role."""
        return {role: frozenset(nodes) for role, nodes in self.num_slabs.items() if role != TRAINER}

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(len(slab.gpus) for slab in self.slabs)

    # ---- trainer ranks --------------------------------------------------------------------------

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """Global rank of each owner's first trainer rank, and the number of all."""
        slabs = [slab for slab in self.slabs if TRAINER in self.roles_of(slab)]
        each = [sum(len(slab.gpus) for slab in slabs if slab.node == owner) for owner in self.trainer_nodes]
        return tuple(accumulate(each, initial=0))

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self._first_ranks[-1]

    def first_rank(self, node: int) -> int:
        """Global rank of a trainer node's first trainer rank."""
        return self._first_ranks[self.trainer_nodes.index(node)]

    def node_of(self, global_rank: int) -> int:
        """The node of a trainer rank."""
        return self.trainer_nodes[bisect.bisect_right(self._first_ranks, global_rank) - 1]

    # ---- weights --------------------------------------------------------------------------------

    @cached_property
    def weight_sources(self) -> dict[int, int]:
        """The owner that each node with rollout engines, but without a trainer, fetches weights from."""
        fetchers = sorted(self.pools[ROLLOUT] - set(self.trainer_nodes))
        return {node: self.trainer_nodes[i % len(self.trainer_nodes)] for i, node in enumerate(fetchers)}


def place(config: RunConfig) -> Placement:
    """The placement of a checked config."""
    disaggregated = config.placement.mode == "disaggregated"
    trainers = num_trainer_nodes(config)
    slabs: list[Slab] = []
    for node, gpus in enumerate(node_gpus(config)):
        size = gpus if disaggregated and node < trainers else slab_gpus(config)
        slabs += [
            Slab(node, index, tuple(range(index * size, (index + 1) * size))) for index in range(gpus // size)
        ]
    names = [genrm_role(genrm.name) for genrm in config.genrms]
    if config.placement.mode == "colocated":
        scoring = tuple(dict.fromkeys(slabs, name) for name in names)
        training = dict.fromkeys(slabs, TRAINER)
        return Placement(tuple(slabs), dict.fromkeys(slabs, ROLLOUT), scoring, training)
    engines = [slab for slab in slabs if not (disaggregated and slab.node < trainers)]
    assert len(engines) == num_slabs(config), "check.num_slabs counts the same slabs"
    sampling = dict.fromkeys(slabs, TRAINER) | dict.fromkeys(engines, ROLLOUT)
    judges = engines[len(engines) - config.placement.genrm_slabs :]
    sampling.update({slab: names[i % len(names)] for i, slab in enumerate(judges)})
    training = sampling if disaggregated else dict.fromkeys(slabs, TRAINER)
    return Placement(tuple(slabs), sampling, (), training)


def dp_lead_ranks(*, tp_size: int, cp_size: int, dp_size: int) -> tuple[int, ...]:
    """Global rank of each dp_rank's first model-parallel rank, in megatron-core's order tp-cp-ep-dp-pp."""
    return tuple(dp_rank * tp_size * cp_size for dp_rank in range(dp_size))
