"""Submits a script to Slurm once, also if sbatch's answer is lost.

A controller that is overloaded queues a job and lets sbatch run into a timeout. So each request has a script
with a name of its own, by which the job is found again: it is looked for before anything is submitted twice.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from yatt.adapters.slurm.slurm import Fields, Reply, Slurm

SUBMIT_LIMIT_S = 60.0
"""Time limit of sbatch: a site's plugins may be slow."""

LOOK_PAUSE_S = 3.0
"""Pause between two looks. A job may be queued a moment after sbatch has given up."""

MOST_LOOKS = 6
TRIES = 3
_JOB_ID = re.compile(r"^(\d+)(?:;\S*)?$", re.MULTILINE)
_HET = re.compile(r"#SBATCH\s+(?:het|pack)job\b")
_VALUE = re.compile(r"(?!\(null\)|UNLIMITED|N/A)[^\s#'\"\\]+")
_OPTIONS = {
    "job-name": "JobName",
    "account": "Account",
    "partition": "Partition",
    "qos": "QOS",
    "time": "TimeLimit",
    "mem": "MinMemoryNode",
    "mem-per-cpu": "MinMemoryCPU",
    "comment": "Comment",
}


def submit_once(
    slurm: Slurm,
    script: Path,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    *,
    may_be_queued: bool = False,
) -> Reply:
    """Submits a script; returns the new job's id as the reply's output.

    Args:
        script: absolute; no other job has a script of this name.
        options: of sbatch. arguments: of the script.
        may_be_queued: whether an earlier call had no result: then the job is looked for first.

    Returns:
        A reply with code 0; or with sbatch's refusal; or one that `is_unreachable`, if the job may be queued
        or may not.
    """
    reply = Reply(None, "", "sbatch was not called: Slurm does not say whether the job is queued")
    for number in range(TRIES):
        if may_be_queued or number:
            found = find_job(slurm, script)
            if found is None:
                return reply
            if found:
                return Reply(0, found, "")
        argv = ("sbatch", "--parsable", *options, str(script), *arguments)
        reply = _read(slurm.call(*argv, limit_s=SUBMIT_LIMIT_S))
        if not reply.is_unreachable:
            return reply
    found = find_job(slurm, script)
    if found == "":
        return Reply(None, "", f"{reply.says}; Slurm lists no job of this script")
    return Reply(0, found, "") if found else reply


def _read(reply: Reply) -> Reply:
    """Returns sbatch's reply with the job's id as its output; a wrapper of the site may print more lines."""
    if reply.code != 0:
        return reply
    ids = _JOB_ID.findall(reply.out)
    return Reply(0, ids[-1], "") if ids else Reply(None, "", "sbatch's answer has no job id")


def find_job(slurm: Slurm, script: Path) -> str | None:
    """Returns the id of this user's job with this script; empty if there was none in two looks; None if Slurm
    did not answer two of `MOST_LOOKS`."""
    num_looks = 0
    for number in range(MOST_LOOKS):
        if number:
            time.sleep(LOOK_PAUSE_S)
        jobs = slurm.queue("--me", "--states=all")
        for job, (leader, *_) in (jobs or {}).items():
            if leader["Command"] == str(script) or leader["Command"].startswith(f"{script} "):
                return job
        num_looks += jobs is not None
        if num_looks == 2:
            return ""
    return None


def successor_script(text: str, components: Sequence[Fields], env: Mapping[str, str]) -> str:
    """Returns the script of a job with the options that the job has now, as #SBATCH lines.

    A person may have written them on sbatch's command line, which is not in the script.

    Args:
        components: of the job, as `scontrol show job` shows them.
        env: of the job's launcher. It has the numbers of nodes as allocated; Slurm shows those that are left.

    Raises:
        ValueError: the job's components are not those of the script.
    """
    options = [options_of_job(shown) for shown in components]
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _HET.match(line)]
    marks = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    last = marks[-1] + 1 if marks else 1
    if len(starts) + 1 != len(components):
        raise ValueError(
            f"the job has {len(components)} components and its script {len(starts) + 1}: write "
            "`#SBATCH hetjob` and each component's options in the script, not on sbatch's command line"
        )
    ends = [*starts, last]
    for number in reversed(range(len(ends))):
        found = options[number]
        begin = ends[number - 1] if number else 0
        if any(line.startswith("#SBATCH") and "--mem-per-" in line for line in lines[begin : ends[number]]):
            found = {key: value for key, value in found.items() if not key.startswith("mem")}
        nodes = env.get("SLURM_JOB_NUM_NODES" + (f"_HET_GROUP_{number}" if starts else ""), "")
        if nodes.isdigit():
            found["nodes"] = nodes
        lines[ends[number] : ends[number]] = [f"#SBATCH --{key}={value}" for key, value in found.items()]
    return "\n".join([*lines, ""])


def options_of_job(shown: Fields) -> dict[str, str]:
    """Returns sbatch's options of one component of a job: name, account, partition, QOS, time, memory."""
    found = {option: shown.get(field, "") for option, field in _OPTIONS.items()}
    if "MemPerTres" in shown:  # memory is counted by GPU
        found = {option: value for option, value in found.items() if not option.startswith("mem")}
    return {option: value for option, value in found.items() if _VALUE.fullmatch(value)}
