"""Nodes that a Slurm job has lost before the controllers of an attempt met.

Later the leader notices a silent node. Before, only Slurm knows: with ``--no-kill`` it removes a dead node
from the job's node list and leaves the others alone. Every attempt that includes the dead node would wait for
it until `launch.start_timeout_s`.
"""

import contextlib
from dataclasses import dataclass

from yatt import clock
from yatt.adapters.requeue import state_of
from yatt.adapters.slurm import Slurm, expand
from yatt.core.deadman import Job as Start
from yatt.launch.allocation import Allocation
from yatt.launch.plan import Component
from yatt.paths import RunPaths

LOOK_S = 10.0
ASK_S = 5.0


@dataclass(slots=True)
class LostNodes:
    """Finds nodes of the run that the job has lost; queries Slurm only until the controllers have met."""

    paths: RunPaths
    attempt: int
    components: tuple[Component, ...]
    allocation: Allocation
    slurm: Slurm
    lost: frozenset[int] = frozenset()
    looked_s: float = 0.0

    def look(self) -> frozenset[int]:
        """Returns the run's nodes that are no longer nodes of the job; keeps what is known without an answer.

        Raises:
            OSError: the run folder fails.
        """
        now_s = clock.monotonic_s()
        self.looked_s = self.looked_s or now_s
        if now_s - self.looked_s < LOOK_S or self.paths.all_endpoints(self.attempt).exists():
            return self.lost
        self.looked_s = now_s
        shown = self.slurm.show_job(self.allocation.job_id, ASK_S) or []
        if state_of(shown, self.allocation.restarts) is not Start.SAME:
            return self.lost  # no answer, or about another start, which has other nodes
        with contextlib.suppress(ValueError):  # not a list of nodes
            names = {name for fields in shown for name in expand(fields.get("NodeList", ""))}
            hosts = self.allocation.names_of(self.components)
            self.lost = frozenset(index for index, name in hosts.items() if name not in names)
        return self.lost
