"""Options of sbatch that a site file may pass on, and options that yatt sets itself."""

import re
from collections.abc import Iterator, Mapping

from yatt.config.sections.ranges import LINE
from yatt.credentials import has_secret, is_secret_name
from yatt.errors import Finding, mistake_in

OWN_KEYS = {
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "constraint": "constraint",
    "time": "time_limit_min",
    "gpus-per-node": "gpus_directive and gpu_type",
    "gres": "gpus_directive",
    "cpus-per-task": "cpus_per_node",
    "mem": "mem_gb",
    "exclusive": "exclusive",
    "nodelist": "nodelist",
    "signal": "signal_lead_s",
    "requeue": "requeue",
    "no-requeue": "requeue",
}
"""Options that have their own key in the site file."""

FIXED = {
    "nodes": "the run file sets the number of nodes",
    "ntasks": "each node has one task",
    "ntasks-per-node": "each node has one task",
    "no-kill": "a lost node must not end the job",
    "kill-on-invalid-dep": "a dependent job that cannot start would vanish without a message",
    "output": "yatt finds the job's log by its name",
    "error": "yatt finds the job's log by its name",
    "open-mode": "a requeued job appends to its log",
    "comment": "yatt writes the run folder into it",
    "job-name": "yatt uses the run folder's name",
    "array": "a run is one job; use `yatt submit --sweep` for several runs",
    "wrap": "the job's command is yatt's launcher",
    "parsable": "yatt reads what sbatch prints",
    "wait": "yatt submit does not wait",
    "test-only": "`yatt submit --dry-run` shows the job",
    "export": "the launcher needs its environment; `env` adds variables",
    "export-file": "the launcher needs its environment; `env` adds variables",
    "chdir": "relative paths in the run file start in the folder of `yatt submit`",
    "overcommit": "each node has one task",
    "het-group": "yatt sets the components",
    "clusters": "yatt queries the job on this cluster only",
    "cluster-constraint": "yatt queries the job on this cluster only",
    "uid": "the job runs as you",
    "gid": "the job runs as you",
    "input": "the job's script reads no input",
}
"""Options that cannot be changed, and the reason."""

LEADERS = ("dependency", "begin", "deadline", "mail-type", "mail-user", "nice", "hold", "priority")
"""Options of the whole job: given only to its first component."""

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("SLURM_", "SBATCH_", "SRUN_", "YATT_", "SUBMITIT_")
Value = str | int | float | bool


def option_faults(key: str, options: Mapping[str, Value]) -> Iterator[Finding]:
    """Yields every mistake in the options under `key`."""
    for name, value in options.items():
        if fault := _name_fault(name) or _value_fault(value):
            yield mistake_in(f"{key}.{name}", fault)


def _name_fault(name: str) -> str:
    if name.startswith("-"):
        return f"write the name without dashes: {name.lstrip('-')}."
    if not _NAME.fullmatch(name):
        return "this is not a long option of sbatch; write a name from `sbatch --help`."
    if name in OWN_KEYS:
        return f"use the key {OWN_KEYS[name]} of this file instead."
    if name in FIXED:
        return f"cannot be changed: {FIXED[name]}."
    meant = next((full for full in (*OWN_KEYS, *FIXED) if full.startswith(name)), "")
    return f"sbatch would read it as --{meant}; write the full name." if meant else ""


def _value_fault(value: Value) -> str:
    if value is False:
        return "false is not a value; remove the option."
    fault = LINE.fault(value) if isinstance(value, str) else ""
    return f"{fault}." if fault else ""


def env_faults(variables: Mapping[str, Value]) -> Iterator[Finding]:
    """Yields every mistake in the environment variables of the steps."""
    for name, value in variables.items():
        where = f"env.{name}"
        if not _VARIABLE.fullmatch(name):
            yield mistake_in(where, "this is not a valid variable name; use letters, digits and '_'.")
        elif name.startswith(_OURS) or name == "CUDA_VISIBLE_DEVICES":
            yield mistake_in(where, "Slurm or yatt sets this variable; remove it.")
        elif is_secret_name(name) or has_secret(str(value)):
            yield mistake_in(
                where, "is a credential, and this file is saved in each run folder; set it in your shell."
            )
        elif isinstance(value, bool):
            yield mistake_in(
                where, f"{str(value).lower()} is not text; write '1' or 'true', as the program expects."
            )


def sbatch_options(
    site: Mapping[str, Value], own: Mapping[str, Value], *, is_leader: bool
) -> dict[str, str | None]:
    """Returns one component's options: its own over the site's; None for a flag. An empty text removes the
    option."""
    merged = {**site, **own}
    return {
        name: None if value is True else str(value)
        for name, value in merged.items()
        if value != "" and (is_leader or name not in LEADERS)
    }
