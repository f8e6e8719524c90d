"""Data types of `yatt diagnose`: findings, a run's requirements, and the state of the cluster."""

from dataclasses import dataclass

from yatt.adapters.slurm.slurm import Fields
from yatt.errors import Finding


def ok(about: str, what: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(level="ok", key=about, says=what)


def warn(about: str, what: str, cure: str) -> Finding:
    """Returns a finding that does not stop a job."""
    return Finding(level="warn", key=about, says=what, cure=cure)


def fail(about: str, what: str, cure: str) -> Finding:
    """Returns a finding with which a job would be refused, wait forever or be lost."""
    return Finding(level="fail", key=about, says=what, cure=cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A run's requirements of one component; all components must be available at the same time."""

    component: str
    """`trainer` or `engines`; a flat job has only `trainer`."""

    nodes: int
    gpus_per_node: int
    """0 on clusters without GPUs."""

    shm_bytes: int = 0
    """What a node holds in its memory filesystem; 0: not known."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Rows of sacctmgr, by the names of its columns."""

    associations: tuple[Fields, ...] | None = None
    """Of this user; None: no answer."""

    qos: tuple[Fields, ...] = ()

    @property
    def accounts(self) -> tuple[str, ...] | None:
        """Accounts that this user may charge; None: no answer."""
        rows = self.associations
        return None if rows is None else tuple(sorted({row["Account"] for row in rows}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of the cluster. None: no answer."""

    missing_commands: tuple[str, ...] = ()
    overriding: tuple[str, ...] = ()
    """Names of SBATCH_* variables in this environment; each overrides a line of the job's script."""

    config: Fields | None = None
    partitions: dict[str, Fields] | None = None
    nodes: dict[str, Fields] | None = None
    limits: UserLimits = UserLimits()
    """Accounts and limits of this user; empty without an accounting database."""

    container_runtimes: tuple[str, ...] = ()
    """Available container runtimes, of pyxis and apptainer."""
