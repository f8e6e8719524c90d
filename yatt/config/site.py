"""The site file: the settings of one cluster, and nothing about the run.

Written once per cluster and shared by its users; `yatt submit --site` and `yatt diagnose --site` read it. An
empty text or a 0 always means: do not set the Slurm option, use Slurm's default.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from yatt.config.load import load_as, load_over
from yatt.config.sections.operation import no_credentials, rule
from yatt.config.sections.ranges import COUNT, COUNT_OR_NONE, FILE, LINE, Free
from yatt.config.sections.sbatch import env_faults, option_faults
from yatt.errors import Finding, mistake_in

COMPONENTS = ("trainer", "engines")
"""Components of a job that may request different resources."""

WARNING_SLACK_S = 60
"""Slurm may send the warning this much earlier than requested, because it checks in steps of a minute."""

_BLANK = re.compile(r"\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSection:
    """The container in which job steps run. `yatt submit` and the launcher run outside of it."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis: srun's --container-image; apptainer: `apptainer exec --nv` before the command."""

    image: Annotated[str, LINE] = ""
    """Image for the runtime: a file, or a name that it can fetch."""

    mounts: tuple[Annotated[str, LINE], ...] = ()
    """SOURCE:TARGET or SOURCE:TARGET:ro. Must include the run folder, models and data."""

    command: tuple[Annotated[str, LINE], ...] = ("apptainer", "exec", "--nv")
    """apptainer: the command before its --bind options: singularity, --rocm ..."""

    args: tuple[Annotated[str, LINE], ...] = ()
    """More arguments before the image; for pyxis, more options of srun: --container-writable ..."""

    python: Annotated[str, LINE] = "python3"
    """The container's Python interpreter, with yatt and its engines installed."""

    def __post_init__(self) -> None:
        rule(
            bool(self.image) == (self.runtime != "none"),
            f"runtime is '{self.runtime}' and image is '{self.image}'; write both, or neither.",
        )
        for mount in self.mounts:
            rule(
                bool(re.fullmatch(r"/[^:]*:/[^:]*(:\w+)?", mount)),
                f"mounts: '{mount}' is not SOURCE:TARGET; write absolute paths.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheckSection:
    """The check of each node before an attempt. A node that fails is left out, and the job excludes it."""

    enabled: bool = True
    """Check nodes: memory, node-local folders, network, GPUs, then `command`."""

    command: tuple[Annotated[str, LINE], ...] = ()
    """The site's own check: a program and its arguments. If its exit code is not 0, the node is unfit, and
    the last line of its output is the reason."""

    limit_s: Annotated[int, COUNT] = 60
    """Time limit of the whole check; a node that exceeds it is unfit."""

    free_gb: Annotated[int, COUNT_OR_NONE] = 0
    """Free space that scratch_dir must have, in GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSection:
    """Files that are copied to each node's local disk before an attempt, once for all processes."""

    folder: Annotated[str, FILE] = ""
    """Folder on a local disk of the node; $NAME is a variable of the step ($TMPDIR). Empty: nothing is
    copied."""

    what: tuple[Literal["models", "data", "media", "container"], ...] = ("models", "data", "container")
    """Files to copy. models: policy and GenRMs; data: prompts; media: to every node, the folder
    `data.media_root` and pictures from inside the data files; container: the image, if it is a file."""

    environment: Annotated[str, FILE] = ""
    """A tar archive of the virtual environment of `python`, made by `tar -cf FILE -C ENVIRONMENT .`: unpacked
    to each node's disk, and the processes of the run start from there. Empty: they read the original."""

    limit_s: Annotated[int, COUNT] = 600
    """Time limit for copying; files that are missing then are read from their original place."""

    keep_h: Annotated[int, COUNT_OR_NONE] = 24
    """Hours that a copy stays on the node after its last use, for later runs; 0: removed at once."""

    def __post_init__(self) -> None:
        rule(
            not self.folder or self.folder[0] in "/$",
            f"folder: '{self.folder}' is relative, but jobs start elsewhere; begin it with / or $NAME.",
        )
        rule(
            not self.environment or bool(self.folder),
            "environment is unpacked to `folder`; write a folder on a local disk of each node.",
        )
        rule(
            self.environment[:1] in ("", "/"),
            f"environment: '{self.environment}' is relative, but jobs start elsewhere; begin it with /.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSection:
    """Overrides of the site's requests for one component."""

    partition: Annotated[str, LINE] = ""
    """Overrides the site's `partition`."""

    qos: Annotated[str, LINE] = ""
    """Overrides the site's `qos`."""

    constraint: Annotated[str, LINE] = ""
    """Overrides the site's `constraint`."""

    gpu_type: Annotated[str, LINE] = ""
    """Overrides the site's `gpu_type`."""

    nodelist: Annotated[str, LINE] = ""
    """Exactly these nodes, as a Slurm node list: n[1-4]."""

    cpus_per_node: Annotated[int, COUNT_OR_NONE] = 0
    """Overrides the site's `cpus_per_node`."""

    mem_gb: Annotated[int, COUNT_OR_NONE] = 0
    """Overrides the site's `mem_gb`."""

    sbatch_args: dict[str, Free] = field(default_factory=dict)
    """Added to the site's `sbatch_args`; for an option in both, this one is used."""

    def __post_init__(self) -> None:
        _plain_words(self, ("partition", "qos", "constraint", "gpu_type", "nodelist"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """One cluster."""

    account: Annotated[str, LINE] = ""
    """Account that is charged for the job (sbatch --account)."""

    partition: Annotated[str, LINE] = ""
    """Partition of the job (sbatch --partition). All components of a job need partitions with the same
    preemption settings."""

    qos: Annotated[str, LINE] = ""
    """sbatch --qos."""

    constraint: Annotated[str, LINE] = ""
    """Features that nodes must have (sbatch --constraint)."""

    time_limit_min: Annotated[int, COUNT_OR_NONE] = 60
    """Time limit of one start of the job, in minutes. The run continues in the next start."""

    gpus_directive: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are requested: --gpus-per-node=N, --gres=gpu:N, or not at all (whole nodes without GRES)."""

    gpu_type: Annotated[str, LINE] = ""
    """GPU type, as in --gpus-per-node=TYPE:N; empty: any."""

    cpus_per_node: Annotated[int, COUNT_OR_NONE] = 0
    """CPUs per node (--cpus-per-task of its one task); 0: Slurm's default, often a single core."""

    mem_gb: Annotated[int, COUNT_OR_NONE] = 0
    """Memory per node in GiB; 0: Slurm's default. With `exclusive`, 0 requests all of it (--mem=0)."""

    exclusive: bool = False
    """Request nodes without other jobs (--exclusive)."""

    setup: tuple[Annotated[str, LINE], ...] = ()
    """Shell lines that run before the launcher, unchanged: modules, the virtual environment. A line that
    fails ends the job."""

    sbatch_args: dict[str, Free] = field(default_factory=dict)
    """More options of sbatch by their long names: reservation, exclude, mail-type ... `true` sets a flag."""

    template: Annotated[str, FILE] = ""
    """The site's own batch script, which contains the lines @DIRECTIVES@ and @COMMAND@; empty: yatt's."""

    srun_args: tuple[Annotated[str, LINE], ...] = ()
    """More arguments of each srun, for example --cpu-bind=none. They come last, so they take precedence."""

    env: dict[str, Free] = field(default_factory=dict)
    """Environment variables of all processes on the nodes: NCCL_IB_HCA ... They override the job's."""

    container: ContainerSection = field(default_factory=ContainerSection)

    node_check: NodeCheckSection = field(default_factory=NodeCheckSection)

    stage: StageSection = field(default_factory=StageSection)

    python: Annotated[str, FILE] = ""
    """Python of the launcher, and without a container that of the steps; empty: that of `yatt submit`."""

    no_kill: Literal["auto", "yes", "no"] = "auto"
    """Keep the job if it loses a node (--no-kill), so that the loss of an engine node does not end it. yes:
    if the batch node is lost, a controller requests the next start, so the nodes need `scontrol`. no: Slurm
    requeues the job at each lost node. auto: yes, but no with a container."""

    interface: Annotated[str, LINE] = ""
    """Network interface between nodes; empty: the one that routes to the leader."""

    ip_version: Annotated[int, COUNT_OR_NONE] = 0
    """IP version of the address on `interface`: 4 or 6; 0: IPv4, or IPv6 if the interface has only that."""

    scratch_dir: Annotated[str, FILE] = ""
    """Node-local folder for sockets and compiled code; empty: `launch.scratch_dir` of the run file."""

    shm_dir: Annotated[str, FILE] = ""
    """Node-local memory filesystem; empty: `launch.shm_dir` of the run file."""

    checkpoint_url_prefix: Annotated[str, LINE] = ""
    """Runs without `checkpoint.url` save to PREFIX/NAME, where NAME is that of the run folder; empty: to the
    run folder."""

    storage_options: dict[str, Free] = field(default_factory=dict)
    """Options passed to fsspec for it: endpoint_url, profile ... Credentials are refused here: they come from
    the environment or the driver's own files."""

    signal_lead_s: Annotated[int, COUNT_OR_NONE] = 120
    """Seconds before the time limit at which Slurm sends a warning; a checkpoint must fit in this time."""

    layout: Literal["auto", "het", "flat"] = "auto"
    """het: a heterogeneous job with one component for trainer and one for engines; flat: a plain job whose
    nodes the launcher divides; auto: het if some nodes do not train and the cluster supports it. But one
    trainer node that asks for what the others do is in a flat job, which Slurm keeps when a node dies."""

    requeue: Literal["auto", "requeue", "chain"] = "auto"
    """How a stopped run continues. requeue: under the same job id; chain: by a new job that waits for the end
    of this one (afterany); auto: requeue, or chain if Slurm refuses."""

    components: dict[str, ComponentSection] = field(default_factory=dict)
    """`trainer` and `engines`: overrides of their requests."""

    def __post_init__(self) -> None:
        no_credentials(self.checkpoint_url_prefix, self.storage_options, "checkpoint_url_prefix")
        rule(
            not self.stage.environment or self.container.runtime == "none",
            "stage.environment is for nodes without a container; the container's image is its environment.",
        )
        _plain_words(self, ("account", "partition", "qos", "constraint", "gpu_type", "interface"))


def step_environment(site: SiteConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all processes on the nodes: the job's, overridden by the site's."""
    return {**inherited, **{name: str(value) for name, value in site.env.items()}}


def keeps_job(site: SiteConfig) -> bool:
    """Whether the job continues after the loss of a node."""
    return site.no_kill == "yes" or (site.no_kill == "auto" and site.container.runtime == "none")


def load_site(path: Path) -> SiteConfig:
    """Reads a site file.

    Raises:
        ConfigError: names every wrong key, its line, the rule and what to write instead.
    """
    return load_as(SiteConfig, [path], [], site_rules)


def with_settings(site: SiteConfig, settings: list[str]) -> SiteConfig:
    """Returns the site with other values, ``key=value`` each, from `--set`.

    Raises:
        ConfigError: see `load_site`.
    """
    return load_over(site, settings, site_rules) if settings else site


def site_component(site: SiteConfig, name: str) -> ComponentSection:
    """Returns the requests of component `name`: its own values, else the site's."""
    own = site.components.get(name, ComponentSection())
    apart = ("nodelist", "sbatch_args")
    shared = [f.name for f in fields(own) if f.name not in apart and not getattr(own, f.name)]
    return replace(own, **{key: getattr(site, key) for key in shared})


def site_rules(site: SiteConfig) -> Iterator[Finding]:
    """Yields every mistake between keys."""
    for name in site.components:
        if name not in COMPONENTS:
            yield mistake_in(
                f"components.{name}", f"no such component; write one of {', '.join(COMPONENTS)}."
            )
        yield from option_faults(f"components.{name}.sbatch_args", site.components[name].sbatch_args)
    yield from option_faults("sbatch_args", site.sbatch_args)
    yield from env_faults(site.env)
    yield from _timing(site)
    yield from _asking(site)
    absolute = {"scratch_dir": site.scratch_dir, "shm_dir": site.shm_dir, "template": site.template}
    for key, folder in absolute.items():
        if folder and not folder.startswith("/"):
            yield mistake_in(
                key, f"'{folder}' is relative, but jobs start in other folders; write an absolute path."
            )
    if site.checkpoint_url_prefix and not re.match(r"\w+://.|/", site.checkpoint_url_prefix):
        yield mistake_in(
            "checkpoint_url_prefix",
            "is neither a URL nor an absolute path; write s3://bucket/prefix or /folder.",
        )
    for index, line in enumerate(site.setup):
        if line.lstrip().startswith("#SBATCH"):
            yield mistake_in(
                f"setup[{index}]", "Slurm ignores #SBATCH in these lines; use the keys of this file."
            )


def _timing(site: SiteConfig) -> Iterator[Finding]:
    if not 1 <= site.signal_lead_s <= 65535:
        yield mistake_in("signal_lead_s", f"{site.signal_lead_s}; write 1 to 65535, the range of Slurm.")
    shortest_s = site.signal_lead_s + 2 * WARNING_SLACK_S
    if site.time_limit_min * 60 < shortest_s:
        yield mistake_in(
            "time_limit_min",
            f"{site.time_limit_min} min leaves no time to work: Slurm warns signal_lead_s "
            f"{site.signal_lead_s} s before the end, up to {WARNING_SLACK_S} s early; write "
            f"{-(-shortest_s // 60)} or more.",
        )


def _asking(site: SiteConfig) -> Iterator[Finding]:
    if site.ip_version not in (0, 4, 6):
        yield mistake_in("ip_version", f"{site.ip_version}; write 4, 6, or 0 for any.")
    elif site.ip_version and not site.interface:
        yield mistake_in(
            "ip_version",
            f"{site.ip_version} selects an address of an interface; write `interface` as well.",
        )
    types = {"gpu_type": site.gpu_type}
    types |= {f"components.{name}.gpu_type": part.gpu_type for name, part in site.components.items()}
    for key, wanted in types.items():
        if wanted and site.gpus_directive == "none":
            yield mistake_in(key, "gpus_directive: none requests no GPUs, so no type; remove one of them.")
    partitions = {site_component(site, name).partition for name in COMPONENTS}
    if site.layout == "flat" and len(partitions) > 1:
        yield mistake_in("layout", "a flat job has one partition, but the components have two; write het.")


def _plain_words(section: object, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = getattr(section, key)
        rule(not _BLANK.search(value), f"{key}: '{value}' contains a blank; Slurm would read two words.")
