"""Which nodes a job is kept off: those that were lost or found unfit, beside what others have asked for.

What is added to a job's list of excluded nodes is noted in the run folder first. So the next start can take
away what the last one added, and nothing that came from a site file, a command line or an administrator.
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from yatt.adapters.files import publish, read_or_none, sealed, unsealed_any
from yatt.adapters.ledger import attempts
from yatt.adapters.patience import patiently
from yatt.adapters.slurm import Fields, Slurm, expand, gpus_of, is_up
from yatt.errors import words_of
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
_GPUS = re.compile(r"gres[:/]gpu(?::([^:,]*[^:,\d][^:,]*))?:(\d+)")
"""Newer versions write gres/gpu:a100:8, older ones gres:gpu:a100:8; the type may not be there."""

_ASKED_NODES = re.compile(r"(?:^|,)node=(\d+)")

UNFIT_FOR = 32
"""For so many attempts a job is kept off a node; then it may have been repaired."""

TRIES, PAUSE_S = 10, 0.5


@dataclass(frozen=True, slots=True)
class KeptOff:
    """The list of one run's jobs."""

    paths: RunPaths
    slurm: Slurm

    def renew(self, job_id: str, gone: list[str], attempt: int) -> None:
        """Before the next start: off `gone` and what was found unfit, as far as the job can do without. A job
        whose list cannot be changed may be given such a node again, which costs it a start."""
        try:
            unfit = patiently(partial(lately_unfit, self.paths))
            exclude = list(dict.fromkeys([*filter(None, gone), *unfit]))
            noted = unsealed_any(patiently(partial(read_or_none, self.paths.kept_off))) or {}
            added = noted.get("nodes", []) if noted.get("job") == job_id else []
            if exclude or any(added):
                self._renew(job_id, exclude, added, attempt)
        except Exception as error:  # noqa: BLE001 (the start is asked for already: nothing may go wrong with it)
            _LOG.warning("the nodes to keep job %s off are not known: %s", job_id, words_of(error))

    def _renew(self, job_id: str, exclude: list[str], added: list[list[str]], attempt: int) -> None:
        parts, nodes = self.slurm.show_job(job_id), self.slurm.show_nodes()
        if not parts or nodes is None:
            _LOG.warning("Slurm does not say what job %s may be kept off", job_id)
            return
        mine = [{*names} for names in (*added, *[[]] * len(parts))][: len(parts)]
        before = [expand(value_of(part, "ExcNodeList")) for part in parts]
        others = [
            [name for name in names if name not in own] for names, own in zip(before, mine, strict=True)
        ]
        adding = affordable(exclude, parts, [self._within(part, nodes) for part in parts], others)
        # Until the lists are changed both may be in them; whoever comes next has to know all that is ours.
        self._note(job_id, [[*own, *new] for own, new in zip(mine, adding, strict=True)], attempt)
        lists = [[*theirs, *new] for theirs, new in zip(others, adding, strict=True)]
        changed = [
            self._change(f"{job_id}+{offset}" if len(parts) > 1 else job_id, names)
            for offset, names in enumerate(lists)
            if {*before[offset]} != {*names}
        ]
        if all(changed):
            self._note(job_id, adding, attempt)

    def _note(self, job_id: str, nodes: list[list[str]], attempt: int) -> None:
        patiently(partial(publish, self.paths.kept_off, sealed({"job": job_id, "nodes": nodes}, attempt)))

    def _within(self, part: Fields, nodes: Mapping[str, Fields]) -> Mapping[str, Fields]:
        """Of all nodes those of its reservation, if it has one."""
        if not (reservation := value_of(part, "Reservation")):
            return nodes
        names = self.slurm.reserved(reservation)
        return {name: node for name, node in nodes.items() if name in names}

    def _change(self, whose: str, names: list[str]) -> bool:
        for _ in range(TRIES):
            reply = self.slurm.exclude(whose, names)
            if reply.code == 0:
                return True
            _LOG.warning("job %s is not kept off %s yet: %s", whose, names, reply.says)
            time.sleep(PAUSE_S)
        return False


def lately_unfit(paths: RunPaths) -> list[str]:
    """Slurm's names of the nodes that recent attempts found unfit, though Slurm itself finds them good; the
    newest first.

    Raises:
        OSError: the ledger cannot be read.
    """
    return [
        str(entry["slurm_node"])
        for attempt in reversed(attempts(paths)[-UNFIT_FOR:])
        for index in attempt.ended.get("unfit", ())
        if (entry := unsealed_any(read_or_none(paths.controller_record(attempt.number, int(index)))))
    ]


def affordable(
    exclude: list[str], parts: list[Fields], nodes: list[Mapping[str, Fields]], others: list[list[str]]
) -> list[list[str]]:
    """Of each component, as many of the nodes `exclude`, from the first on, as it can do without: a job that
    is kept off one too many waits for ever, and no launcher lives that could mend it. What Slurm knows to be
    down is left to Slurm.

    Args:
        nodes: by component, those that it may be given.
        others: by component, nodes that it is kept off already.
    """
    there = [
        {name for name, node in mine.items() if could_serve(node, part)} - {*off}
        for part, mine, off in zip(parts, nodes, others, strict=True)
    ]
    result = []
    for part, mine in zip(parts, there, strict=True):
        wanted = sum(_num_nodes(each) for each, its in zip(parts, there, strict=True) if its & mine)
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
        and int(node.get("RealMemory", "0")) >= mebibytes(value_of(part, "MinMemoryNode"))
        and int(node.get("RealMemory", "0")) >= _cpus(part) * mebibytes(value_of(part, "MinMemoryCPU"))
    )


def _cpus(part: Fields) -> int:
    return int(value_of(part, "MinCPUsNode") or "1")


def _has_gpus(node: Fields, asked: str) -> bool:
    """Of the type that is asked for; of any together where no type is."""
    had, wanted = gpus_of(node), _GPUS.search(asked)
    if wanted is None:
        return "gpu" not in asked
    kind = wanted[1] or ""
    return (had.get(kind, 0) if kind else sum(had.values())) >= int(wanted[2])


def mebibytes(text: str) -> int:
    """Memory as Slurm writes it: 1500G, 32000M, 0; without a unit in MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    return int(float(found[1]) * _MEBIBYTES[found[2]]) if found else 0


_MEBIBYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


def value_of(part: Fields, key: str) -> str:
    """A field, empty where Slurm writes that there is nothing."""
    return "" if (value := part.get(key, "")) in ("(null)", "None") else value


def _num_nodes(part: Fields) -> int:
    """Of one component. While a job is completing NumNodes counts only the nodes that are not free yet."""
    asked = _ASKED_NODES.search(part.get("ReqTRES", part.get("TRES", "")))
    return max(int(part.get("NumNodes", "1").partition("-")[0]), int(asked[1]) if asked else 0)
