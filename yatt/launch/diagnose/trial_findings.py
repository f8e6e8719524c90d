"""Findings from the test job on real nodes."""

from collections.abc import Iterator

from yatt.config.site import SiteConfig, site_component
from yatt.errors import Finding
from yatt.forecast.memory.fit import shm_fault
from yatt.launch.diagnose.check_fs import LATE_S, lateness_s, missing_guarantees
from yatt.launch.diagnose.probe import NodeFacts
from yatt.launch.diagnose.records import Demand, fail, ok, warn
from yatt.launch.diagnose.trial import Trial
from yatt.launch.diagnose.versions import version_findings


def trial_findings(trial: Trial, site: SiteConfig, demand: Demand) -> Iterator[Finding]:
    """Checks whether the job ran, what each node lacks, and how the shared folder behaved."""
    if trial.problem:
        cure = "If the nodes are busy, try again; else correct the requests in the site file."
        yield fail("trial", f"no job ran on {demand.nodes} nodes: {trial.problem}", cure)
    if not trial.facts:
        return
    before = [
        finding
        for facts in trial.facts
        for finding in (*_of_node(facts, site, demand), *_of_memory(facts, demand))
    ]
    yield from before
    if len(trial.facts) < demand.nodes:
        what = f"{demand.nodes - len(trial.facts)} of {demand.nodes} nodes wrote no report to the folder."
        yield fail("trial", what, "Use a folder that is the same on every node.")
    elif not any(finding.level == "fail" for finding in before):
        names = ", ".join(facts.node for facts in trial.facts)
        yield ok("trial", f"{names}: {trial.facts[0].gpus} GPUs each; all nodes reach each other.")
    yield from _versions(trial)
    if trial.report is not None:
        broken = "; ".join(missing_guarantees(trial.report))
        late_s = lateness_s(trial.report)
        seen = f"exclusive creates and renames work, seen within {late_s * 1e3:.0f} ms between nodes."
        if broken:
            yield fail("trial", f"{broken}.", "Use another filesystem for run.dir.")
        elif late_s > LATE_S:
            yield warn("trial", seen, "Starts will be slow.")
        else:
            yield ok("trial", seen)


def _versions(trial: Trial) -> Iterator[Finding]:
    """Findings about the nodes' libraries and drivers, once for all nodes that have the same."""
    known = [facts.versions for facts in trial.facts if facts.versions is not None]
    different = [seen for index, seen in enumerate(known) if seen not in known[:index]]
    for seen in different:
        names = ", ".join(facts.node for facts in trial.facts if facts.versions == seen)
        yield from version_findings(f"versions on {names}", seen)
    if len(different) > 1:
        cure = "Install the same on all nodes, or exclude some (sbatch_args: exclude)."
        yield warn("versions", "the nodes have different versions, which may give different results.", cure)


def _of_memory(facts: NodeFacts, demand: Demand) -> Iterator[Finding]:
    if demand.shm_bytes > facts.shm_bytes > 0:
        what, cure = shm_fault("a node of the run", demand.shm_bytes, facts.shm_bytes)
        yield fail(facts.node, f"shm_dir: {what}", cure)


def _of_node(facts: NodeFacts, site: SiteConfig, demand: Demand) -> Iterator[Finding]:
    about = facts.node
    if facts.problem:
        yield fail(about, facts.problem, "Correct `interface` in the site file.")
    elif facts.unfit:
        cure = "Repair it, or exclude it (sbatch_args: exclude); if the check is wrong, change node_check."
        yield (fail if site.node_check.enabled else warn)(about, f"the node is unfit: {facts.unfit}", cure)
    elif facts.unreached:
        what = f"cannot reach {', '.join(facts.unreached)} (ports that the kernel chose)."
        yield fail(
            about, what, "Write another `interface`; ask the administrators about a firewall between nodes."
        )
    if facts.stage:
        cure = "Write a folder on a local disk of each node, an archive that it can read, or remove `stage`."
        yield warn(about, f"{facts.stage}.", cure)
    if facts.gpus < demand.gpus_per_node:
        what = f"the task sees {facts.gpus} GPUs; {demand.gpus_per_node} were requested."
        yield fail(about, what, "Check gpus_directive and srun_args.")
    yield from _cpus(facts, site_component(site, demand.component).cpus_per_node, demand.gpus_per_node)
    if facts.missing_commands:
        what = f"{', '.join(facts.missing_commands)} not on the PATH; a run needs them on its nodes."
        yield fail(about, what, "Load the Slurm module in `setup`.")
    if 0 <= facts.locked_memory_bytes < 1 << 30 and demand.gpus_per_node:
        what = f"only {facts.locked_memory_bytes >> 10} KiB may be locked in memory; InfiniBand needs more."
        yield warn(
            about, what, "Write ulimit -l unlimited in setup. Administrators: PropagateResourceLimits."
        )


def _cpus(facts: NodeFacts, wanted: int, gpus: int) -> Iterator[Finding]:
    if facts.cpus < max(wanted, facts.granted):
        had = f"{wanted} were requested" if wanted else f"the job has {facts.granted}"
        yield warn(
            facts.node, f"the task may use {facts.cpus} CPUs, {had}.", "Write srun_args: --cpu-bind=none."
        )
    elif 0 < facts.granted < gpus:
        what = f"the job has {facts.granted} CPUs on the node for {gpus} GPUs; each GPU needs one or more."
        yield warn(facts.node, what, "Write cpus_per_node.")
