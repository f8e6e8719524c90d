"""Which weights a GenRM has in an iteration, if it takes those of another run (`genrms[].refresh`). Pure.

Every `every` iterations, from the first on, a choice is due. It is recorded before any question is asked with
it, and holds until the next recorded one, so that an attempt which samples an iteration again asks the same
judge.
"""

import hashlib
import re
from collections.abc import Collection, Mapping

from yatt.core.attempts.claims import Commit

_NAME = re.compile(r"(\d{8,15})\.json")
_FOLDER = re.compile(r"\d{8,15}\.\d{6,15}-[0-9a-f]{12}")


def is_choice_due(iteration: int, every: int, recorded: Collection[int]) -> bool:
    """Whether weights are to be chosen before an iteration is sampled.

    Args:
        recorded: first iterations of the choices so far.
    """
    is_first = not any(begin <= iteration for begin in recorded)
    return iteration not in recorded and (is_first or (iteration - 1) % every == 0)


def choice_in_force(iteration: int, recorded: Collection[int]) -> int:
    """Returns the first iteration of the choice that holds in an iteration. One is recorded."""
    return max(begin for begin in recorded if begin <= iteration)


def record_name(iteration: int) -> str:
    """Returns the name of a choice's record, by the first iteration that it holds in."""
    return f"{iteration:08d}.json"


def record_iteration(name: str) -> int | None:
    """Inverse of `record_name`; None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and record_name(int(found[1])) == name else None


def weights_folder(commit: Commit, run_id: str) -> str:
    """Returns the name of the folder with a commit's weights. A store may be emptied and used by another run;
    `run_id` may be anything."""
    digest = hashlib.sha256(run_id.encode(errors="replace")).hexdigest()[:12]
    return f"{commit.iteration:08d}.{commit.attempt:06d}-{digest}"


def is_weights_folder(name: str) -> bool:
    """Whether `weights_folder` could have returned this name."""
    return _FOLDER.fullmatch(name) is not None


def needed_folders(folders: Mapping[int, str], oldest: int) -> set[str]:
    """Returns the folders of choices that some attempt may still need.

    Args:
        folders: by the first iteration of each choice; empty: the GenRM's own model.
        oldest: the first iteration that may be sampled again.
    """
    begins = [begin for begin in folders if begin > oldest]
    if any(begin <= oldest for begin in folders):
        begins.append(choice_in_force(oldest, folders))
    return {folders[begin] for begin in begins} - {""}
