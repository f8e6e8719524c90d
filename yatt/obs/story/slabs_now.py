"""The present split of a run and its last moves, for `yatt status`."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from yatt.core.gpus.placement import TRAINER
from yatt.obs.story.slab_events import as_split_choice, split_in_words

LAST_MOVES = 3

Event = dict[str, Any]


@dataclass(slots=True)
class SlabsNow:
    """Which engine role has which slab in the newest attempt.

    Attributes:
        is_dynamic: whether slabs change between rollout and GenRMs.
        roles: maps each slab to the engine role that holds it, or held it before the trainer.
        change: the last change of the split in words; empty if there was none.
        moves: the last moves in words, oldest first.
        unfit: maps slab and role of each engine that could not be built to its error.
        num_failed: times that the policy of the split raised an error.
    """

    is_dynamic: bool = False
    roles: dict[str, str] = field(default_factory=dict)
    change: str = ""
    moves: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_MOVES))
    unfit: dict[str, str] = field(default_factory=dict)
    num_failed: int = 0
    _asked: dict[str, Event] = field(default_factory=dict)

    def begin(self) -> None:
        """Handles the begin of an attempt."""
        self.roles, self.unfit, self._asked = {}, {}, {}

    def take(self, event: Event) -> None:
        """Adds one event of the newest attempt."""
        kind = event["kind"]
        if kind == "lease.grant" and event["holder"] != TRAINER:
            self.roles[event["slab"]] = event["holder"]
        elif kind == "lease.quarantine":
            self.roles.pop(event["slab"], None)
        elif kind == "node.lost":
            mine = f"n{event['node']}s"
            self.roles = {slab: role for slab, role in self.roles.items() if not slab.startswith(mine)}
        elif kind == "engine.unfit":
            self.unfit[f"{event['holder']} on {event['slab']}"] = event["error"]
        elif kind == "split.failed":
            self.num_failed += 1
        elif kind in ("split.choose", "slab.move", "slab.moved"):
            self.is_dynamic = True
            self._moved(kind, event)

    def _moved(self, kind: str, event: Event) -> None:
        if kind == "split.choose":
            choice = as_split_choice(event)
            self.change = split_in_words(choice) if choice is not None and choice.is_change else self.change
        elif kind == "slab.move":
            self._asked[event["slab"]] = event
        elif event["has_moved"]:
            asked = self._asked.pop(event["slab"], {})
            known = asked.get("after") == event["after"]
            origin = f"{asked['before']} to " if known else "to "
            why = f" ({asked['reason']})" if known else ""
            self.moves.append(f"{event['slab']} {origin}{event['after']}{why}")

    def split(self) -> dict[str, int]:
        """Returns the slabs by role; empty if no slab changes its role."""
        return dict(sorted(Counter(self.roles.values()).items())) if self.is_dynamic else {}

    def as_json(self) -> dict[str, Any]:
        """Returns the parts of `yatt status --json`."""
        return {
            "split": self.split(), "split_change": self.change, "last_moves": [*self.moves],
            "unfit_engines": dict(sorted(self.unfit.items())), "failed_choices": self.num_failed,
        }  # fmt: skip


def slabs_in_words(summary: Event) -> list[tuple[str, str]]:
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
