"""`yatt diagnose`: checks the cluster on which it runs and prints what a run has to expect there.

This module collects the facts and prints the findings; the other modules of the package decide.
"""

import getpass
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.slurm.slurm import Fields, Slurm, keeps_accounts
from yatt.config.check import node_gpus, num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import COMPONENTS, SiteConfig
from yatt.errors import DeadlineExceeded, Finding
from yatt.launch.checks.planned_memory import held_in_shm
from yatt.launch.diagnose.check_fs import measure_folder
from yatt.launch.diagnose.folders import (
    Folder,
    local_folder_findings,
    mount_of,
    run_folder_findings,
    shm_findings,
)
from yatt.launch.diagnose.nodes import node_findings
from yatt.launch.diagnose.partitions import partition_findings
from yatt.launch.diagnose.records import Demand, Snapshot, UserLimits, fail, ok, warn
from yatt.launch.diagnose.settings import settings_findings
from yatt.launch.diagnose.trial import try_nodes
from yatt.launch.diagnose.trial_findings import trial_findings
from yatt.launch.diagnose.user_limits import ask_limits, limit_findings
from yatt.launch.diagnose.variables import variable_findings
from yatt.launch.diagnose.versions import findings_here

COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "srun")
EXIT_FAIL = 2


def diagnose(site: SiteConfig, config: RunConfig | None, *, as_json: bool, try_num: int = 0) -> int:
    """Prints every finding; returns exit code 2 if a job would fail.

    Args:
        config: a run whose requirements and folders are checked too; None: only the cluster, this folder.
        try_num: number of nodes for a short test job; 0: no job.
    """
    snapshot = take_snapshot(Slurm())
    demands = demands_of(config) if config else ()
    found = findings_about(snapshot, site, demands)
    held = held_in_shm(config) if config else 0
    found += folder_findings(site, config, nodes=snapshot.nodes, held=held)
    found += findings_here(site)
    found += variable_findings(site, config, os.environ) if config else ()
    if try_num:
        gpus = demands[0].gpus_per_node if demands else 0
        demand = Demand(component="trainer", nodes=try_num, gpus_per_node=gpus, shm_bytes=held)
        folder = _nearest(_run_dir(config))
        trial = try_nodes(site, demand, folder, _local(site, config))
        found += trial_findings(trial, site, demand)
    sys.stdout.write(_json(found) if as_json else _lines(found))
    return EXIT_FAIL if any(finding.level == "fail" for finding in found) else 0


def findings_about(snapshot: Snapshot, site: SiteConfig, demands: tuple[Demand, ...]) -> list[Finding]:
    """Returns the findings about the cluster's settings, partitions and nodes for a job of these demands."""
    found = [_commands(snapshot)]
    config, partitions = snapshot.config, snapshot.partitions
    if config is None and snapshot.missing_commands:
        return found  # without commands nothing else can be queried
    if config is None or partitions is None:
        cure = "Run this on a machine of the cluster, check SLURM_CONF, or try again later."
        if clusters := os.environ.get("SLURM_CLUSTERS"):
            cure = f"Unset SLURM_CLUSTERS ('{clusters}'): a run is submitted to the cluster of its machine."
        return [*found, fail("slurm", "the controller does not answer.", cure)]
    components = [demand.component for demand in demands] or list(COMPONENTS)
    found += settings_findings(snapshot, config, site)
    found += partition_findings(config, partitions, site, components)
    found += limit_findings(snapshot.limits, config, site, demands)
    if snapshot.nodes is None:
        found.append(warn("nodes", "Slurm does not list its nodes.", "Try again later."))
    else:
        found += node_findings(snapshot.nodes, partitions, site, demands)
    return found


def demands_of(config: RunConfig) -> tuple[Demand, ...]:
    """Returns a run's requirements per component; there is one component if every node trains."""
    trainers, gpus = num_trainer_nodes(config), node_gpus(config)
    if config.launch.device == "cpu":
        gpus = (0,) * len(gpus)
    nodes = {"trainer": gpus[:trainers], "engines": gpus[trainers:]}
    return tuple(
        Demand(component=name, nodes=len(each), gpus_per_node=max(each))
        for name, each in nodes.items()
        if each
    )


