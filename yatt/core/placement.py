"""Which role holds which slab in which phase: the placement modes, as a table of values.

A slab is the smallest set of a node's GPUs that one engine of either kind can use. Nothing outside
this module knows the mode. Roles are ``trainer``, ``rollout`` and ``genrm:NAME``.
"""

from dataclasses import dataclass

from yatt.config.check import num_slabs, slab_gpus
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Holders of every slab in each phase.

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


def place(config: RunConfig) -> Placement:
    """The placement of a checked config."""
    size = slab_gpus(config)
    slabs = tuple(
        Slab(node, index, tuple(range(index * size, (index + 1) * size)))
        for node in range(config.launch.nodes)
        for index in range(config.launch.gpus_per_node // size)
    )
    assert len(slabs) == num_slabs(config), "check.num_slabs counts the same slabs"
    training = dict.fromkeys(slabs, TRAINER)
    names = [genrm_role(genrm.name) for genrm in config.genrms]
    if config.placement.mode == "colocated":
        scoring = tuple(dict.fromkeys(slabs, name) for name in names)
        return Placement(slabs, dict.fromkeys(slabs, ROLLOUT), scoring, training)
    judges = slabs[len(slabs) - config.placement.genrm_slabs :]
    sampling = dict.fromkeys(slabs, ROLLOUT)
    sampling.update({slab: names[i % len(names)] for i, slab in enumerate(judges)})
    return Placement(slabs, sampling, (), training)
