"""The run folder that a checkpoint store serves now. No torch.

A run is identified by its id, so a new folder with the same `run.id` takes the store over from a lost folder.
Other machines cannot check whether that folder is lost: its run may continue. So each folder has an id of its
own (`RunPaths.folder_id`), and the store keeps a sequence of notes, ``holders/NUMBER.FOLDERID.json``; the
last one is valid. A start checks when it begins and before each commit; it ends if the last note is not of
its folder.

Like the check of the attempt before a commit, this is only an early check. A commit of a former holder during
the take-over is refused by the lineage (`yatt.core.attempts.claims`), since the new folder has a newer
attempt.
"""

import contextlib
import json
import re
import socket
from dataclasses import dataclass

from yatt.checkpoint.store.store import Store
from yatt.errors import CheckpointError, StoreTakenOver, StoreUnreachable

HOLDERS = "holders"
MOST_HOLDER_BYTES = 1 << 14
"""Of a note; its folder is repeated in messages."""

_NOTE = re.compile(r"([0-9]{6,15})\.([A-Za-z0-9_-]{1,64})\.json")


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One note: its number, and the id of its folder, which orders notes with equal numbers."""

    number: int
    folder_id: str

    @property
    def name(self) -> str:
        """The note's name in the store."""
        return f"{HOLDERS}/{self.number:06d}.{self.folder_id}.json"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run folder, for people."""

    folder: str
    host: str

    @classmethod
    def here(cls, folder: str) -> "Place":
        """Returns the place of a folder of this machine."""
        return cls(folder, socket.gethostname())

    def __str__(self) -> str:
        return f"{self.folder} of {self.host}" if self.folder else "another folder"


def holder_of(store: Store) -> Holder | None:
    """Returns the last note; None if there is none.

    Raises:
        StoreUnreachable: the store does not respond.
    """
    found = map(_NOTE.fullmatch, store.names(HOLDERS))
    return max((Holder(int(note[1]), note[2]) for note in found if note), default=None)


def place_of(store: Store, holder: Holder) -> Place:
    """Returns the place in a note; empty if it cannot be read, since only the note's name decides."""
    with contextlib.suppress(
        CheckpointError, StoreUnreachable, ValueError, TypeError, KeyError, RecursionError
    ):
        noted = json.loads(store.read(holder.name, most_bytes=MOST_HOLDER_BYTES))
        return Place(str(noted["folder"]), str(noted["host"]))
    return Place("", "")


def check_held(store: Store, folder_id: str, run_id: str) -> None:
    """Checks that no other folder has taken the store over.

    Raises:
        StoreTakenOver: another folder has.
        StoreUnreachable: the store does not respond.
    """
    holder = holder_of(store)
    if holder is not None and holder.folder_id != folder_id:
        raise StoreTakenOver(
            f"the checkpoint store was taken over by {place_of(store, holder)}, which has the same run.id "
            f"({run_id}) and goes on with this run. What this folder trained since its last checkpoint does "
            "not count, and it starts nothing any more. To go on elsewhere, start a new run.dir with "
            f"run.id: {run_id}."
        )


def hold_store(store: Store, folder_id: str, place: Place, *, takes_over: bool) -> Place | None:
    """Records that this folder holds the store, unless it does already.

    Args:
        takes_over: take the store over from another folder; else only a store without a holder is taken.

    Returns:
        The folder that held it, if another did.
    """
    before = holder_of(store)
    if before is not None and (before.folder_id == folder_id or not takes_over):
        return None
    mine = Holder(before.number + 1 if before else 1, folder_id)
    store.create(mine.name, json.dumps({"folder": place.folder, "host": place.host}).encode())
    return place_of(store, before) if before is not None else None
