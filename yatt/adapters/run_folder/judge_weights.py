"""Records in the run folder of the weights that a GenRM had, and since which iteration. Everything blocks."""

import os
from pathlib import Path

import msgspec

from yatt.adapters.files.files import create_exclusively, make_within, read_record
from yatt.core.phases.judge_weights import (
    is_weights_folder,
    record_iteration,
    record_name,
)
from yatt.errors import WorkerFailed
from yatt.paths import RunPaths
from yatt.records.weights import ChosenWeights


def recorded_choices(folder: Path) -> list[int]:
    """Returns the first iteration of each choice that is recorded.

    Raises:
        OSError: the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(begins for name in names if (begins := record_iteration(name)) is not None)


def read_choice(folder: Path, begins: int) -> ChosenWeights:
    """Reads the record of one choice.

    Raises:
        WorkerFailed: it is damaged.
        OSError: it cannot be read.
    """
    path = folder / record_name(begins)
    try:
        found = msgspec.json.decode(read_record(path), type=ChosenWeights)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkerFailed(f"{path} is damaged; remove it, and weights are chosen anew ({error})") from error
    if found.begins != begins or (found.folder and not is_weights_folder(found.folder)):
        raise WorkerFailed(f"{path} is not what yatt wrote; remove it, and weights are chosen anew")
    return found


def record_choice(paths: RunPaths, genrm: str, chosen: ChosenWeights) -> ChosenWeights:
    """Records a choice, unless there is one for its iteration; returns the one that is recorded.

    Raises:
        WorkerFailed: that one is damaged.
        OSError: it cannot be written or read.
    """
    folder = paths.judge_weights(genrm)
    make_within(paths.root, folder)
    if create_exclusively(folder / record_name(chosen.begins), msgspec.json.encode(chosen)):
        return chosen
    return read_choice(folder, chosen.begins)


def newest_folder(paths: RunPaths, genrm: str, model: str) -> str:
    """Returns the folder of the newest choice: `model` if there is none, or if it says so, or if the folder
    is gone (then the leader ends the attempt and says so).

    Raises:
        WorkerFailed, OSError: as `read_choice`.
    """
    folder = paths.judge_weights(genrm)
    begins = recorded_choices(folder)
    found = folder_of_choice(paths, genrm, read_choice(folder, begins[-1]), model) if begins else model
    return found if Path(found).is_dir() else model


def folder_of_choice(paths: RunPaths, genrm: str, chosen: ChosenWeights, model: str) -> str:
    """Returns the Hugging Face folder with the chosen weights; `model` if none were taken."""
    return str(paths.judge_weights(genrm) / chosen.folder) if chosen.folder else model
