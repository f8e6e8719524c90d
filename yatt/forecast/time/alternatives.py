"""The settings that are compared with a config: placements, splits, ahead, oversampling.

Each alternative is a complete config that the rules between sections allow; what they refuse is left out.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from yatt.config.check import broken_relations, node_gpus, num_slabs, slab_gpus
from yatt.config.schema import PlacementSection, RunConfig
from yatt.core.gpus.placement import TRAINER, placement_of
from yatt.errors import ConfigError

SHARES_OF_TRAINERS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of all nodes that are tried as trainer nodes."""

OVERSAMPLING = (1.25, 1.5)
MOST_GPUS = 16384

KEYS = (
    "placement.mode",
    "placement.trainer_nodes",
    "placement.genrm_gpu_sets",
    "placement.split",
    "rollout.ahead",
    "rollout.max_policy_age",
    "rollout.oversample",
)
"""Keys in which alternatives differ."""

LIMITS = ("placement.min_gpu_sets", "placement.max_gpu_sets")
"""Keys that are allowed with a dynamic split only."""


@dataclass(frozen=True)
class Alternative:
    """One setting to simulate."""

    config: RunConfig
    is_own: bool = False

    @property
    def is_dynamic(self) -> bool:
        """Whether the policy of the split moves slabs."""
        return self.config.placement.split == "dynamic"

    @cached_property
    def split(self) -> dict[str, int]:
        """Slabs of each engine role while completions are sampled."""
        holders = Counter(placement_of(self.config).sampling.values())
        return {role: num for role, num in holders.items() if role != TRAINER}

    @property
    def is_shared(self) -> bool:
        """Whether trainer and engines use the same GPUs."""
        return self.config.placement.mode != "disaggregated"

    @property
    def takes_turns(self) -> bool:
        """Whether rollout and GenRMs use the same slabs one after the other."""
        return self.config.placement.mode == "colocated" and bool(self.config.engine_genrms)

    @property
    def max_cuts(self) -> int:
        """Maximum number of iterations that may cut the same group."""
        rollout = self.config.rollout
        return max(rollout.max_policy_age - rollout.ahead, 0)

    @property
    def name(self) -> str:
        """A short name for tables."""
        placement, rollout = self.config.placement, self.config.rollout
        words: list[str] = [placement.mode]
        if not self.is_shared:
            words.append(with_noun(placement.trainer_nodes, "trainer node"))
        if placement.genrm_gpu_sets:
            split = f"{placement.genrm_gpu_sets} of {with_noun(num_slabs(self.config), 'GPU set')} to GenRMs"
            words.append(f"dynamic from {split}" if self.is_dynamic else split)
        words += [f"ahead {rollout.ahead}"] if not self.is_shared else []
        words += [f"oversample {rollout.oversample:g}"] if rollout.oversample > 1 else []
        return ", ".join(words)

    def oversampled(self, factor: float) -> "Alternative":
        """Returns the same with `rollout.oversample`."""
        rollout = replace(self.config.rollout, oversample=factor)
        return replace(self, config=replace(self.config, rollout=rollout), is_own=False)

    def settings(self, config: RunConfig) -> list[str]:
        """Returns what has to be changed in `config`, as arguments of a command line."""
        pairs = ((key, _value(self.config, key), _value(config, key)) for key in KEYS)
        return [f"{key}={new}" for key, new, old in pairs if new != old]

    def removed(self, config: RunConfig) -> list[str]:
        """Returns the keys of `config` that must not be written for this setting: a command line cannot
        remove them."""
        return [key for key in LIMITS if _value(config, key) and not _value(self.config, key)]


def with_noun(num: int, what: str) -> str:
    """Returns a number with its noun."""
    return f"{num:,} {what}{'s' if num != 1 else ''}"


def num_gpus(config: RunConfig) -> int:
    """Returns the number of GPUs of all nodes."""
    return sum(node_gpus(config))


