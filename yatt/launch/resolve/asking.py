"""The site file's requests to Slurm, as options of srun and sbatch. Pure."""

from yatt.config.sections.sbatch import sbatch_options
from yatt.config.site import SiteConfig, site_component

Options = dict[str, str | None]
"""Option names without dashes; None for options that take no value."""


def component_options(site: SiteConfig, name: str, *, nodes: int, gpus_per_node: int) -> Options:
    """Returns the options that place component `name`: partition, nodes, GPUs, CPUs, memory."""
    asked = site_component(site, name)
    gpus = f"{asked.gpu_type}:{gpus_per_node}" if asked.gpu_type else f"{gpus_per_node}"
    options: Options = {
        "account": site.account,
        "partition": asked.partition,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "nodelist": asked.nodelist,
        "nodes": f"{nodes}",
        "ntasks-per-node": "1",
        "gpus-per-node": gpus if gpus_per_node and site.gpus_directive == "gpus_per_node" else "",
        "gres": f"gpu:{gpus}" if gpus_per_node and site.gpus_directive == "gres" else "",
        "cpus-per-task": f"{asked.cpus_per_node}" if asked.cpus_per_node else "",
        "mem": _memory(site, asked.mem_gb),
    }
    if site.exclusive:
        options["exclusive"] = None
    return {key: value for key, value in options.items() if value != ""}


def more_options(site: SiteConfig, name: str, *, is_leader: bool) -> Options:
    """Returns the `sbatch_args` of component `name`, which are passed to sbatch unchanged.

    Args:
        is_leader: whether it is the job's first component, which carries the options of the whole job.
    """
    own = site.components[name].sbatch_args if name in site.components else {}
    return sbatch_options(site.sbatch_args, own, is_leader=is_leader)


def as_arguments(options: Options) -> list[str]:
    """Returns the options as command-line arguments."""
    return [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]


def _memory(site: SiteConfig, mem_gb: int) -> str:
    if mem_gb:
        return f"{mem_gb}G"
    every = [site.sbatch_args, *(component.sbatch_args for component in site.components.values())]
    has_own = any(name in each for each in every for name in ("mem-per-cpu", "mem-per-gpu"))
    return "0" if site.exclusive and not has_own else ""  # Slurm refuses both


HOLD_SIGNALS = "trap '' TERM USR2"
"""First line of the batch script. Before the launcher handles these signals, they would end the job. Slurm
calls a job FAILED that ends by itself in the grace time of a preemption, and does not queue it again."""


def setup_lines(site: SiteConfig) -> list[str]:
    """Returns the site's `setup` lines; a line that fails ends the job and is named in its log."""
    if not site.setup:
        return []
    said = 'echo "yatt: a setup line of the site file failed: $BASH_COMMAND" >&2'
    return [f"trap '{said}; exit 1' ERR", *site.setup, "trap - ERR"]
