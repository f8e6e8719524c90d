"""Nodes that a job excludes: lost and unfit ones, in addition to those that others have excluded.

Additions to a job's list of excluded nodes are first recorded in the run folder. So the next start can remove
them, and nothing that came from a site file, a command line or an administrator.
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from yatt.adapters.files.files import read_or_none, sealed_record, unsealed_any, write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.adapters.run_folder.ledger import STARTED, record_of_attempt, started_attempts
from yatt.adapters.slurm.slurm import Fields, Slurm, expand_node_list, is_up, node_gpus_by_type
from yatt.errors import words_of
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
_GPUS = re.compile(r"gres[:/]gpu(?::([^:,]*[^:,\d][^:,]*))?:(\d+)")
"""Newer versions write gres/gpu:a100:8, older ones gres:gpu:a100:8; the type may be missing."""

_ASKED_NODES = re.compile(r"(?:^|,)node=(\d+)")

UNFIT_FOR = 32
"""Number of attempts for which an unfit node is excluded; after that it may have been repaired."""

TRIES, PAUSE_S = 10, 0.5


@dataclass(frozen=True, slots=True)
class KeptOff:
    """The excluded nodes of one run's jobs."""

    paths: RunPaths
    slurm: Slurm

    def renew(self, job_id: str, gone: list[str], attempt: int) -> None:
        """Excludes `gone` and unfit nodes from the next start, as far as the job can do without them. If the
        list cannot be changed, the job may get such a node again, which costs it one start."""
        try:
            unfit = with_retries(partial(lately_unfit, self.paths))
            exclude = list(dict.fromkeys([*filter(None, gone), *unfit]))
            noted = unsealed_any(with_retries(partial(read_or_none, self.paths.kept_off))) or {}
            added = noted.get("nodes", []) if noted.get("job") == job_id else []
            if exclude or any(added):
                self._renew(job_id, exclude, added, attempt)
        except Exception as error:  # noqa: BLE001 (the start is requested already and must not fail)
            _LOG.warning("the nodes to exclude from job %s are not known: %s", job_id, words_of(error))

    def _renew(self, job_id: str, exclude: list[str], added: list[list[str]], attempt: int) -> None:
        parts, nodes = self.slurm.show_job(job_id), self.slurm.show_nodes()
        if not parts or nodes is None:
            _LOG.warning("Slurm does not answer: the excluded nodes of job %s stay unchanged", job_id)
            return
        mine = [{*names} for names in (*added, *[[]] * len(parts))][: len(parts)]
        before = [expand_node_list(value_of(part, "ExcNodeList")) for part in parts]
        others = [
            [name for name in names if name not in own] for names, own in zip(before, mine, strict=True)
        ]
        within, lost = [self._within(part, nodes) for part in parts], self._num_lost(parts, attempt)
        adding = affordable_exclusions(exclude, parts, within, others, lost)
        # Record old and new additions first, so that the next start knows all of ours.
        self._note(job_id, [[*own, *new] for own, new in zip(mine, adding, strict=True)], attempt)
        lists = [[*theirs, *new] for theirs, new in zip(others, adding, strict=True)]
        changed = [
            self._change(f"{job_id}+{offset}" if len(parts) > 1 else job_id, names)
            for offset, names in enumerate(lists)
            if {*before[offset]} != {*names}
        ]
        if all(changed):
            self._note(job_id, adding, attempt)

    def _num_lost(self, parts: list[Fields], attempt: int) -> int:
        """Returns the number of nodes that the job had when this attempt began and that Slurm no longer
        counts. With ``--no-kill`` a dead node leaves the job. While the job is completing, all of its fields
        show only what was left; yet its next start needs as many nodes as were requested."""
        hosts = with_retries(partial(record_of_attempt, self.paths, attempt, STARTED)).get("hosts", {})
        return max(0, sum(len(names) for names in hosts.values()) - sum(map(_num_nodes, parts)))

    def _note(self, job_id: str, nodes: list[list[str]], attempt: int) -> None:
        with_retries(
            partial(
                write_atomically, self.paths.kept_off, sealed_record({"job": job_id, "nodes": nodes}, attempt)
            )
        )

    def _within(self, part: Fields, nodes: Mapping[str, Fields]) -> Mapping[str, Fields]:
        """Returns the nodes of the component's reservation; all nodes if it has none."""
        if not (reservation := value_of(part, "Reservation")):
            return nodes
        names = self.slurm.reserved(reservation)
        return {name: node for name, node in nodes.items() if name in names}

    def _change(self, whose: str, names: list[str]) -> bool:
        for _ in range(TRIES):
            reply = self.slurm.exclude(whose, names)
            if reply.code == 0:
                return True
            _LOG.warning("job %s does not exclude %s yet: %s", whose, names, reply.says)
            time.sleep(PAUSE_S)
        return False


