"""Options of sbatch that a site file may hand on as they are, and those that yatt sets itself."""

import re
from collections.abc import Iterator, Mapping

from yatt.config.ranges import LINE

OWN_KEYS = {
    "account": "account", "partition": "partition", "qos": "qos", "constraint": "constraint",
    "time": "time_limit_min", "gpus-per-node": "gpus_directive and gpu_type", "gres": "gpus_directive",
    "cpus-per-task": "cpus_per_node", "mem": "mem_gb", "exclusive": "exclusive", "nodelist": "nodelist",
    "signal": "signal_lead_s", "requeue": "requeue", "no-requeue": "requeue",
}  # fmt: skip
"""What has a key of its own."""

FIXED = {
    "nodes": "the run file says how many nodes there are",
    "ntasks": "each node has one task",
    "ntasks-per-node": "each node has one task",
    "no-kill": "a lost node must not end the job",
    "kill-on-invalid-dep": "a successor that never starts would be lost in silence",
    "output": "yatt finds the job's log by its name",
    "error": "yatt finds the job's log by its name",
    "open-mode": "a requeued job goes on with its log",
    "comment": "it tells whose run the job is",
    "job-name": "it is the run folder's name",
    "array": "a run is one job; `yatt submit` several",
    "wrap": "the job's command is yatt's launcher",
    "parsable": "yatt reads what sbatch prints",
    "wait": "yatt submit does not wait",
    "test-only": "`yatt submit --dry-run` shows the job",
    "export": "the launcher needs its environment; `env` adds variables",
    "export-file": "the launcher needs its environment; `env` adds variables",
    "chdir": "relative names in the run file start where it was submitted",
    "overcommit": "each node has one task",
    "het-group": "the components are yatt's",
    "clusters": "the job is asked about on this cluster",
    "cluster-constraint": "the job is asked about on this cluster",
    "uid": "the job is yours",
    "gid": "the job is yours",
    "input": "the job's script reads nothing",
}
"""What is not to be changed, and why."""

LEADERS = ("dependency", "begin", "deadline", "mail-type", "mail-user", "nice", "hold", "priority")
"""Options of a job as a whole: given to its first component only."""

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("SLURM_", "SBATCH_", "SRUN_", "YATT_", "SUBMITIT_")
Value = str | int | float | bool


def option_faults(key: str, options: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """What is wrong with the options under `key`."""
    for name, value in options.items():
        if fault := _name_fault(name) or _value_fault(value):
            yield f"{key}.{name}", fault


def _name_fault(name: str) -> str:
    if name.startswith("-"):
        return f"write the name without dashes: {name.lstrip('-')}."
    if not _NAME.fullmatch(name):
        return "no long option of sbatch has this name."
    if name in OWN_KEYS:
        return f"that is {OWN_KEYS[name]} in this file."
    if name in FIXED:
        return f"not to be changed: {FIXED[name]}."
    meant = next((full for full in (*OWN_KEYS, *FIXED) if full.startswith(name)), "")
    return f"sbatch would read it as --{meant}; write names in full." if meant else ""


def _value_fault(value: Value) -> str:
    if value is False:
        return "false is no value; leave the option out."
    fault = LINE.fault(value) if isinstance(value, str) else ""
    return f"{fault}." if fault else ""


def env_faults(variables: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """What is wrong with variables for the steps."""
    for name, value in variables.items():
        where = f"env.{name}"
        if not _VARIABLE.fullmatch(name):
            yield where, "no variable can have this name."
        elif name.startswith(_OURS) or name == "CUDA_VISIBLE_DEVICES":
            yield where, "Slurm and yatt set it themselves."
        elif isinstance(value, bool):
            yield where, f"{str(value).lower()} is no text; write '1' or 'true', as the reader wants it."


def options_of(
    site: Mapping[str, Value], own: Mapping[str, Value], *, is_leader: bool
) -> dict[str, str | None]:
    """One component's options: its own words where it has any, else the site's; None for a flag. An empty
    text means that Slurm is not asked."""
    merged = {**site, **own}
    return {
        name: None if value is True else str(value)
        for name, value in merged.items()
        if value != "" and (is_leader or name not in LEADERS)
    }
