"""The process that makes a data file: fetches a data set of the hub, or applies the user's function to rows.

It runs the user's code and a library that imports much, so it is not the launcher's process. A file appears
whole, by a rename.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.user_module import load_module, where_raised
from yatt.adapters.processes.trial import answer_trial
from yatt.errors import ConfigError, words_of
from yatt.launch.resolve.fetched import Fetched, fetched_before, note_fetched
from yatt.launch.resolve.making_media import MediaMaking, write_with_references

ASK_S = 20.0
"""Longest wait for the hub's answer about a data set's commit."""


def make_data(kind: str, made: str, *arguments: str) -> None:
    """Fetches a data set (`fetch`), puts references in place of pictures (`media`), or applies a function to
    the rows of a file (`map`).

    Raises:
        ConfigError: it cannot be made.
    """
    if kind == "fetch":
        _fetch(made, *arguments)
    elif kind == "media":
        source, asked = arguments
        making = MediaMaking(**json.loads(asked))
        _whole(Path(made), partial(write_with_references, Path(source), making))
    else:
        source, path, name = arguments
        _whole(Path(made), partial(_map, source, path, name))


def unfinished_name(target: Path, launcher: int) -> str:
    """Returns how the names of a file begin that is being made for this process, by its pid."""
    return f".{target.name}.{launcher}-"


def _whole(target: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with the path of a file, which then appears as `target`."""
    unfinished = target.with_name(f"{unfinished_name(target, os.getppid())}{secrets.token_hex(4)}")
    try:
        write(unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _fetch(made: str, entry: str, repository: str, revision: str, config: str, split: str) -> None:
    """Fetches a data set, unless this commit of it is there, and notes it.

    Args:
        made: path of the entry's files, without their ends.
        repository: of the hub, or a folder, which has no commits and is read once.
    """
    stem = Path(made)
    earlier = fetched_before(stem)
    if earlier is not None and (repository.startswith("/") or earlier.commit == revision):
        return
    commit, unasked = "", ""
    try:
        commit = _commit(entry, repository, revision)
    except ConfigError as error:
        if earlier is not None:
            note_fetched(stem, replace(earlier, unasked=str(error)))
            return
        unasked = str(error)
    target = stem.with_name(f"{stem.name}{commit and '-'}{commit[:12]}.parquet")
    if not target.is_file():  # without an answer, the library may have it in its own cache
        _whole(target, partial(_download, entry, repository, commit or revision, config, split))
    note_fetched(stem, Fetched(path=target, entry=entry, commit=commit, unasked=unasked))


def _commit(entry: str, repository: str, revision: str) -> str:
    """Returns the commit of a repository of the hub; empty for a folder.

    Raises:
        ConfigError: the hub does not say it.
    """
    if repository.startswith("/"):
        return ""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{entry}: needs the package datasets; pip install 'yatt[hub]'.") from error
    try:
        about = huggingface_hub.HfApi().dataset_info(repository, revision=revision or None, timeout=ASK_S)
    except Exception as error:  # the library's own errors and the network's
        raise ConfigError(f"{entry}: cannot be fetched: {words_of(error)}") from error
    return str(about.sha or revision)


def _download(entry: str, repository: str, commit: str, config: str, split: str, target: Path) -> None:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{entry}: needs the package datasets; pip install 'yatt[hub]'.") from error
    try:
        rows = datasets.load_dataset(repository, config or None, split=split, revision=commit or None)
        rows.to_parquet(str(target))
    except Exception as error:  # the library's own errors, the network's, and those of its drivers
        raise ConfigError(f"{entry}: cannot be fetched: {words_of(error)}") from error


def _map(source: str, path: str, name: str, target: Path) -> None:
    function = getattr(load_module(Path(path), "data.map"), name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}.", key="data.map_function")
    count = 0
    with target.open("x", encoding="utf-8") as file:
        for raw, place in raw_rows(Path(source)):
            for row in _rows_of(function, raw, place, path, name):
                file.write(_encoded(row, place, path, name) + "\n")
                count += 1
        file.flush()
        os.fsync(file.fileno())
    if not count:
        raise ConfigError(f"{name} of {path} left out every row of {source}.", key="data.map")


def _rows_of(
    function: Any, raw: dict[str, Any], place: str, path: str, name: str
) -> Iterator[dict[str, Any]]:
    try:
        found = function(raw)
    except BaseException as error:  # a user's function can raise anything
        where = where_raised(error, Path(path))
        raise ConfigError(f"{where}: {name} failed on {place}: {words_of(error)}", key="data.map") from error
    for row in () if found is None else found if isinstance(found, list) else [found]:
        if not isinstance(row, dict):
            kind = type(row).__name__
            says = f"{name} of {path} returned {kind} for {place}; return a dict, a list of them, or None."
            raise ConfigError(says, key="data.map")
        yield row


def _encoded(row: dict[str, Any], place: str, path: str, name: str) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode()  # no lone surrogates
        return text
    except (ValueError, TypeError, RecursionError) as error:
        says = f"{name} of {path} returned for {place} what JSON does not have: {error}."
        raise ConfigError(says, key="data.map") from error


if __name__ == "__main__":
    answer_trial(make_data)
