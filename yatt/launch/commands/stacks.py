"""Stacks of a run's processes: on this machine, and by `srun --overlap` on the other nodes of its job."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from yatt.adapters.files.files import read_or_none, unsealed_any
from yatt.adapters.processes.stack_dump import StackDump, stacks_here
from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.adapters.slurm.slurm import Slurm, environment_outside_jobs
from yatt.config.load import load_attempt
from yatt.launch.commands.attach import srun_into
from yatt.launch.folder.jobs import job_view
from yatt.paths import RunPaths

HERE_S = 5.0
NODE_S = 60.0
"""Longest wait for a node: srun's start takes seconds on a large cluster."""

AT_ONCE = 16


@dataclass(slots=True)
class Stacks:
    """Stacks, each process once; nodes that could not be asked, and why."""

    dumps: list[StackDump] = field(default_factory=list)
    not_asked: dict[str, str] = field(default_factory=dict)


def stacks_of(paths: RunPaths, *, only_here: bool) -> Stacks:
    """Returns the stacks of the run's processes.

    Args:
        only_here: ask no other machine.
    """
    found = Stacks(stacks_here(paths.root, HERE_S))
    if only_here:
        return found
    job = job_view(paths, Slurm())
    if job.state != "RUNNING":
        return found
    nodes = slurm_nodes(paths)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(partial(of_node, paths, job.job_id), nodes.values()))
    for name, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, str):
            found.not_asked[name] = answer
        else:
            found.dumps += answer
    found.dumps = _each_once(found.dumps)
    return found


def slurm_nodes(paths: RunPaths) -> dict[str, int]:
    """Maps the Slurm nodes of the newest attempt to the index of one of their nodes in the run."""
    attempt = newest_attempt(paths)
    found: dict[str, int] = {}
    for index in range(load_attempt(paths, attempt).launch.nodes):
        entry = unsealed_any(read_or_none(paths.controller_record(attempt, index))) or {}
        if name := entry.get("slurm_node"):
            found.setdefault(str(name), index)
    return found


def of_node(paths: RunPaths, job_id: str, node: int) -> list[StackDump] | str:
    """Returns the stacks of a node's processes, or the reason why there are none."""
    try:
        srun = srun_into(paths, job_id, node, is_a_tty=False)
        argv = [*srun, sys.executable, "-m", "yatt.cli.main", "stack", str(paths.root), "--here", "--json"]
        done = subprocess.run(
            argv,
            env=environment_outside_jobs(os.environ),
            capture_output=True,
            timeout=NODE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return msgspec.convert(json.loads(done.stdout)["processes"], list[StackDump])
    except subprocess.TimeoutExpired:
        return f"srun did not answer in {NODE_S:g} s"
    except OSError as error:
        return f"srun: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return last[0] if last else f"srun ended with exit code {done.returncode}"


def _each_once(dumps: Iterable[StackDump]) -> list[StackDump]:
    """Returns each process once; of several answers the one with stacks."""
    found: dict[str, StackDump] = {}
    for dump in dumps:
        if dump.identity not in found or (dump.text and not found[dump.identity].text):
            found[dump.identity] = dump
    return sorted(found.values(), key=lambda dump: (dump.name, dump.host, dump.pid))
