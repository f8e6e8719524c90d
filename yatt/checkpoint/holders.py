"""Which run folder a checkpoint store serves now. No torch.

A run is its id, so a new folder with the same `run.id` takes the store over from a folder that is gone.
Whether that one is gone nobody can see from elsewhere: its run may go on. So each folder has an id of its own
(`RunPaths.folder_id`), and the store keeps a row of notes, ``holders/NUMBER.FOLDERID.json``, of which the
last counts. A start whose folder has not left the last one ends itself instead of fighting over it: when
it begins, and before each commit.

That is a courtesy, as the check of the attempt before a commit is: what a former holder commits in the moment
of the take-over is refused by the lineage (`yatt.core.claims`), for the newer attempt is of a newer attempt.
"""

import contextlib
import json
import socket
from dataclasses import dataclass

from yatt.checkpoint.store import Store
from yatt.errors import CheckpointError, StoreTakenOver, StoreUnreachable

HOLDERS = "holders"


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One note: its number, and the id of the folder that wrote it. Of two with one number one is greater."""

    number: int
    folder_id: str

    @property
    def name(self) -> str:
        """In the store."""
        return f"{HOLDERS}/{self.number:06d}.{self.folder_id}.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run folder is, for people."""

    folder: str
    host: str

    @classmethod
    def here(cls, folder: str) -> "Place":
        """Of a folder of this machine."""
        return cls(folder, socket.gethostname())

    def __str__(self) -> str:
        return f"{self.folder} of {self.host}" if self.folder else "another folder"


def holder_of(store: Store) -> Holder | None:
    """The last note; None if no folder has left one.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    parts = (name.removesuffix(".json").partition(".") for name in store.names(HOLDERS))
    return max((Holder(int(n), folder) for n, _, folder in parts if n.isdigit() and folder), default=None)


def place_of(store: Store, holder: Holder) -> Place:
    """What the note says of its folder; nothing if it cannot be read: only its name decides."""
    with contextlib.suppress(CheckpointError, StoreUnreachable, ValueError, TypeError, KeyError):
        noted = json.loads(store.read(holder.name))
        return Place(str(noted["folder"]), str(noted["host"]))
    return Place("", "")


def check_held(store: Store, folder_id: str, run_id: str) -> None:
    """Refuses to go on if another folder has taken the store over.

    Raises:
        StoreTakenOver: it is so.
        StoreUnreachable: the store does not answer.
    """
    holder = holder_of(store)
    if holder is not None and holder.folder_id != folder_id:
        raise StoreTakenOver(
            f"the checkpoint store was taken over by {place_of(store, holder)}, which has the same run.id "
            f"({run_id}) and goes on with this run. What this folder trained since its last checkpoint does "
            "not count, and it starts nothing any more. To go on elsewhere, start a new run.dir with "
            f"run.id: {run_id}."
        )


def hold(store: Store, folder_id: str, place: Place, *, takes_over: bool) -> Place | None:
    """Records that this folder has the store, unless it has it already.

    Args:
        takes_over: from whatever other folder has it; else only a store that no folder has is taken.

    Returns:
        The folder that had it, if another had.
    """
    before = holder_of(store)
    if before is not None and (before.folder_id == folder_id or not takes_over):
        return None
    mine = Holder(before.number + 1 if before else 1, folder_id)
    store.create(mine.name, json.dumps({"folder": place.folder, "host": place.host}).encode())
    return place_of(store, before) if before is not None else None
