"""Simulates the sampling and judging of one batch, second by second of a clock that jumps.

Requests are assigned by `yatt.core.requests.dispatch` and slabs are moved by `yatt.core.gpus.tail`, as in a
run; engines are `yatt.core.gpus.engine_model`. An engine that moves hands back its requests, which go on
elsewhere with their tokens kept. While it switches, its slab does nothing.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from yatt.core.gpus.batch_loop import BatchLoop, BatchSample, More
from yatt.core.gpus.engine_model import EngineModel, Request
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.tail import BatchTail, RoleSpeed, tail_moves
from yatt.core.requests.dispatch import Dispatch

IDLE, SWITCHING = "idle", "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting:
    """What is simulated: the roles' speeds, seconds of a switch, whether slabs move within a batch, whether
    roles may take turns for one, whether the trainer uses the same slabs, so that all switch at the end, and
    the completions that may still come for groups that replace dropped ones."""

    roles: Mapping[str, RoleSpeed]
    switch_s: float
    is_dynamic: bool = False
    may_turn: bool = False
    is_shared: bool = True
    num_late: float = 0.0
    decide_s: float = 2.0
    """Interval at which moves are decided."""


@dataclass(slots=True)
class SimulatedOutcome:
    """What happened in one batch.

    Attributes:
        seconds: from its first request to its last verdict.
        sampled_s: until its last completion.
        tokens: made by engines in all, by role.
        busy_s: engine seconds in which any sequence ran, by role.
        held_s: engine seconds in which the role had the engines, by role; no role has a slab that switches.
        moves: (second, slab, role it moved to).
    """

    seconds: float = 0.0
    sampled_s: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    moves: list[tuple[float, str, str]] = field(default_factory=list)


@dataclass(slots=True)
class BatchTrace:
    """What each slab did over time, and how many requests ran and waited.

    Attributes:
        states: changes of each slab, (second, what it does from then on): its role, `IDLE` or `SWITCHING`.
        counts: (second, role, number of its requests that run, number that wait), after each event.
    """

    states: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    counts: list[tuple[float, str, int, int]] = field(default_factory=list)

    def state(self, slab: str, second: float, state: str) -> None:
        """Records what a slab does from now on, if that is new."""
        changes = self.states.setdefault(slab, [])
        if changes and changes[-1][0] == second:
            changes.pop()
        if not changes or changes[-1][1] != state:
            changes.append((second, state))


@dataclass(slots=True)
class _Slab:
    role: str
    engines: tuple[str, ...]


@dataclass(slots=True)
class _Engine:
    """`due_s`: when its next sequence ends, as planned."""

    model: EngineModel
    role: str
    began_s: float
    due_s: float = math.inf


class SimulatedBatch:
    """One batch of requests on slabs with a given split at its beginning.

    Args:
        more: see `More`.
        trace: records what happens, for pictures.
    """

    def __init__(
        self,
        setting: SimulatedSetting,
        split: Mapping[str, int],
        more: More,
        trace: BatchTrace | None = None,
    ) -> None:
        self._fleet = _Engines(setting, split, trace)
        judges = {role: each.questions for role, each in setting.roles.items() if role != ROLLOUT}
        self._loop = BatchLoop(self._fleet, ROLLOUT, judges, more)

    def run(self, samples: Sequence[BatchSample]) -> SimulatedOutcome:
        """Samples and judges everything; returns what happened."""
        self._loop.open(samples)
        self._fleet.begin(self._loop)
        return self._fleet.end(self._loop.run())

    def unfinished(self) -> dict[int, BatchSample]:
        """Maps the samples that a batch has cut to what they still need. An answer is begun anew."""
        found: dict[int, BatchSample] = {}
        for role, request, tokens in self._fleet.left():
            number = self._loop.sample_of(request)
            if role == ROLLOUT:
                found[number] = BatchSample(tokens, self._loop.samples[number].verdicts)
            else:
                missing = {**found[number].verdicts} if number in found else {}
                answer = self._loop.verdict_tokens(role, number)
                found[number] = BatchSample(0.0, {**missing, role: missing.get(role, 0.0) + answer})
        return found


class _Engines:
    """Every engine of a simulated batch, each with the requests that it was assigned."""

    def __init__(self, setting: SimulatedSetting, split: Mapping[str, int], trace: BatchTrace | None) -> None:
        self._setting, self._trace = setting, trace
        self._dispatch = Dispatch(patience=0)
        self._slabs: dict[str, _Slab] = {}
        self._home: dict[str, _Engine] = {}
        self._left: dict[str, float] = {}  # tokens that a request still needs, by key
        self._running = dict.fromkeys(setting.roles, 0)
        self._events: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        none = dict.fromkeys(setting.roles, 0.0)
        self._outcome = SimulatedOutcome(tokens={**none}, busy_s={**none}, held_s={**none})
        names = (f"s{i}" for i in itertools.count())
        for role, num in split.items():
            for _ in range(num):
                self._begin(next(names), role, 0.0)

    # ---- the batch ------------------------------------------------------------------------------

    def begin(self, batch: BatchLoop) -> None:
        """Begins when the first requests are there."""
        self._count(batch)
        if self._setting.is_dynamic:
            self._at(self._setting.decide_s, "decide")

    def submit(self, role: str, request: int, tokens: float, _: float, /) -> None:
        """See `batch_loop.Fleet`."""
        key = f"{role} {request}"
        self._left[key] = tokens
        self._dispatch.submit(key, role)

    def next_s(self) -> float:
        """See `batch_loop.Fleet`."""
        return self._events[0][0]

    def work(self, batch: BatchLoop) -> None:
        """Handles the next event."""
        _, _, what = heapq.heappop(self._events)
        if what == "decide":
            self._decide(batch)
        elif what.startswith("begin "):
            _, slab, role = what.split(" ")
            self._begin(slab, role, batch.now_s)
        elif what in self._home and self._home[what].due_s == batch.now_s:
            self._take(what, batch)  # else it is planned anew, or its slab has moved
            self._schedule(what, batch.now_s)
        self.assign(batch)
        self._count(batch)

    def assign(self, batch: BatchLoop) -> None:
        """See `batch_loop.Fleet`."""
        touched = set()
        for assignment in self._dispatch.assign():
            self._take(assignment.server, batch)
            request = Request(assignment.key, self._left[assignment.key])
            self._home[assignment.server].model.add(request, batch.now_s)
            self._running[assignment.key.rpartition(" ")[0]] += 1
            touched.add(assignment.server)
        for name in sorted(touched):
            self._schedule(name, batch.now_s)

    def end(self, now_s: float) -> SimulatedOutcome:
        """Ends all engines; returns what happened."""
        self._outcome.seconds = now_s
        for name in list(self._home):
            self._retire(name, now_s)
        return self._outcome

    def left(self) -> Iterator[tuple[str, int, float]]:
        """Yields role, number and missing tokens of each request that has not ended."""
        for key, tokens in self._left.items():
            role, _, request = key.rpartition(" ")
            yield role, int(request), tokens

    # ---- engines --------------------------------------------------------------------------------

    def _begin(self, slab: str, role: str, now_s: float) -> None:
        """Begins the engines of a slab."""
        speed = self._setting.roles[role]
        names = tuple(f"{slab}/{role}/{i}" for i in range(speed.engines))
        self._slabs[slab] = _Slab(role, names)
        for name in names:
            self._home[name] = _Engine(EngineModel(speed.speed, speed.room, now_s), role, now_s)
            self._dispatch.serve(name, role, speed.room)
        self._show(slab, now_s)

    def _at(self, second: float, what: str) -> None:
        if second < math.inf:
            heapq.heappush(self._events, (second, next(self._order), what))

    def _schedule(self, name: str, now_s: float) -> None:
        """Plans the end of an engine's next sequence, in place of what was planned before."""
        engine = self._home[name]
        engine.due_s = engine.model.next_end_s()
        self._at(engine.due_s, name)
        if self._trace is not None:
            self._show(name.split("/")[0], now_s)

    def _take(self, name: str, batch: BatchLoop) -> None:
        """Advances an engine to this moment, and handles the requests that have ended."""
        for _, key in self._home[name].model.advance(batch.now_s):
            del self._left[key]
            self._dispatch.done(key)
            role, _, request = key.rpartition(" ")
            self._running[role] -= 1
            if role == ROLLOUT:
                self._outcome.sampled_s = batch.now_s
            batch.ended(role, int(request))

    def _retire(self, name: str, now_s: float) -> None:
        """Ends an engine; its requests keep their tokens."""
        engine = self._home.pop(name)
        model, role = engine.model, engine.role
        for _, key in model.advance(now_s):
            self._left[key] = 0.0
        self._outcome.tokens[role] += model.tokens
        self._outcome.busy_s[role] += model.busy_s
        self._outcome.held_s[role] += now_s - engine.began_s
        for request in model.abort():
            self._left[request.key] = request.tokens
            self._running[role] -= 1

    # ---- moves ----------------------------------------------------------------------------------

    def _decide(self, batch: BatchLoop) -> None:
        """Lets the policy move slabs, and decides again later."""
        rollouts = {name: slab for name, slab in self._slabs.items() if slab.role == ROLLOUT}
        running = {
            name: sum(self._home[engine].model.num_requests for engine in slab.engines)
            for name, slab in rollouts.items()
        }
        tail = BatchTail(
            running=running,
            num_waiting=batch.num_open[ROLLOUT] - sum(running.values()),
            backlog=batch.backlog,
            num_asked={role: batch.num_open[role] for role in batch.backlog},
            split={role: sum(slab.role == role for slab in self._slabs.values()) for role in batch.backlog},
            switch_s=self._setting.switch_s,
            num_late=self._setting.num_late,
        )
        for move in tail_moves(tail, self._setting.roles, ROLLOUT):
            self._move(move.slab, move.role, batch)
        self._at(batch.now_s + self._next_decision(batch.now_s) * self._setting.decide_s, "decide")

    def _next_decision(self, now_s: float) -> int:
        """After how many intervals something will have happened: decisions before would find the same."""
        if not self._events:
            return 1
        return max(math.ceil((self._events[0][0] - now_s) / self._setting.decide_s), 1)

    def _move(self, slab: str, role: str, batch: BatchLoop) -> None:
        self._outcome.moves.append((batch.now_s, slab, role))
        for engine in self._slabs[slab].engines:
            self._take(engine, batch)
            self._retire(engine, batch.now_s)
            self._dispatch.leave(engine)
        self._slabs[slab] = _Slab(role, ())
        self._show(slab, batch.now_s)
        self._at(batch.now_s + self._setting.switch_s, f"begin {slab} {role}")

    # ---- pictures -------------------------------------------------------------------------------

    def _show(self, name: str, now_s: float) -> None:
        if self._trace is not None:
            slab = self._slabs[name]
            is_busy = any(self._home[engine].model.num_requests for engine in slab.engines)
            idle = IDLE if slab.engines else SWITCHING
            self._trace.state(name, now_s, slab.role if is_busy else idle)

    def _count(self, batch: BatchLoop) -> None:
        if self._trace is not None:
            self._trace.counts += [
                (batch.now_s, role, self._running[role], num - self._running[role])
                for role, num in batch.num_open.items()
            ]