def lately_unfit(paths: RunPaths) -> list[str]:
    """Returns Slurm's names of nodes that recent attempts found unfit although Slurm considers them good,
    newest first.

    Raises:
        OSError: the ledger cannot be read.
    """
    return [
        str(entry["slurm_node"])
        for attempt in reversed(started_attempts(paths)[-UNFIT_FOR:])
        for index in attempt.ended.get("unfit", ())
        if (entry := unsealed_any(read_or_none(paths.controller_record(attempt.number, int(index)))))
    ]


def affordable_exclusions(
    exclude: list[str],
    parts: list[Fields],
    nodes: list[Mapping[str, Fields]],
    others: list[list[str]],
    num_lost: int = 0,
) -> list[list[str]]:
    """Returns per component as many of the nodes `exclude`, in order, as it can do without: a job that
    excludes too many nodes waits forever, and no launcher runs that could correct it. Nodes that are down are
    left to Slurm.

    Args:
        nodes: per component, the nodes that it may get.
        others: per component, the nodes that are excluded already.
        num_lost: nodes that the components need beyond the counts in `parts`, of whichever of them.
    """
    there = [
        {name for name, node in mine.items() if could_serve(node, part)} - {*off}
        for part, mine, off in zip(parts, nodes, others, strict=True)
    ]
    result = []
    for part, mine in zip(parts, there, strict=True):
        wanted = num_lost + sum(
            _num_nodes(each) for each, its in zip(parts, there, strict=True) if its & mine
        )
        features = value_of(part, "Features")
        is_judged = not value_of(part, "ReqNodeList") and re.fullmatch(r"[\w.-]*", features)
        spare = max(0, len(mine) - wanted) if is_judged else 0
        result.append([name for name in dict.fromkeys(exclude) if name in mine][:spare])
    return result


def could_serve(node: Fields, part: Fields) -> bool:
    """Whether Slurm might give the node to a component, by what both show; in doubt not."""
    features, state = value_of(part, "Features"), node.get("State", "")
    return (
        is_up(node)
        and (bool(value_of(part, "Reservation")) or not {"RESERVED", "MAINT"} & {*state.split("+")})
        and bool({*part.get("Partition", "").split(",")} & {*node.get("Partitions", "").split(",")})
        and (not features or features in node.get("ActiveFeatures", "").split(","))
        and _has_gpus(node, value_of(part, "TresPerNode"))
        and int(node.get("CPUTot", "0")) >= _cpus(part)
        and int(node.get("RealMemory", "0")) >= slurm_mebibytes(value_of(part, "MinMemoryNode"))
        and int(node.get("RealMemory", "0")) >= _cpus(part) * slurm_mebibytes(value_of(part, "MinMemoryCPU"))
    )


def _cpus(part: Fields) -> int:
    return int(value_of(part, "MinCPUsNode") or "1")


def _has_gpus(node: Fields, asked: str) -> bool:
    """Whether the node has enough GPUs of the requested type, or of all types together."""
    had, wanted = node_gpus_by_type(node), _GPUS.search(asked)
    if wanted is None:
        return "gpu" not in asked
    kind = wanted[1] or ""
    return (had.get(kind, 0) if kind else sum(had.values())) >= int(wanted[2])


def slurm_mebibytes(text: str) -> int:
    """Returns the MiB of a Slurm memory size: 1500G, 32000M, 0; without a unit in MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    return int(float(found[1]) * _MEBIBYTES[found[2]]) if found else 0


_MEBIBYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


def value_of(part: Fields, key: str) -> str:
    """Returns a field, empty if Slurm shows (null) or None."""
    return "" if (value := part.get(key, "")) in ("(null)", "None") else value


def _num_nodes(part: Fields) -> int:
    """Returns the node count of one component. While a job is completing, NumNodes counts only busy nodes."""
    asked = _ASKED_NODES.search(part.get("ReqTRES", part.get("TRES", "")))
    return max(int(part.get("NumNodes", "1").partition("-")[0]), int(asked[1]) if asked else 0)
