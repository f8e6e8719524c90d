"""Measures one node's engines: steps, and how long they take to sleep, to wake and to be built."""

from collections import defaultdict
from dataclasses import replace

from yatt import clock
from yatt.control.gpus.arbiter import Holding
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.core.gpus.placement import TRAINER, Slab
from yatt.records.load import StepSums, SwitchCost


class EngineMeter:
    """Measurements of one node's engines, by role.

    Attributes:
        steps: sums over all engines' steps since the controller began.
        costs: of the last sleep, wake and build.
    """

    def __init__(self, supervisor: Supervisor, engines: LocalEngines) -> None:
        self._supervisor, self._engines = supervisor, engines
        self.steps: dict[str, StepSums] = {}
        self.costs: dict[str, SwitchCost] = {}
        self._last: dict[str, tuple[str, StepSums]] = {}  # by worker's name: its address, its sums so far
        self._spent_s: defaultdict[Slab, float] = defaultdict(float)
        self._built: dict[Slab, dict[str, str]] = {}  # address of the engine that was built, by slab and name

    def spent_s(self, slab: Slab) -> float:
        """Returns the seconds in which workers of this slab fell asleep or woke, all in all."""
        return self._spent_s[slab]

    def stepped(self, worker: Worker, sums: StepSums) -> None:
        """Handles an engine's sums since its process began."""
        address, before = self._last.get(worker.name, ("", StepSums()))
        new = sums - before if address == worker.address else sums
        self._last[worker.name] = worker.address, sums
        self.steps[worker.role] = self.steps.get(worker.role, StepSums()) + new

    def metered(self, holding: Holding) -> Holding:
        """Returns the same functions, with their durations measured."""

        async def wake(slab: Slab, role: str, token: int) -> None:
            was_built, began_s = self._is_built(slab, role), clock.monotonic_s()
            await holding.wake(slab, role, token)
            took_s = self._took(slab, began_s)
            workers = self._supervisor.of(role, slab)
            if role != TRAINER and all(self._engines.is_awake(w.address) for w in workers):
                self._built.setdefault(slab, {}).update({w.name: w.address for w in workers})
                self._woke(role, took_s, is_build=not was_built)

        async def sleep(slab: Slab, role: str, token: int, release_s: float) -> None:
            began_s = clock.monotonic_s()
            await holding.sleep(slab, role, token, release_s)
            took_s = self._took(slab, began_s)
            if role != TRAINER:
                before = self.costs.get(role, SwitchCost())
                self.costs[role] = SwitchCost(took_s, before.wake_s, before.build_s)

        return replace(holding, wake=wake, sleep=sleep)

    def built(self) -> tuple[tuple[int, str], ...]:
        """Returns slab and role of the engines that are built and live, awake or asleep."""
        roles = {(slab, worker.role) for slab in self._built for worker in self._on(slab)}
        return tuple(sorted((slab.index, role) for slab, role in roles if self._is_built(slab, role)))

    def _took(self, slab: Slab, began_s: float) -> float:
        seconds = round(clock.monotonic_s() - began_s, 6)
        self._spent_s[slab] += seconds
        return seconds

    def _on(self, slab: Slab) -> list[Worker]:
        return [self._supervisor.workers[name] for name in self._built.get(slab, ())]

    def _is_built(self, slab: Slab, role: str) -> bool:
        known = self._built.get(slab, {})
        return all(known.get(w.name) == w.address and w.is_running for w in self._supervisor.of(role, slab))

    def _woke(self, role: str, seconds: float, *, is_build: bool) -> None:
        before = self.costs.get(role, SwitchCost())
        if is_build:
            self.costs[role] = SwitchCost(before.sleep_s, before.wake_s, seconds)
        else:
            self.costs[role] = SwitchCost(before.sleep_s, seconds, before.build_s)
