"""The present split of a run and its last moves, for `yatt status`."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.core.gpus.tail import takes_turns
from yatt.records.events.attempts import NodeExcluded
from yatt.records.events.event import Event
from yatt.records.events.slabs import (
    EngineUnfit,
    LeaseExpired,
    LeaseGranted,
    LeaseReleased,
    SlabArrived,
    SlabOrdered,
    SlabQuarantined,
    SplitChosen,
    SplitFailed,
)

LAST_MOVES = 3


@dataclass(slots=True)
class SlabsNow:
    """Which engine role has which slab in the newest attempt.

    Attributes:
        is_dynamic: whether slabs change between rollout and GenRMs.
        holders: maps each slab to the role that holds it.
        roles: maps each slab to the engine role that holds it, or held it before the trainer.
        change: the last change of the split in words; empty if there was none.
        moves: the last moves in words, oldest first.
        unfit: maps slab and role of each engine that could not be built to its error.
        num_failed: times that the policy of the split raised an error.
    """

    is_dynamic: bool = False
    holders: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    change: str = ""
    moves: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_MOVES))
    unfit: dict[str, str] = field(default_factory=dict)
    num_failed: int = 0
    _asked: dict[str, SlabOrdered] = field(default_factory=dict)

    def begin(self) -> None:
        """Handles the begin of an attempt."""
        self.holders, self.roles, self.unfit, self._asked = {}, {}, {}, {}

    def take(self, event: Event) -> str:
        """Adds one event of the newest attempt; returns what it tells."""
        match event:
            case EngineUnfit(slab=slab, holder=holder, error=error):
                self.unfit[f"{holder} on {slab}"] = error
            case SplitFailed(error=error):
                self.num_failed += 1
                if self.num_failed == 1:  # it may fail each second
                    return f"the policy of the split failed, and GPU sets stay where they are: {error}"
            case SplitChosen() | SlabOrdered() | SlabArrived():
                self.is_dynamic = True
                self._moved(event)
            case _:
                self._held(event)
        return ""

    def _held(self, event: Event) -> None:
        match event:
            case LeaseGranted(slab=slab, holder=holder):
                self.holders[slab] = holder
                if holder != TRAINER:
                    self.roles[slab] = holder
            case LeaseReleased(slab=slab) | LeaseExpired(slab=slab):
                self.holders.pop(slab, None)
            case SlabQuarantined(slab=slab):
                self.holders[slab] = "QUARANTINED"
                self.roles.pop(slab, None)
            case NodeExcluded(node=node):
                self.holders = _without_node(self.holders, node)
                self.roles = _without_node(self.roles, node)

    def _moved(self, event: SplitChosen | SlabOrdered | SlabArrived) -> None:
        match event:
            case SplitChosen():
                self.change = split_in_words(event) if event.is_change else self.change
            case SlabOrdered(slab=slab):
                self._asked[slab] = event
            case SlabArrived(slab=slab, after=after, has_moved=True):
                asked = self._asked.pop(slab, None)
                known = asked if asked is not None and asked.after == after else None
                origin = f"{known.before} to " if known else "to "
                why = f" ({known.reason})" if known else ""
                self.moves.append(f"{slab} {origin}{after}{why}")

    def split(self) -> dict[str, int]:
        """Returns the slabs by role; empty if no slab changes its role."""
        return dict(sorted(Counter(self.roles.values()).items())) if self.is_dynamic else {}

    def as_json(self) -> dict[str, Any]:
        """Returns the parts of `yatt status --json`."""
        return {
            "split": self.split(),
            "split_change": self.change,
            "last_moves": [*self.moves],
            "unfit_engines": dict(sorted(self.unfit.items())),
            "failed_choices": self.num_failed,
        }


def _without_node(roles: dict[str, str], node: int) -> dict[str, str]:
    """The slabs of other nodes, with their roles."""
    return {slab: role for slab, role in roles.items() if not slab.startswith(f"n{node}s")}


def split_in_words(choice: SplitChosen) -> str:
    """Returns the roles whose number of slabs changes, or that they take turns, and the predicted seconds."""
    before, after = Counter(choice.before), Counter(choice.after)
    roles = sorted(before | after, key=lambda role: (after[role] - before[role], role))
    changed = [role for role in roles if before[role] != after[role]]
    words = ", ".join(f"{role} {before[role]} to {after[role]}" for role in changed)
    if ROLLOUT in after and takes_turns(after, ROLLOUT):
        words = "rollout and GenRMs take turns"
    if choice.predicted_s is None or choice.chosen_s is None:
        return words
    return f"{words} ({choice.chosen_s:.1f} s predicted instead of {choice.predicted_s:.1f} s)"


def slabs_in_words(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns name and text of the lines of `yatt status`."""
    lines = []
    if split := summary["split"]:
        slabs = ", ".join(f"{role} {num}" for role, num in split.items())
        change = f"; last change: {summary['split_change']}" if summary["split_change"] else ""
        lines.append(("split", f"{slabs}{change}"))
    if num_failed := summary["failed_choices"]:
        lines.append(("split", f"its policy failed, {num_failed} times; see split.failed in events.jsonl"))
    if moves := summary["last_moves"]:
        lines.append(("moves", f"last: {', '.join(moves)}"))
    for which, error in list(summary["unfit_engines"].items())[:1]:
        others = f" and {len(summary['unfit_engines']) - 1} more" if len(summary["unfit_engines"]) > 1 else ""
        lines.append(("not built", f"{which}{others}: {error}"))
    return lines
