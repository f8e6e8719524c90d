"""What was found, what a run needs, and what a cluster says of itself."""

from dataclasses import dataclass
from typing import Literal

from yatt.adapters.slurm import Fields

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    about: str
    """What was looked at, in a word or two."""

    what: str
    cure: str = ""
    """What to change; empty when there is nothing to."""


def ok(about: str, what: str) -> Finding:
    """As it should be."""
    return Finding("ok", about, what)


def warn(about: str, what: str, cure: str) -> Finding:
    """A job can run, but know this."""
    return Finding("warn", about, what, cure)


def fail(about: str, what: str, cure: str) -> Finding:
    """A job would be refused, wait for ever or be lost."""
    return Finding("fail", about, what, cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run needs of one component; all components must be there at once."""

    component: str
    """`trainer` or `engines`; a flat job has only `trainer`."""

    nodes: int
    gpus_per_node: int
    """0 on clusters without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the cluster says of itself. None: nobody answered."""

    missing_commands: tuple[str, ...] = ()
    overriding: tuple[str, ...] = ()
    """Names of SBATCH_* variables in this environment; each outranks a line of the job's script."""

    config: Fields | None = None
    partitions: dict[str, Fields] | None = None
    nodes: dict[str, Fields] | None = None
    accounts: tuple[str, ...] | None = None
    """Accounts this user may charge; None also where there is no accounting database."""

    container_runtimes: tuple[str, ...] = ()
    """Of pyxis and apptainer, those that are here."""
