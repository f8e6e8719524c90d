"""What slabs did in a whole run, from its events: batches, changes of the split, moves, unfit engines. Pure.

Events come in the order of `yatt.obs.story.history.read_events`. Those of other kinds are ignored.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from yatt.records.events.attempts import BatchBegan, PhaseBegan
from yatt.records.events.log import LoggedEvent
from yatt.records.events.slabs import (
    BatchMeasured,
    EngineUnfit,
    SlabArrived,
    SlabOrdered,
    SplitChosen,
    SplitFailed,
)

MOST_MOVES = 5000
"""Number of moves and of unfit engines that are kept, the newest."""

TAIL, SPLIT, FLOOR = "tail", "split", "floor"
"""Reasons of a move: near the end of a batch; another split; a role had fewer slabs than its floor."""


@dataclass(slots=True, kw_only=True)
class SlabMove:
    """One slab that was ordered to another role.

    Attributes:
        batch: attempt and iteration of the batch that was sampled then.
        before: the former role; empty if it is not known.
        tail: reasons near the end of a batch.
        has_moved: None without an answer.
        seconds: of the move; None without an answer.
        is_unfit: its engine could not be built.
    """

    batch: tuple[int, int]
    slab: str
    before: str
    after: str
    reason: str
    tail: SlabOrdered | None = None
    has_moved: bool | None = None
    seconds: float | None = None
    is_unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitEngine:
    """An engine that could not be built: in which attempt, its slab, role and error."""

    attempt: int
    slab: str
    role: str
    error: str


@dataclass(slots=True)
class _BatchClock:
    """Which batch an event belongs to. Attempt and iteration are the key of a batch.

    Attributes:
        last: the batch that was measured last.
        sampled: the batch that began last.
    """

    last: tuple[int, int] = (0, 0)
    sampled: tuple[int, int] = (0, 0)
    _has_batch_events: bool = False

    def begin(self, attempt: int, iteration: int, *, is_batch: bool) -> None:
        """Handles the begin of a batch, or of a rollout phase of a run without batches beside training."""
        if attempt != self.sampled[0]:
            self._has_batch_events = False
        self._has_batch_events = self._has_batch_events or is_batch
        if is_batch or not self._has_batch_events:
            self.sampled = attempt, iteration

    def now(self, attempt: int) -> tuple[int, int]:
        """Returns the batch that is sampled, or is next if none is."""
        if self.last[0] == attempt and self.last[1] >= self.sampled[1]:
            return attempt, self.last[1] + 1
        return attempt, self.sampled[1] if self.sampled[0] == attempt else 0


@dataclass(slots=True)
class SlabHistory:
    """Slabs of a run. Attempt and iteration are the key of a batch.

    Attributes:
        batches: measured.
        choices: the split that was chosen for a batch, after the one before it.
        moves: the newest, oldest first.
        num_moves: of all moves, by reason.
        num_not_moved: orders that another order overtook, or whose engine could not be built.
        failures: the number of each error of the policy.
    """

    batches: dict[tuple[int, int], BatchMeasured] = field(default_factory=dict)
    choices: dict[tuple[int, int], SplitChosen] = field(default_factory=dict)
    moves: deque[SlabMove] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))
    unfit: deque[UnfitEngine] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))
    num_moves: dict[str, int] = field(default_factory=dict)
    num_not_moved: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    _clock: _BatchClock = field(default_factory=_BatchClock)
    _newest_moves: dict[tuple[int, str], SlabMove] = field(default_factory=dict)

    def take(self, logged: LoggedEvent) -> None:
        """Adds one event."""
        event, attempt = logged.event, logged.attempt
        match event:
            case BatchBegan(iteration=iteration):
                self._clock.begin(attempt, iteration, is_batch=True)
            case PhaseBegan(phase="rollout", iteration=iteration):
                self._clock.begin(attempt, iteration, is_batch=False)
            case _ if (change := _CHANGES.get(type(event))) is not None:
                change(self, attempt, event)

    def newest(self) -> list[tuple[int, int]]:
        """Returns the key of each iteration's batch, by iteration: that of the newest attempt which has it,
        without batches that a later attempt has not repeated yet."""
        found = list[tuple[int, int]]()
        for key in self.batches:
            while found and found[-1][1] >= key[1]:
                found.pop()
            found.append(key)
        return found

    def split_of(self, batch: tuple[int, int]) -> Mapping[str, int]:
        """Returns the slabs by role with which a batch began; empty if it is not known."""
        attempt, iteration = batch
        if (chosen_after := self.choices.get((attempt, iteration + 1))) is not None:
            return chosen_after.before
        chosen = self.choices.get(batch)
        return chosen.after if chosen is not None else {}

    def _batch(self, attempt: int, batch: BatchMeasured) -> None:
        self._clock.last = key = attempt, batch.iteration
        self.batches.pop(key, None)
        self.batches[key] = batch

    def _choice(self, attempt: int, choice: SplitChosen) -> None:
        if self._clock.last[0] == attempt:
            self.choices[attempt, self._clock.last[1] + 1] = choice

    def _failed(self, _: int, event: SplitFailed) -> None:
        self.failures[event.error] += 1

    def _move(self, attempt: int, order: SlabOrdered) -> None:
        is_tail = order.reason == TAIL
        self._add(
            SlabMove(
                batch=self._clock.now(attempt),
                slab=order.slab,
                before=order.before,
                after=order.after,
                reason=TAIL if is_tail else SPLIT,
                tail=order if is_tail else None,
            )
        )

    def _add(self, move: SlabMove) -> None:
        self.moves.append(move)
        self._newest_moves[move.batch[0], move.slab] = move
        self.num_moves[move.reason] = self.num_moves.get(move.reason, 0) + 1

    def _moved(self, attempt: int, event: SlabArrived) -> None:
        move = self._open(attempt, event.slab, event.after)
        if move is None:
            move = self._unasked(self._clock.now(attempt), event)
            self._add(move)
        self.num_not_moved += not event.has_moved
        move.has_moved, move.seconds = event.has_moved, event.seconds

    def _unasked(self, batch: tuple[int, int], event: SlabArrived) -> SlabMove:
        """Returns a move that no event has announced: to a split that was chosen while no slab could move, or
        for a role below its floor."""
        role, choice = event.after, self.choices.get(batch)
        is_chosen = choice is not None and choice.after.get(role, 0) > choice.before.get(role, 0)
        reason = SPLIT if is_chosen else FLOOR
        return SlabMove(batch=batch, slab=event.slab, before="", after=role, reason=reason)

    def _open(self, attempt: int, slab: str, after: str) -> SlabMove | None:
        """Returns the newest order of this slab, if it was to this role and was not carried out yet."""
        move = self._newest_moves.get((attempt, slab))
        return move if move is not None and move.after == after and not move.has_moved else None

    def _unfit(self, attempt: int, event: EngineUnfit) -> None:
        slab, role = event.slab, event.holder
        self.unfit.append(UnfitEngine(attempt=attempt, slab=slab, role=role, error=event.error))
        move = self._open(attempt, slab, role)
        if move is not None:
            move.is_unfit = True


_CHANGES: Mapping[type, Callable[[SlabHistory, int, Any], None]] = {
    BatchMeasured: SlabHistory._batch,
    SplitChosen: SlabHistory._choice,
    SlabOrdered: SlabHistory._move,
    SlabArrived: SlabHistory._moved,
    EngineUnfit: SlabHistory._unfit,
    SplitFailed: SlabHistory._failed,
}


def slab_history(events: Iterable[LoggedEvent]) -> SlabHistory:
    """Returns what slabs did in a run."""
    found = SlabHistory()
    for event in events:
        found.take(event)
    return found