def take_snapshot(slurm: Slurm) -> Snapshot:
    """Reads the state of the cluster and of this environment."""
    missing = tuple(name for name in COMMANDS if shutil.which(name) is None)
    config = slurm.show_config()
    return Snapshot(
        missing_commands=missing,
        overriding=tuple(sorted(name for name in os.environ if name.startswith("SBATCH_"))),
        config=config,
        partitions=slurm.show_partitions() if config else None,
        nodes=slurm.show_nodes() if config else None,
        limits=ask_limits(slurm, getpass.getuser()) if keeps_accounts(config or {}) else UserLimits(),
        container_runtimes=tuple(_container_runtimes(slurm)),
    )


def folder_findings(
    site: SiteConfig, config: RunConfig | None, *, nodes: dict[str, Fields] | None, held: int = 0
) -> Iterator[Finding]:
    """Findings about the run folder, tested by several processes, and about the node-local folders.

    Args:
        held: bytes that a node of the run holds in its memory filesystem; 0: not known.
    """
    hosts = {node.get("NodeHostName") for node in (nodes or {}).values()}
    is_one_machine = hosts == {socket.gethostname().split(".")[0]}
    yield from run_folder_findings(
        _look("run.dir", _run_dir(config), try_it=True), is_one_machine=is_one_machine
    )
    scratch_dir, shm_dir = _local(site, config)
    yield from local_folder_findings(_look("scratch_dir", Path(scratch_dir)))
    yield from local_folder_findings(memory := _look("shm_dir", Path(shm_dir)))
    yield from shm_findings(memory, held, is_one_machine=is_one_machine)
    if site.interface:
        yield _interface(site.interface)


def _run_dir(config: RunConfig | None) -> Path:
    return Path(config.run.dir if config else ".").absolute()


def _local(site: SiteConfig, config: RunConfig | None) -> tuple[str, str]:
    """Returns the scratch and the shared-memory folder: the site's, else the run's, else the defaults."""
    run = (config.launch.scratch_dir, config.launch.shm_dir) if config else ("/tmp", "/dev/shm")
    return site.scratch_dir or run[0], site.shm_dir or run[1]


def _nearest(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _look(key: str, path: Path, *, try_it: bool = False) -> Folder:
    """Checks a folder. The run folder may not exist yet: then its nearest existing parent is checked."""
    there = _nearest(path)
    if not try_it and there != path:
        return Folder(key=key, path=str(path), filesystem="unknown", problem="it does not exist")
    kind = mount_of(str(there.resolve()), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
        report = measure_folder(there) if try_it else None
    except (OSError, DeadlineExceeded) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Folder(key=key, path=str(path), filesystem=kind, problem=problem)
    usage = shutil.disk_usage(there)
    return Folder(
        key=key, path=str(path), filesystem=kind, free_bytes=usage.free, size_bytes=usage.total, report=report
    )


def _interface(name: str) -> Finding:
    here = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    if name in here:
        return ok("interface", f"{name} exists on this machine.")
    cure = f"If the nodes lack it too, set `interface` to one of {', '.join(here)}, or leave it empty."
    return warn("interface", f"there is no network interface {name} on this machine.", cure)


def _container_runtimes(slurm: Slurm) -> Iterator[str]:
    if "--container-image" in (slurm.ask("srun", "--help") or ""):
        yield "pyxis"
    if shutil.which("apptainer"):
        yield "apptainer"


def _commands(snapshot: Snapshot) -> Finding:
    if not snapshot.missing_commands:
        return ok("commands", "Slurm's commands are on the PATH.")
    what = f"not on the PATH: {', '.join(snapshot.missing_commands)}."
    return fail("commands", what, "Load the cluster's Slurm module, or use a login node.")


def _json(found: list[Finding]) -> str:
    worst = next((level for level in ("fail", "warn") if any(f.level == level for f in found)), "ok")
    listed = [{"level": f.level, "key": f.key, "says": f.says, "cure": f.cure} for f in found]
    return json.dumps({"worst": worst, "findings": listed}) + "\n"


def _lines(found: list[Finding]) -> str:
    lines = []
    for finding in found:
        lines.append(f"{finding.level:<5}{finding.key}: {finding.says}")
        if finding.cure:
            lines.append(f"     -> {finding.cure}")
    counts = ", ".join(f"{sum(f.level == level for f in found)} {level}" for level in ("ok", "warn", "fail"))
    return "\n".join([*lines, counts]) + "\n"
