"""Simulates the sampling and judging of one batch, second by second of a clock that jumps.

Requests are assigned by `yatt.core.requests.dispatch` and slabs are moved by `yatt.core.gpus.tail`, as in a
run; engines are `yatt.core.gpus.engine_model`. An engine that moves hands back its requests, which go on
elsewhere with their tokens kept. While it switches, its slab does nothing.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from yatt.core.gpus.engine_model import EngineModel, Request
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.tail import BatchTail, RoleSpeed, tail_moves
from yatt.core.requests.dispatch import Dispatch

IDLE, SWITCHING = "idle", "switch"


@dataclass(frozen=True, slots=True)
class SimulatedSample:
    """One completion to be sampled: its tokens, and those of each GenRM's verdict on it, by role.

    With 0 tokens it is complete already, and only the verdicts are missing.
    """

    tokens: float
    verdicts: Mapping[str, float]


More = Callable[[int], Sequence[SimulatedSample] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting:
    """What is simulated: the roles' speeds, seconds of a switch, whether slabs move within a batch,
    whether the trainer uses the same slabs, so that all switch at the end, and the completions that may still
    come for groups that replace dropped ones."""

    roles: Mapping[str, RoleSpeed]
    switch_s: float
    is_dynamic: bool = False
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
    engines: dict[str, EngineModel]


class SimulatedBatch:
    """One batch of requests on slabs with a given split at its beginning.

    Args:
        more: called with a sample's number when its last verdict is there; returns more samples to be
            sampled, such as those of groups that replace dropped ones, or None if the batch has all it needs.
        trace: records what happens, for pictures.
    """

    def __init__(
        self,
        setting: SimulatedSetting,
        split: Mapping[str, int],
        more: More,
        trace: BatchTrace | None = None,
    ) -> None:
        self._setting, self._more, self._trace = setting, more, trace
        self._dispatch = Dispatch(patience=0)
        self._slabs: dict[str, _Slab] = {}
        self._home: dict[str, EngineModel] = {}
        self._samples: list[SimulatedSample] = []
        self._left: dict[str, float] = {}  # tokens that a request still needs, by key
        self._verdicts_left: dict[int, int] = {}
        self._open_requests = dict.fromkeys(setting.roles, 0)
        self._running = dict.fromkeys(setting.roles, 0)
        self._backlog = dict.fromkeys(setting.roles, 0.0)  # tokens of verdicts that are not there yet
        self._due: dict[str, float] = {}  # second of an engine's next end
        self._began: dict[str, float] = {}  # second at which an engine began
        self._events: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._now_s, self._num_unsampled, self._is_over = 0.0, 0, False
        none = dict.fromkeys(setting.roles, 0.0)
        self.outcome = SimulatedOutcome(tokens={**none}, busy_s={**none}, held_s={**none})
        names = (f"s{i}" for i in itertools.count())
        for role, num in split.items():
            for _ in range(num):
                self._begin(next(names), role)

    def run(self, samples: Sequence[SimulatedSample]) -> SimulatedOutcome:
        """Samples and judges everything; returns what happened."""
        self._open(samples)
        self._count()
        if self._setting.is_dynamic:
            self._at(self._setting.decide_s, "decide")
        while self._left and not self._is_over:
            self._now_s, _, what = heapq.heappop(self._events)
            if what == "decide":
                self._decide()
            elif what.startswith("begin "):
                _, slab, role = what.split(" ")
                self._begin(slab, role)
            else:
                self._advance(what)
            self._assign()
            self._count()
        self.outcome.seconds = self._now_s
        for name in list(self._home):
            self._retire(name)
        return self.outcome

    def unfinished(self) -> dict[int, SimulatedSample]:
        """Maps the samples that a batch has cut to what they still need. A verdict is begun anew."""
        found: dict[int, SimulatedSample] = {}
        for key, tokens in self._left.items():
            role, _, name = key.rpartition(" ")
            number, verdicts = int(name), self._samples[int(name)].verdicts
            if role == ROLLOUT:
                found[number] = SimulatedSample(tokens, verdicts)
            else:
                missing = {**found[number].verdicts} if number in found else {}
                found[number] = SimulatedSample(0.0, {**missing, role: verdicts[role]})
        return found

    def _retire(self, name: str) -> None:
        """Ends an engine; its requests keep their tokens."""
        engine, role, held_s = self._home.pop(name), name.split("/")[1], self._now_s - self._began.pop(name)
        for _, key in engine.advance(self._now_s):
            self._left[key] = 0.0
        self.outcome.tokens[role] += engine.tokens
        self.outcome.busy_s[role] += engine.busy_s
        self.outcome.held_s[role] += held_s
        for request in engine.abort():
            self._left[request.key] = request.tokens
            self._running[role] -= 1

    def _at(self, second: float, what: str) -> None:
        if second < math.inf:
            heapq.heappush(self._events, (second, next(self._order), what))

    def _open(self, samples: Sequence[SimulatedSample]) -> None:
        for sample in samples:
            number = len(self._samples)
            self._samples.append(sample)
            self._verdicts_left[number] = len(sample.verdicts)
            if sample.tokens > 0:
                self._num_unsampled += 1
                self._submit(ROLLOUT, number, sample.tokens)
            else:
                self._ask(number)
        self._assign()

    def _ask(self, number: int) -> None:
        """Submits the verdicts on a complete sample."""
        for judge, tokens in self._samples[number].verdicts.items():
            self._backlog[judge] += tokens
            self._submit(judge, number, tokens)

    def _submit(self, role: str, number: int, tokens: float) -> None:
        key = f"{role} {number}"
        self._left[key] = tokens
        self._open_requests[role] += 1
        self._dispatch.submit(key, role)

    def _begin(self, name: str, role: str) -> None:
        """Begins the engines of a slab."""
        speed = self._setting.roles[role]
        engines = {
            f"{name}/{role}/{i}": EngineModel(speed.speed, speed.room, self._now_s)
            for i in range(speed.engines)
        }
        self._slabs[name] = _Slab(role, engines)
        self._home |= engines
        for engine in engines:
            self._began[engine] = self._now_s
            self._dispatch.serve(engine, role, speed.room)
        self._show(name)

    def _assign(self) -> None:
        touched = set()
        for assignment in self._dispatch.assign():
            engine = self._home[assignment.server]
            self._take(assignment.server)
            engine.add(Request(assignment.key, self._left[assignment.key]), self._now_s)
            self._running[assignment.key.rpartition(" ")[0]] += 1
            touched.add(assignment.server)
        for name in sorted(touched):
            self._schedule(name)

    def _schedule(self, name: str) -> None:
        """Plans the end of an engine's next sequence, in place of what was planned before."""
        self._due[name] = self._home[name].next_end_s()
        self._at(self._due[name], name)
        if self._trace is not None:
            self._show(name.split("/")[0])

    def _advance(self, name: str) -> None:
        """Handles the end of an engine's next sequence, unless it is planned anew or its slab has moved."""
        if name in self._home and self._due[name] == self._now_s:
            self._take(name)
            self._schedule(name)

    def _take(self, name: str) -> None:
        """Advances an engine to this moment, and handles the requests that have ended."""
        for _, key in self._home[name].advance(self._now_s):
            del self._left[key]
            self._dispatch.done(key)
            role, _, number = key.rpartition(" ")
            self._running[role] -= 1
            self._open_requests[role] -= 1
            self._ended(role, int(number))

    def _ended(self, role: str, number: int) -> None:
        sample = self._samples[number]
        if role == ROLLOUT:
            self._num_unsampled -= 1
            self.outcome.sampled_s = self._now_s
            self._ask(number)
        else:
            self._backlog[role] -= sample.verdicts[role]
            self._verdicts_left[number] -= 1
        if not self._verdicts_left[number]:
            samples = self._more(number)
            self._is_over = self._is_over or samples is None
            self._open(samples or ())

    # ---- moves ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Lets the policy move slabs, and decides again later."""
        rollouts = {name: slab for name, slab in self._slabs.items() if slab.role == ROLLOUT}
        running = {
            name: sum(e.num_requests for e in slab.engines.values()) for name, slab in rollouts.items()
        }
        judges = [role for role in self._setting.roles if role != ROLLOUT]
        tail = BatchTail(
            running=running,
            num_waiting=self._num_unsampled - sum(running.values()),
            backlog={role: self._backlog[role] for role in judges},
            num_asked={role: self._open_requests[role] for role in judges},
            split={role: sum(slab.role == role for slab in self._slabs.values()) for role in judges},
            switch_s=self._setting.switch_s,
            num_late=self._setting.num_late,
        )
        for move in tail_moves(tail, self._setting.roles, ROLLOUT):
            self._move(move.slab, move.role)
        self._at(self._now_s + self._next_decision() * self._setting.decide_s, "decide")

    def _next_decision(self) -> int:
        """After how many intervals something will have happened: decisions before would find the same."""
        if not self._events:
            return 1
        return max(math.ceil((self._events[0][0] - self._now_s) / self._setting.decide_s), 1)

    def _move(self, name: str, role: str) -> None:
        self.outcome.moves.append((self._now_s, name, role))
        for engine in list(self._slabs[name].engines):
            self._take(engine)
            self._retire(engine)
            self._dispatch.leave(engine)
        self._slabs[name] = _Slab(role, {})
        self._show(name)
        self._at(self._now_s + self._setting.switch_s, f"begin {name} {role}")

    # ---- pictures -------------------------------------------------------------------------------

    def _show(self, name: str) -> None:
        if self._trace is not None:
            slab = self._slabs[name]
            is_busy = any(engine.num_requests for engine in slab.engines.values())
            idle = IDLE if slab.engines else SWITCHING
            self._trace.state(name, self._now_s, slab.role if is_busy else idle)

    def _count(self) -> None:
        if self._trace is not None:
            self._trace.counts += [
                (self._now_s, role, self._running[role], num - self._running[role])
                for role, num in self._open_requests.items()
            ]
