"""What slabs did in a whole run, from its events: batches, changes of the split, moves, unfit engines. Pure.

Events come in the order of `yatt.obs.story.history.read_events`. Those of other kinds are ignored, and a
damaged one costs what it says.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from yatt.obs.story.slab_events import (
    BatchUse,
    SplitChoice,
    TailReason,
    amount_of,
    as_batch_use,
    as_split_choice,
    as_tail_reason,
)

Event = dict[str, Any]

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
    tail: TailReason | None = None
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

    batches: dict[tuple[int, int], BatchUse] = field(default_factory=dict)
    choices: dict[tuple[int, int], SplitChoice] = field(default_factory=dict)
    moves: deque[SlabMove] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))
    unfit: deque[UnfitEngine] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))
    num_moves: dict[str, int] = field(default_factory=dict)
    num_not_moved: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    _last: tuple[int, int] = (0, 0)
    _sampled: tuple[int, int] = (0, 0)
    _has_batch_events: bool = False
    _newest_moves: dict[tuple[int, str], SlabMove] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Adds one event."""
        kind, attempt = event["kind"], event["attempt"]
        if kind == "batch.begin" or (kind == "phase.begin" and event["phase"] == "rollout"):
            self._begin(attempt, event["iteration"], is_batch=kind == "batch.begin")
        elif (change := _CHANGES.get(kind)) is not None:
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

    def _begin(self, attempt: int, iteration: int, *, is_batch: bool) -> None:
        if attempt != self._sampled[0]:
            self._has_batch_events = False
        self._has_batch_events = self._has_batch_events or is_batch
        if is_batch or not self._has_batch_events:
            self._sampled = attempt, iteration

    def _batch(self, attempt: int, event: Event) -> None:
        batch = as_batch_use(event)
        if batch is not None:
            self._last = attempt, batch.iteration
            self.batches.pop(self._last, None)
            self.batches[self._last] = batch

    def _choice(self, attempt: int, event: Event) -> None:
        choice = as_split_choice(event)
        if choice is not None and self._last[0] == attempt:
            self.choices[attempt, self._last[1] + 1] = choice

    def _failed(self, _: int, event: Event) -> None:
        self.failures[event["error"]] += 1

    def _now(self, attempt: int) -> tuple[int, int]:
        """Returns the batch that is sampled, or is next if none is."""
        if self._last[0] == attempt and self._last[1] >= self._sampled[1]:
            return attempt, self._last[1] + 1
        return attempt, self._sampled[1] if self._sampled[0] == attempt else 0

    def _move(self, attempt: int, event: Event) -> None:
        is_tail = event["reason"] == TAIL
        self._add(SlabMove(
            batch=self._now(attempt), slab=event["slab"], before=event["before"], after=event["after"],
            reason=TAIL if is_tail else SPLIT, tail=as_tail_reason(event) if is_tail else None,
        ))  # fmt: skip

    def _add(self, move: SlabMove) -> None:
        self.moves.append(move)
        self._newest_moves[move.batch[0], move.slab] = move
        self.num_moves[move.reason] = self.num_moves.get(move.reason, 0) + 1

    def _moved(self, attempt: int, event: Event) -> None:
        move = self._open(attempt, event["slab"], event["after"])
        if move is None:
            move = self._unasked(self._now(attempt), event)
            self._add(move)
        self.num_not_moved += not event["has_moved"]
        move.has_moved, move.seconds = event["has_moved"], amount_of(event, "seconds")

    def _unasked(self, batch: tuple[int, int], event: Event) -> SlabMove:
        """Returns a move that no event has announced: to a split that was chosen while no slab could move, or
        for a role below its floor."""
        role, choice = event["after"], self.choices.get(batch)
        is_chosen = choice is not None and choice.after.get(role, 0) > choice.before.get(role, 0)
        reason = SPLIT if is_chosen else FLOOR
        return SlabMove(batch=batch, slab=event["slab"], before="", after=role, reason=reason)

    def _open(self, attempt: int, slab: str, after: str) -> SlabMove | None:
        """Returns the newest order of this slab, if it was to this role and was not carried out yet."""
        move = self._newest_moves.get((attempt, slab))
        return move if move is not None and move.after == after and not move.has_moved else None

    def _unfit(self, attempt: int, event: Event) -> None:
        slab, role = event["slab"], event["holder"]
        self.unfit.append(UnfitEngine(attempt=attempt, slab=slab, role=role, error=event["error"]))
        move = self._open(attempt, slab, role)
        if move is not None:
            move.is_unfit = True


_CHANGES: Mapping[str, Callable[[SlabHistory, int, Event], None]] = {
    "batch.load": SlabHistory._batch, "split.choose": SlabHistory._choice, "slab.move": SlabHistory._move,
    "slab.moved": SlabHistory._moved, "engine.unfit": SlabHistory._unfit, "split.failed": SlabHistory._failed,
}  # fmt: skip


def slab_history(events: Iterable[Event]) -> SlabHistory:
    """Returns what slabs did in a run."""
    found = SlabHistory()
    for event in events:
        found.take(event)
    return found
