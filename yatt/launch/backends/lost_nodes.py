"""Nodes that a Slurm job has lost before the controllers of an attempt met.

Later the leader notices a silent node. Before, only Slurm knows: with ``--no-kill`` it removes a dead node
from the job's node list and leaves the others alone. Every attempt that includes the dead node would wait for
it until `launch.start_timeout_s`.
"""

from dataclasses import dataclass

from yatt import clock
from yatt.adapters.slurm import Slurm, expand
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
        shown = self.slurm.show_job(self.allocation.job_id, ASK_S)
        if shown:
            names = {name for fields in shown for name in expand(fields.get("NodeList", ""))}
            self.lost = self._not_among(names)
        return self.lost

    def _not_among(self, names: set[str]) -> frozenset[int]:
        """Returns the run's nodes that are not in the job's node list; none if none is, as of a job that
        waits for its next start."""
        hosts = self.allocation.names_of(self.components)
        found = frozenset(index for index, name in hosts.items() if name not in names)
        return found if len(found) < len(hosts) else frozenset()
