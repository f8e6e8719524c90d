"""Names in a checkpoint store: the forms that yatt writes, and the only ones that it believes. Pure.

A store may come from a stranger: whatever it contains, a name from it leads to no place outside of it.
"""

import re

from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError
from yatt.printable import printable

MANIFESTS, ADOPTED = "manifests", "adopted"
MOST_NAME_CHARACTERS = 512
MOST_ATTEMPTS = 10**9
"""No run has more: a name with a higher number is no start's, and a start after it would have no name."""

_NUMBER = r"(0|[1-9][0-9]{0,14})"
_STEP_FOLDER = re.compile(rf"global_step_{_NUMBER}")
_SAVE_FOLDER = re.compile(rf"global_step_{_NUMBER}/([0-9]{{6,15}})-[0-9a-f]{{8}}")
_SAVED_FILE = re.compile(r"rank-[0-9]{5,9}(-[0-9]{5,9})?\.safetensors|node-[0-9]{5,9}\.groups")
_MANIFEST = re.compile(r"manifests/([0-9]{8,15})\.([0-9]{6,15})\.json")
_ADOPTION = re.compile(r"adopted/([0-9]{6,15})\.json")


def manifest_name(commit: Commit) -> str:
    """Returns the name of a commit's manifest in the store."""
    return f"{MANIFESTS}/{commit.iteration:08d}.{commit.attempt:06d}.json"


def manifest_commit(name: str) -> Commit | None:
    """Inverse of `manifest_name`; None for any other name."""
    found = _MANIFEST.fullmatch(name)
    commit = Commit(int(found[1]), int(found[2])) if found else None
    return commit if commit is not None and manifest_name(commit) == name else None


def named_commit(name: str) -> Commit:
    """Like `manifest_commit`.

    Raises:
        CheckpointError: it is not the name of a manifest.
    """
    if (commit := manifest_commit(name)) is None:
        raise CheckpointError(f"'{_shown(name)}' is not a name of a manifest")
    return commit


def adoption_name(attempt: int) -> str:
    """Returns the name of the record of the commit that a start resumed from."""
    return f"{ADOPTED}/{attempt:06d}.json"


def adoption_attempt(name: str) -> int | None:
    """Inverse of `adoption_name`; None for any other name."""
    found = _ADOPTION.fullmatch(name)
    return int(found[1]) if found and adoption_name(int(found[1])) == name else None


def step_folder(iteration: int) -> str:
    """Returns the folder of an iteration's saves."""
    return f"global_step_{iteration}"


def step_iteration(folder: str) -> int | None:
    """Inverse of `step_folder`; None for any other name."""
    found = _STEP_FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def save_folder(commit: Commit, nonce: str) -> str:
    """Returns the folder of one save.

    Args:
        nonce: eight hexadecimal digits; no two tries of an attempt have the same.
    """
    return f"{step_folder(commit.iteration)}/{commit.attempt:06d}-{nonce}"


def saved_commit(folder: str) -> Commit | None:
    """Returns the commit that a save's folder is for; None for any other name."""
    found = _SAVE_FOLDER.fullmatch(folder)
    return Commit(int(found[1]), int(found[2])) if found else None


def shard_path(folder: str, rank: int, index: int) -> str:
    """Returns the name of a shard file of a save."""
    return f"{folder}/rank-{rank:05d}-{index:05d}.safetensors"


def node_state_path(folder: str, node: int) -> str:
    """Returns the name of a controller's file of a save."""
    return f"{folder}/node-{node:05d}.groups"


def is_saved_file(path: str) -> bool:
    """Whether this is the name of a file of a save."""
    folder, _, name = path.rpartition("/")
    return saved_commit(folder) is not None and _SAVED_FILE.fullmatch(name) is not None


def path_fault(path: str, commit: Commit) -> str:
    """Returns why this is no name of a file of this commit; empty if it is one."""
    if is_saved_file(path) and saved_commit(path.rpartition("/")[0]) == commit:
        return ""
    written = shard_path(save_folder(commit, "0123abcd"), 0, 0)
    return f"its file '{_shown(path)}' is not named as this checkpoint's files are, for example {written}"


def check_name(name: str) -> None:
    """Checks that a name stays in its store, whatever the store is made of.

    Raises:
        CheckpointError: it is empty, absolute or too long, or has a part that is empty, `.` or `..`, or a
            character that is not printable.
    """
    parts = name.split("/")
    if len(name) > MOST_NAME_CHARACTERS or not name.isprintable() or not {"", ".", ".."}.isdisjoint(parts):
        raise CheckpointError(f"'{_shown(name)}' is not a name in a checkpoint store")


def _shown(name: str) -> str:
    return printable(name if len(name) <= 80 else f"{name[:77]}...")
