"""The job plan: a run's components, and the settings of a job start that are not in the run's config.

Written to the run folder by `yatt submit`, read by every start of the job (`yatt.launch.attempt.job`).
"""

from dataclasses import dataclass, replace

import msgspec

from yatt.adapters.files.files import read_record, write_atomically
from yatt.config.check import broken_relations, node_gpus, num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig, site_component
from yatt.errors import ConfigError
from yatt.paths import RunPaths

TRAINER_PART, ENGINES_PART = "trainer", "engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Nodes with the same resources: the run's nodes `first` to `first + nodes - 1`."""

    name: str
    first: int
    nodes: int
    gpus_per_node: int
    """0 if no GPUs are requested."""

    @property
    def indexes(self) -> tuple[int, ...]:
        """The run's node indexes."""
        return tuple(range(self.first, self.first + self.nodes))


@dataclass(frozen=True, slots=True)
class Resized:
    """Overrides of the config's node counts; 0 keeps the config's value."""

    nodes: int = 0
    trainer_nodes: int = 0


class JobPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that a start of the job reads.

    `submission` identifies the submission: attempts without progress are counted within one. `by_hand` is the
    job name for `sbatch` after `yatt submit --prepare`.
    """

    submission: str
    layout: str
    site: SiteConfig
    resized: Resized = Resized()
    by_hand: str = ""

    def attempt_config(self, config: RunConfig) -> RunConfig:
        """Returns the config of this start's attempts; `config` is the run's.

        Raises:
            ConfigError: the run's sizes do not fit on its nodes.
        """
        return effective_config(config, self.site, self.resized)


def components_of(config: RunConfig, site: SiteConfig, layout: str) -> tuple[Component, ...]:
    """Returns the job's components: one with all nodes if `layout` is flat, else one per kind of node."""
    asks = config.launch.device != "cpu" and site.gpus_directive != "none"
    gpus = node_gpus(config) if asks else (0,) * config.launch.nodes
    trainers, nodes = num_trainer_nodes(config), config.launch.nodes
    if layout == "flat" or trainers == nodes:
        return (Component(name=TRAINER_PART, first=0, nodes=nodes, gpus_per_node=gpus[0]),)
    return (
        Component(name=TRAINER_PART, first=0, nodes=trainers, gpus_per_node=gpus[0]),
        Component(name=ENGINES_PART, first=trainers, nodes=nodes - trainers, gpus_per_node=gpus[trainers]),
    )


def job_layout(config: RunConfig, site: SiteConfig, *, can_het: bool) -> str:
    """Returns the job's layout, het or flat.

    A heterogeneous job whose first component has one node is requeued by Slurm as soon as it notices that
    any of its nodes is dead, also with --no-kill (24.11). So one trainer node is in a flat job with the
    others, if they ask for the same.

    Args:
        can_het: whether the cluster starts heterogeneous jobs.

    Raises:
        ConfigError: the site file requests a layout that is not possible.
    """
    differ = num_trainer_nodes(config) < config.launch.nodes
    if site.layout == "het" and not differ:
        raise ConfigError(
            "site layout: het needs trainer nodes and engine nodes, but every node of this run trains; "
            "write auto, or placement.mode: disaggregated in the run file."
        )
    if site.layout == "het" and not can_het:
        raise ConfigError(
            "site layout: het, but only sched/backfill starts heterogeneous jobs; write auto or flat."
        )
    if site.layout == "auto" and num_trainer_nodes(config) == 1 and _ask_alike(config, site):
        return "flat"
    return "het" if differ and can_het and site.layout != "flat" else "flat"


def _ask_alike(config: RunConfig, site: SiteConfig) -> bool:
    """Whether trainer nodes and engine nodes ask Slurm for the same."""
    gpus = {each.gpus_per_node for each in components_of(config, site, "het")}
    return len(gpus) == 1 and site_component(site, TRAINER_PART) == site_component(site, ENGINES_PART)


def write_plan(paths: RunPaths, plan: JobPlan) -> None:
    """Writes the plan to the run folder."""
    write_atomically(paths.plan, msgspec.json.format(msgspec.json.encode(plan), indent=2))


def read_job_plan(paths: RunPaths) -> JobPlan:
    """Reads the plan of the newest submission.

    Raises:
        ConfigError: nothing was submitted from this folder.
    """
    try:
        return msgspec.json.decode(read_record(paths.plan), type=JobPlan)
    except FileNotFoundError:
        raise ConfigError(f"{paths.root} was not submitted: it has no {paths.plan.name}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{paths.plan} cannot be read: {error}. Submit the run again.") from error


def effective_config(config: RunConfig, site: SiteConfig, resized: Resized) -> RunConfig:
    """Returns the config of an attempt: the run's config with another number of nodes and this site's
    folders. If nodes copy models first (`stage`), the start timeout is longer by its limit.

    Raises:
        ConfigError: the run's sizes do not fit on that many nodes.
    """
    launch, place = config.launch, config.placement
    launch = replace(
        launch,
        nodes=resized.nodes or launch.nodes,
        scratch_dir=site.scratch_dir or launch.scratch_dir,
        shm_dir=site.shm_dir or launch.shm_dir,
        start_timeout_s=launch.start_timeout_s + (site.stage.limit_s if site.stage.folder else 0),
    )
    if resized.trainer_nodes:
        place = replace(place, trainer_nodes=resized.trainer_nodes)
    changed = replace(config, launch=launch, placement=place)
    if faults := broken_relations(changed):
        raise ConfigError(heading=f"the run cannot continue on {launch.nodes} nodes:", findings=faults)
    return changed
