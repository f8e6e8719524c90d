"""The process that makes a data file: fetches a data set of the hub, or applies the user's function to rows.

It runs the user's code and a library that imports much, so it is not the launcher's process. A file appears
whole, by a rename.
"""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yatt.adapters.data_rows import raw_rows
from yatt.adapters.trial import answer_trial
from yatt.adapters.user_module import load_module, where_raised
from yatt.errors import ConfigError, words_of


def make(kind: str, made: str, *arguments: str) -> None:
    """Makes the file `made`: fetches a data set (`fetch`) or applies a function to rows (`map`).

    Raises:
        ConfigError: it cannot be made.
    """
    target = Path(made)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        (_fetch if kind == "fetch" else _map)(unfinished, *arguments)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _fetch(target: Path, repository: str, config: str, split: str) -> None:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"hf:{repository}: needs the package datasets; pip install 'yatt[hub]'.") from error
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
        rows.to_parquet(str(target))
    except Exception as error:  # the library's own errors, the network's, and those of its drivers
        raise ConfigError(f"hf:{repository}: cannot be fetched: {words_of(error)}") from error


def _map(target: Path, source: str, path: str, name: str) -> None:
    function = getattr(load_module(Path(path), "data.map"), name, None)
    if not callable(function):
        raise ConfigError(f"data.map_function: {path} has no function {name!r}.")
    count = 0
    with target.open("x", encoding="utf-8") as file:
        for raw, place in raw_rows(Path(source)):
            for row in _rows_of(function, raw, place, path, name):
                file.write(_encoded(row, place, path, name) + "\n")
                count += 1
        file.flush()
        os.fsync(file.fileno())
    if not count:
        raise ConfigError(f"data.map: {name} of {path} left out every row of {source}.")


def _rows_of(
    function: Any, raw: dict[str, Any], place: str, path: str, name: str
) -> Iterator[dict[str, Any]]:
    try:
        found = function(raw)
    except BaseException as error:  # a user's function can raise anything
        where = where_raised(error, Path(path))
        raise ConfigError(f"data.map: {where}: {name} failed on {place}: {words_of(error)}") from error
    for row in () if found is None else found if isinstance(found, list) else [found]:
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError(
                f"data.map: {name} of {path} returned {kind} for {place}; return a dict, a list of them, or "
                "None."
            )
        yield row


def _encoded(row: dict[str, Any], place: str, path: str, name: str) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode()  # no lone surrogates
        return text
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"data.map: {name} of {path} returned for {place} what JSON does not have: {error}."
        ) from error


if __name__ == "__main__":
    answer_trial(make)