def resized_config(config: RunConfig, gpus: int) -> RunConfig:
    """Returns the config for another number of GPUs: nodes, slabs and batch in the same proportion.

    Raises:
        ConfigError: this is no whole number of nodes, or the config would break a rule.
    """
    launch, placement, trainer = config.launch, config.placement, config.trainer
    factor = gpus / num_gpus(config)
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"--gpus {gpus}: write 1 to {MOST_GPUS}.")
    nodes = launch.nodes * factor
    trainers = placement.trainer_nodes * factor
    if not nodes.is_integer() or not trainers.is_integer():
        kinds = sorted(set(node_gpus(config)))
        each = " and ".join(map(str, kinds))
        raise ConfigError(
            f"--gpus {gpus}: {num_gpus(config)} GPUs of {with_noun(launch.nodes, 'node')} with {each} each "
            f"({with_noun(placement.trainer_nodes, 'trainer node')}) cannot be scaled to it in whole nodes; "
            f"write a multiple of {num_gpus(config) // _divisor(config)}."
        )
    judges = round(placement.genrm_gpu_sets * factor)
    minis = max(round(trainer.mini_batch_size * factor), 1)
    found = replace(
        config,
        launch=replace(launch, nodes=int(nodes)),
        placement=replace(
            placement,
            trainer_nodes=int(trainers),
            genrm_gpu_sets=max(judges, len(config.engine_genrms)) if placement.genrm_gpu_sets else 0,
            min_gpu_sets={role: max(int(num * factor), 1) for role, num in placement.min_gpu_sets.items()},
            max_gpu_sets={
                role: max(math.ceil(num * factor), 1) for role, num in placement.max_gpu_sets.items()
            },
        ),
        trainer=replace(
            trainer,
            mini_batch_size=minis,
            train_batch_size=minis * (trainer.train_batch_size // trainer.mini_batch_size),
        ),
    )
    if faults := broken_relations(found):
        raise ConfigError(heading=f"--gpus {gpus} breaks rules:", findings=faults)
    return found


def _divisor(config: RunConfig) -> int:
    """Returns the largest number by which all node counts can be divided."""
    nodes, trainers = config.launch.nodes, config.placement.trainer_nodes
    return max(each for each in range(1, nodes + 1) if nodes % each == 0 and trainers % each == 0)


def is_valid_alternative(alternative: Alternative) -> bool:
    """Whether the rules between sections allow it."""
    return not broken_relations(alternative.config)


def as_colocated(config: RunConfig) -> Alternative:
    """Returns the config with all roles taking turns."""
    return Alternative(_placed(config, PlacementSection(mode="colocated"), ahead=0))


def as_partial(config: RunConfig, genrm_gpu_sets: int, *, is_dynamic: bool = False) -> Alternative:
    """Returns the config with so many slabs of GenRMs while completions are sampled; with a dynamic split, at
    first, and with the config's own limits."""
    placement = PlacementSection(mode="partial", genrm_gpu_sets=genrm_gpu_sets)
    if is_dynamic:
        own = config.placement
        placement = replace(
            placement, split="dynamic", min_gpu_sets=own.min_gpu_sets, max_gpu_sets=own.max_gpu_sets
        )
    return Alternative(_placed(config, placement, ahead=0))


def as_disaggregated(config: RunConfig, trainer_nodes: int, genrm_gpu_sets: int, ahead: int) -> Alternative:
    """Returns the config with nodes that only train."""
    placement = PlacementSection(
        mode="disaggregated", trainer_nodes=trainer_nodes, genrm_gpu_sets=genrm_gpu_sets
    )
    return Alternative(_placed(config, placement, ahead=ahead))


def trainer_node_counts(config: RunConfig) -> list[int]:
    """Returns the numbers of trainer nodes that are tried: only the config's own if its nodes differ, because
    another number would be another number of GPUs."""
    nodes = config.launch.nodes
    if not is_uniform(config):
        return [config.placement.trainer_nodes]
    tried = {round(nodes * share) for share in SHARES_OF_TRAINERS} | {config.placement.trainer_nodes}
    return sorted(each for each in tried if 0 < each < nodes)


def genrm_slab_counts(config: RunConfig, *, near: int = 0, step: int = 0) -> Iterator[int]:
    """Yields numbers of GenRM slabs: at even distances, or those `step` from `near`."""
    least, most = len(config.engine_genrms), num_slabs(config) - 1
    if step:
        yield from (num for num in (near - step, near + step) if least <= num <= most)
    else:
        yield from range(least, most + 1, first_step(config))


def first_step(config: RunConfig) -> int:
    """Returns the distance of the numbers of GenRM slabs that are tried first."""
    return max(num_slabs(config) // 16, 1)


def is_uniform(config: RunConfig) -> bool:
    """Whether all nodes have the same number of GPUs, so that any of them can train."""
    return len(set(node_gpus(config))) == 1 and config.launch.gpus_per_node % slab_gpus(config) == 0


def _placed(config: RunConfig, placement: PlacementSection, *, ahead: int) -> RunConfig:
    age = max(config.rollout.max_policy_age, ahead)
    rollout = replace(config.rollout, ahead=ahead, max_policy_age=age, oversample=1.0)
    engine_gpus = config.launch.engine_gpus_per_node if placement.mode == "disaggregated" else 0
    return replace(
        config,
        rollout=rollout,
        launch=replace(config.launch, engine_gpus_per_node=engine_gpus),
        placement=replace(
            placement, send_changes=config.placement.send_changes, send_slices=config.placement.send_slices
        ),
    )


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
