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
from yatt.adapters.slurm import Fields, Slurm, expand, is_up
from yatt.errors import YattError
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
_GPUS = re.compile(r"gres[:/]gpu(?::([^:,]*[^:,\d][^:,]*))?:\d+")
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

    def renew(self, job_id: str, gone: list[str], epoch: int) -> None:
        """Before the next start: off `gone` and what was found unfit, as far as the job can do without. A job
        whose list cannot be changed may be given such a node again, which costs it a start."""
        try:
            unfit = patiently(partial(lately_unfit, self.paths))
            exclude = list(dict.fromkeys([*filter(None, gone), *unfit]))
            noted = unsealed_any(patiently(partial(read_or_none, self.paths.kept_off))) or {}
            added = noted.get("nodes", []) if noted.get("job") == job_id else []
            if exclude or any(added):
                self._renew(job_id, exclude, added, epoch)
        except (OSError, YattError) as error:
            _LOG.warning("the nodes to keep job %s off are not known: %s", job_id, error)

    def _renew(self, job_id: str, exclude: list[str], added: list[list[str]], epoch: int) -> None:
        parts, nodes = self.slurm.show_job(job_id), self.slurm.show_nodes()
        if not parts or nodes is None:
            _LOG.warning("Slurm does not say what job %s may be kept off", job_id)
            return
        lists, adding = list[list[str]](), list[list[str]]()
        for offset, part in enumerate(parts):
            mine = added[offset] if offset < len(added) else []
            others = [name for name in expand(value_of(part, "ExcNodeList")) if name not in mine]
            adding.append(
                affordable(exclude, _needed(part, parts), part, self._within(part, nodes), {*others})
            )
            lists.append([*others, *adding[-1]])
        content = sealed({"job": job_id, "nodes": adding}, epoch)
        patiently(partial(publish, self.paths.kept_off, content))
        for offset, (part, names) in enumerate(zip(parts, lists, strict=True)):
            if {*expand(value_of(part, "ExcNodeList"))} != {*names}:
                self._change(f"{job_id}+{offset}" if len(parts) > 1 else job_id, names)

    def _within(self, part: Fields, nodes: Mapping[str, Fields]) -> Mapping[str, Fields]:
        """Of all nodes those of its reservation, if it has one."""
        if not (reservation := value_of(part, "Reservation")):
            return nodes
        names = self.slurm.reserved(reservation)
        return {name: node for name, node in nodes.items() if name in names}

    def _change(self, whose: str, names: list[str]) -> None:
        for _ in range(TRIES):
            reply = self.slurm.exclude(whose, names)
            if reply.code == 0:
                return
            _LOG.warning("job %s is not kept off %s yet: %s", whose, names, reply.says)
            time.sleep(PAUSE_S)


def lately_unfit(paths: RunPaths) -> list[str]:
    """Slurm's names of the nodes that recent attempts found unfit, though Slurm itself finds them good; the
    newest first.

    Raises:
        OSError: the ledger cannot be read.
    """
    return [
        str(seat["slurm_node"])
        for attempt in reversed(attempts(paths)[-UNFIT_FOR:])
        for index in attempt.ended.get("unfit", ())
        if (seat := unsealed_any(read_or_none(paths.seat(attempt.epoch, int(index)))))
    ]


def affordable(
    exclude: list[str], needed: int, part: Fields, nodes: Mapping[str, Fields], others: set[str]
) -> list[str]:
    """As many of the nodes `exclude`, from the first on, as a component can do without: a job that is kept
    off one too many waits for ever, and no launcher lives that could mend it. What Slurm knows to be down is
    left to Slurm.

    Args:
        needed: nodes of the components that share its partition, its own included.
        others: nodes that it is kept off already.
    """
    features, wanted = value_of(part, "Features"), _GPUS.search(value_of(part, "TresPerNode"))
    if value_of(part, "ReqNodeList") or (features and not re.fullmatch(r"[\w.-]+", features)):
        return []
    kind = (f"gpu:{wanted[1]}" if wanted[1] else "gpu") if wanted else ""
    there = {
        name
        for name, node in nodes.items()
        if is_up(node)
        and {*part.get("Partition", "").split(",")} & {*node.get("Partitions", "").split(",")}
        and (not features or features in node.get("ActiveFeatures", "").split(","))
        and kind in node.get("Gres", "")
    } - others
    return [name for name in dict.fromkeys(exclude) if name in there][: max(0, len(there) - needed)]


def value_of(part: Fields, key: str) -> str:
    """A field, empty where Slurm writes that there is nothing."""
    return "" if (value := part.get(key, "")) in ("(null)", "None") else value


def _needed(part: Fields, parts: list[Fields]) -> int:
    """How many nodes the components in this one's partition need together."""
    return sum(_nodes(each) for each in parts if each.get("Partition") == part.get("Partition"))


def _nodes(part: Fields) -> int:
    """Of one component. While a job is completing NumNodes counts only the nodes that are not free yet."""
    asked = _ASKED_NODES.search(part.get("ReqTRES", part.get("TRES", "")))
    return max(int(part.get("NumNodes", "1").partition("-")[0]), int(asked[1]) if asked else 0)
