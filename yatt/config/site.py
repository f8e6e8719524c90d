"""The site file: what is particular to one cluster, and nothing about the run.

Written once per cluster and shared by everybody who works there; `yatt submit --site` and `yatt diagnose
--site` read it. An empty text or a 0 always means "do not ask Slurm for it: its own default holds".
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from yatt.config.load import load_as, load_over
from yatt.config.operation import rule
from yatt.config.ranges import COUNT, COUNT_OR_NONE, FILE, LINE, Free
from yatt.config.sbatch import env_faults, option_faults

COMPONENTS = ("trainer", "engines")
"""Parts of a job that may be asked for differently."""

WARNING_SLACK_S = 60
"""Slurm may warn of the time limit so much earlier than asked; its clock for this ticks in minutes."""

Fault = tuple[str, str]
_BLANK = re.compile(r"\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSection:
    """The container that job steps run in. The submitting side and the launcher run outside of it."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis: srun's --container-image; apptainer: `apptainer exec --nv` before the command."""

    image: Annotated[str, LINE] = ""
    """What the runtime takes: a file, or a name it can fetch."""

    mounts: tuple[Annotated[str, LINE], ...] = ()
    """SOURCE:TARGET or SOURCE:TARGET:ro. The run folder, models and data must be among them."""

    command: tuple[Annotated[str, LINE], ...] = ("apptainer", "exec", "--nv")
    """apptainer: the words that start it, before its --bind options: singularity, --rocm ..."""

    args: tuple[Annotated[str, LINE], ...] = ()
    """More words before the image; with pyxis more options of srun: --container-writable ..."""

    python: Annotated[str, LINE] = "python3"
    """The container's interpreter, which has yatt and its engines."""

    def __post_init__(self) -> None:
        rule(
            bool(self.image) == (self.runtime != "none"),
            f"runtime is '{self.runtime}' and image is '{self.image}'; give both, or leave both out.",
        )
        for mount in self.mounts:
            rule(
                bool(re.fullmatch(r"/[^:]*:/[^:]*(:\w+)?", mount)),
                f"mounts: '{mount}' is not SOURCE:TARGET with absolute folders.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheckSection:
    """What a node has to pass before each attempt. One that does not is left out, and the job kept off it."""

    enabled: bool = True
    """Whether nodes are looked at: memory, node-local folders, network, GPUs, then `command`."""

    command: tuple[Annotated[str, LINE], ...] = ()
    """The site's own check: a program and its words. If it does not end with 0 the node is unfit, and the
    last line it printed says why."""

    limit_s: Annotated[int, COUNT] = 60
    """A node whose looks take longer than this together is unfit."""

    free_gb: Annotated[int, COUNT_OR_NONE] = 0
    """GiB that scratch_dir must have free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSection:
    """What is copied to each node's own disk before an attempt, once for all processes, and read there."""

    folder: Annotated[str, FILE] = ""
    """On a disk of the node's own; $NAME in it is a variable of the step ($TMPDIR). Empty: nothing is
    copied."""

    what: tuple[Literal["models", "data", "container"], ...] = ("models", "data", "container")
    """models: of the policy and the GenRMs; data: the prompts; container: the image, if it is a file."""

    limit_s: Annotated[int, COUNT] = 600
    """A node copies for so long at most; what is missing then is read from where it is."""

    keep_h: Annotated[int, COUNT_OR_NONE] = 24
    """Hours that a copy stays on the node for later runs after its last use; 0: removed at once."""

    def __post_init__(self) -> None:
        rule(
            not self.folder or self.folder[0] in "/$",
            f"folder: '{self.folder}' is relative, and jobs start elsewhere; begin it with / or $NAME.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSection:
    """What one component asks for instead of what the whole file says."""

    partition: Annotated[str, LINE] = ""
    """Instead of the site's `partition`."""

    qos: Annotated[str, LINE] = ""
    """Instead of the site's `qos`."""

    constraint: Annotated[str, LINE] = ""
    """Instead of the site's `constraint`."""

    gpu_type: Annotated[str, LINE] = ""
    """Instead of the site's `gpu_type`."""

    nodelist: Annotated[str, LINE] = ""
    """Exactly these nodes, as Slurm writes a list: n[1-4]."""

    cpus_per_node: Annotated[int, COUNT_OR_NONE] = 0
    """Instead of the site's `cpus_per_node`."""

    mem_gb: Annotated[int, COUNT_OR_NONE] = 0
    """Instead of the site's `mem_gb`."""

    sbatch_args: dict[str, Free] = field(default_factory=dict)
    """Beside the site's own; one that both have is this one's."""

    def __post_init__(self) -> None:
        _plain_words(self, ("partition", "qos", "constraint", "gpu_type", "nodelist"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """One cluster."""

    account: Annotated[str, LINE] = ""
    """Charged for the job (sbatch --account)."""

    partition: Annotated[str, LINE] = ""
    """sbatch --partition. All components of a job need partitions that are preempted in the same way."""

    qos: Annotated[str, LINE] = ""
    """sbatch --qos."""

    constraint: Annotated[str, LINE] = ""
    """Features that nodes must have (sbatch --constraint)."""

    time_limit_min: Annotated[int, COUNT_OR_NONE] = 60
    """Minutes one start of the job may take; one limit for all components. The run goes on in the next."""

    gpus_directive: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are asked for: --gpus-per-node=N, --gres=gpu:N, or not at all (whole nodes without GRES)."""

    gpu_type: Annotated[str, LINE] = ""
    """As in --gpus-per-node=TYPE:N; empty: any."""

    cpus_per_node: Annotated[int, COUNT_OR_NONE] = 0
    """CPUs of each node (--cpus-per-task of its one task); 0: Slurm's default, often a single core."""

    mem_gb: Annotated[int, COUNT_OR_NONE] = 0
    """GiB of memory of each node; 0: Slurm's default. Exclusive nodes with 0 ask for all of it (--mem=0)."""

    exclusive: bool = False
    """Nobody else on our nodes (--exclusive)."""

    setup: tuple[Annotated[str, LINE], ...] = ()
    """Shell lines before the launcher: modules, the virtual environment. Run as they are written here; one
    that fails ends the job."""

    sbatch_args: dict[str, Free] = field(default_factory=dict)
    """More options of sbatch by their long names: reservation, exclude, mail-type ... `true` for a flag."""

    template: Annotated[str, FILE] = ""
    """A batch script of the site's own, with the lines @DIRECTIVES@ and @COMMAND@ in it; empty: yatt's."""

    srun_args: tuple[Annotated[str, LINE], ...] = ()
    """More arguments of each srun, for example --cpu-bind=none. They come last, so they win."""

    env: dict[str, Free] = field(default_factory=dict)
    """Variables for all processes on the nodes: NCCL_IB_HCA ... They win over the job's environment."""

    container: ContainerSection = field(default_factory=ContainerSection)

    node_check: NodeCheckSection = field(default_factory=NodeCheckSection)

    stage: StageSection = field(default_factory=StageSection)

    python: Annotated[str, FILE] = ""
    """The launcher's interpreter, and without a container that of the steps; empty: the submitting one's."""

    no_kill: Literal["auto", "yes", "no"] = "auto"
    """Whether Slurm leaves a job alone that loses a node (--no-kill), so that an engine node costs nothing.
    Then controllers have to ask for the next start if the batch node is lost, so the nodes need `scontrol`.
    no: Slurm itself requeues the job at each lost node. auto: yes, but no with a container."""

    interface: Annotated[str, LINE] = ""
    """Network interface that nodes talk over; empty: whichever has the route to the leader."""

    ip_version: Annotated[int, COUNT_OR_NONE] = 0
    """4 or 6, of the address on `interface`; 0: IPv4, and IPv6 where the interface has only that."""

    scratch_dir: Annotated[str, FILE] = ""
    """Node-local folder for sockets; empty: `launch.scratch_dir` of the run file."""

    shm_dir: Annotated[str, FILE] = ""
    """Node-local memory filesystem; empty: `launch.shm_dir` of the run file."""

    checkpoint_url_prefix: Annotated[str, LINE] = ""
    """Runs without `checkpoint.url` save to PREFIX/NAME, NAME being the run folder's; empty: to the run
    folder."""

    storage_options: dict[str, Free] = field(default_factory=dict)
    """Handed to fsspec for it: endpoint_url, profile ... Secrets belong in the driver's own files."""

    signal_lead_s: Annotated[int, COUNT_OR_NONE] = 120
    """Seconds before the time limit at which Slurm warns; a checkpoint must fit in."""

    layout: Literal["auto", "het", "flat"] = "auto"
    """het: a heterogeneous job, a component each for trainer and engines; flat: a plain job whose nodes the
    launcher divides; auto: het when components differ and the site lets job steps reach them."""

    requeue: Literal["auto", "requeue", "chain"] = "auto"
    """How a stopped run goes on: requeue: under the same job id; chain: by a successor that waits for the end
    of this job (afterany); auto: requeue, and chain where Slurm refuses."""

    components: dict[str, ComponentSection] = field(default_factory=dict)
    """`trainer` and `engines`: what they ask for instead."""

    def __post_init__(self) -> None:
        _plain_words(self, ("account", "partition", "qos", "constraint", "gpu_type", "interface"))


def step_environment(site: SiteConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of all processes on the nodes: the site's own over those of the job."""
    return {**inherited, **{name: str(value) for name, value in site.env.items()}}


def keeps_job(site: SiteConfig) -> bool:
    """Whether the job outlives the loss of a node."""
    return site.no_kill == "yes" or (site.no_kill == "auto" and site.container.runtime == "none")


def load_site(path: Path) -> SiteConfig:
    """Read a site file.

    Raises:
        ConfigError: naming every wrong key, its line, the rule and what to write instead.
    """
    return load_as(SiteConfig, [path], [], site_rules)


def with_settings(site: SiteConfig, settings: list[str]) -> SiteConfig:
    """The same site with other values, ``key=value`` each, as `--set` has them.

    Raises:
        ConfigError: as `load_site`.
    """
    return load_over(site, settings, site_rules) if settings else site


def component(site: SiteConfig, name: str) -> ComponentSection:
    """What the component `name` asks for: its own words where it has any, else the site's."""
    own = site.components.get(name, ComponentSection())
    apart = ("nodelist", "sbatch_args")
    shared = [f.name for f in fields(own) if f.name not in apart and not getattr(own, f.name)]
    return replace(own, **{key: getattr(site, key) for key in shared})


def site_rules(site: SiteConfig) -> Iterator[Fault]:
    """What is wrong between keys."""
    for name in site.components:
        if name not in COMPONENTS:
            yield f"components.{name}", f"no such component; known: {', '.join(COMPONENTS)}."
        yield from option_faults(f"components.{name}.sbatch_args", site.components[name].sbatch_args)
    yield from option_faults("sbatch_args", site.sbatch_args)
    yield from env_faults(site.env)
    yield from _timing(site)
    yield from _asking(site)
    absolute = {"scratch_dir": site.scratch_dir, "shm_dir": site.shm_dir, "template": site.template}
    for key, folder in absolute.items():
        if folder and not folder.startswith("/"):
            yield key, f"'{folder}' is relative, and jobs start in other folders; write it from /."
    if site.checkpoint_url_prefix and not re.match(r"\w+://.|/", site.checkpoint_url_prefix):
        yield "checkpoint_url_prefix", "neither a URL (s3://bucket/prefix) nor a folder from /."
    for index, line in enumerate(site.setup):
        if line.lstrip().startswith("#SBATCH"):
            yield f"setup[{index}]", "Slurm reads #SBATCH only at the top; use the keys of this file."


def _timing(site: SiteConfig) -> Iterator[Fault]:
    if not 1 <= site.signal_lead_s <= 65535:
        yield "signal_lead_s", f"{site.signal_lead_s}; Slurm takes 1 to 65535."
    shortest_s = site.signal_lead_s + 2 * WARNING_SLACK_S
    if site.time_limit_min * 60 < shortest_s:
        yield (
            "time_limit_min",
            f"{site.time_limit_min} min leaves no time to work: Slurm warns signal_lead_s "
            f"{site.signal_lead_s} s before the end, up to {WARNING_SLACK_S} s early; write "
            f"{-(-shortest_s // 60)} or more.",
        )


def _asking(site: SiteConfig) -> Iterator[Fault]:
    if site.ip_version not in (0, 4, 6):
        yield "ip_version", f"{site.ip_version}; write 4, 6, or 0 for whichever the interface has."
    elif site.ip_version and not site.interface:
        yield (
            "ip_version",
            f"{site.ip_version} is of the address of an interface; name that as well: interface.",
        )
    types = {"gpu_type": site.gpu_type}
    types |= {f"components.{name}.gpu_type": part.gpu_type for name, part in site.components.items()}
    for key, wanted in types.items():
        if wanted and site.gpus_directive == "none":
            yield key, "gpus_directive: none asks for no GPUs, so no type; leave one of them out."
    partitions = {component(site, name).partition for name in COMPONENTS}
    if site.layout == "flat" and len(partitions) > 1:
        yield "layout", "a flat job lies in one partition, but the components name two; write het."


def _plain_words(section: object, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = getattr(section, key)
        rule(not _BLANK.search(value), f"{key}: '{value}' has a blank in it; Slurm would read two words.")
