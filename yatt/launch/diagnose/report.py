"""`yatt diagnose`: looks at the cluster it stands on and says what a run will meet there.

The decisions are in the modules beside it; this one looks, and prints.
"""

import getpass
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from yatt.adapters.slurm import Fields, Slurm, keeps_accounts
from yatt.config.check import node_gpus, num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import COMPONENTS, SiteConfig
from yatt.errors import DeadlineExceeded
from yatt.launch.diagnose.check_fs import measure
from yatt.launch.diagnose.folders import Folder, local_folder_findings, mount_of, run_folder_findings
from yatt.launch.diagnose.nodes import node_findings
from yatt.launch.diagnose.partitions import partition_findings
from yatt.launch.diagnose.records import Demand, Finding, Snapshot, fail, ok, warn
from yatt.launch.diagnose.settings import settings_findings
from yatt.launch.diagnose.trial import try_nodes
from yatt.launch.diagnose.trial_findings import trial_findings

COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "srun")
EXIT_FAIL = 2


def diagnose(site: SiteConfig, config: RunConfig | None, *, as_json: bool, try_num: int = 0) -> int:
    """Print every finding; exit code 2 if a job would fail.

    Args:
        config: a run, whose demands and folders are looked at as well; None: the cluster, and this folder.
        try_num: run a short job on so many nodes; 0: ask only.
    """
    snapshot = take_snapshot(Slurm())
    demands = demands_of(config) if config else ()
    found = findings(snapshot, site, demands)
    found += folder_findings(site, config, nodes=snapshot.nodes)
    if try_num:
        gpus = demands[0].gpus_per_node if demands else 0
        demand = Demand(component="trainer", nodes=try_num, gpus_per_node=gpus)
        folder = _nearest(_run_dir(config))
        trial = try_nodes(site, demand, folder, _local(site, config))
        found += trial_findings(trial, site, demand)
    sys.stdout.write(_json(found) if as_json else _lines(found))
    return EXIT_FAIL if any(finding.level == "fail" for finding in found) else 0


def findings(snapshot: Snapshot, site: SiteConfig, demands: tuple[Demand, ...]) -> list[Finding]:
    """What the cluster's settings, partitions and nodes mean for a job of these demands."""
    found = [_commands(snapshot)]
    config, partitions = snapshot.config, snapshot.partitions
    if config is None and snapshot.missing_commands:
        return found  # nobody could ask
    if config is None or partitions is None:
        cure = "Is this a machine of the cluster (SLURM_CONF)? If so, try again later."
        return [*found, fail("slurm", "the controller does not answer.", cure)]
    components = [demand.component for demand in demands] or list(COMPONENTS)
    found += settings_findings(snapshot, config, site)
    found += partition_findings(config, partitions, site, components)
    if snapshot.nodes is None:
        found.append(warn("nodes", "Slurm does not say what nodes it has.", "Try again later."))
    else:
        found += node_findings(snapshot.nodes, partitions, site, demands)
    return found


def demands_of(config: RunConfig) -> tuple[Demand, ...]:
    """What a run needs of each component; where every node trains there is one."""
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
    """Ask the cluster, and this environment."""
    missing = tuple(name for name in COMMANDS if shutil.which(name) is None)
    config = slurm.show_config()
    return Snapshot(
        missing_commands=missing,
        overriding=tuple(sorted(name for name in os.environ if name.startswith("SBATCH_"))),
        config=config,
        partitions=slurm.show_partitions() if config else None,
        nodes=slurm.show_nodes() if config else None,
        accounts=_accounts(slurm, config or {}),
        container_runtimes=tuple(_container_runtimes(slurm)),
    )


def folder_findings(
    site: SiteConfig, config: RunConfig | None, *, nodes: dict[str, Fields] | None
) -> Iterator[Finding]:
    """The run folder, tried by several processes, and the node's own folders."""
    hosts = {node.get("NodeHostName") for node in (nodes or {}).values()}
    is_one_machine = hosts == {socket.gethostname().split(".")[0]}
    yield from run_folder_findings(
        _look("run.dir", _run_dir(config), try_it=True), is_one_machine=is_one_machine
    )
    scratch_dir, shm_dir = _local(site, config)
    yield from local_folder_findings(_look("scratch_dir", Path(scratch_dir)))
    yield from local_folder_findings(_look("shm_dir", Path(shm_dir)))
    if site.interface:
        yield _interface(site.interface)


def _run_dir(config: RunConfig | None) -> Path:
    return Path(config.run.dir if config else ".").absolute()


def _local(site: SiteConfig, config: RunConfig | None) -> tuple[str, str]:
    """Scratch and shared-memory folder: the site's, else the run's, else what a run has by default."""
    run = (config.launch.scratch_dir, config.launch.shm_dir) if config else ("/tmp", "/dev/shm")
    return site.scratch_dir or run[0], site.shm_dir or run[1]


def _nearest(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def _look(key: str, path: Path, *, try_it: bool = False) -> Folder:
    """A run folder need not exist yet: the nearest one above it that does is looked at."""
    there = _nearest(path)
    if not try_it and there != path:
        return Folder(key=key, path=str(path), filesystem="unknown", problem="it does not exist")
    kind = mount_of(str(there.resolve()), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
        report = measure(there) if try_it else None
    except (OSError, DeadlineExceeded) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Folder(key=key, path=str(path), filesystem=kind, problem=problem)
    free = shutil.disk_usage(there).free
    return Folder(key=key, path=str(path), filesystem=kind, free_bytes=free, report=report)


def _interface(name: str) -> Finding:
    here = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    if name in here:
        return ok("interface", f"{name} is here.")
    cure = f"If the nodes have none either: interface: one of {', '.join(here)} or empty."
    return warn("interface", f"there is no network interface {name} on this machine.", cure)


def _accounts(slurm: Slurm, config: Fields) -> tuple[str, ...] | None:
    if not keeps_accounts(config):
        return None
    user = f"user={getpass.getuser()}"
    text = slurm.ask("sacctmgr", "-nP", "show", "assoc", user, "format=Account")
    return None if text is None else tuple(sorted(set(text.split())))


def _container_runtimes(slurm: Slurm) -> Iterator[str]:
    if "--container-image" in (slurm.ask("srun", "--help") or ""):
        yield "pyxis"
    if shutil.which("apptainer"):
        yield "apptainer"


def _commands(snapshot: Snapshot) -> Finding:
    if not snapshot.missing_commands:
        return ok("commands", "Slurm's commands are here.")
    what = f"not on the PATH: {', '.join(snapshot.missing_commands)}."
    return fail("commands", what, "Load the cluster's Slurm module, or use a login node.")


def _json(found: list[Finding]) -> str:
    worst = next((level for level in ("fail", "warn") if any(f.level == level for f in found)), "ok")
    return json.dumps({"worst": worst, "findings": [asdict(finding) for finding in found]}) + "\n"


def _lines(found: list[Finding]) -> str:
    lines = []
    for finding in found:
        lines.append(f"{finding.level:<5}{finding.about}: {finding.what}")
        if finding.cure:
            lines.append(f"     -> {finding.cure}")
    counts = ", ".join(f"{sum(f.level == level for f in found)} {level}" for level in ("ok", "warn", "fail"))
    return "\n".join([*lines, counts]) + "\n"
