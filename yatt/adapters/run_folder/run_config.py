"""The config of a run and its changes, in the run folder.

`config.yaml` is written when the run is started, and not again. A sealed record beside it has the same text
and the config as it is now, so that an edit of `config.yaml` is noticed, and a change is whole or absent.
Each attempt has the config of its start (`RunPaths.attempt_config`).
"""

from dataclasses import dataclass
from typing import Any

from yatt.adapters.files.files import read_or_none, sealed_record, unsealed_any, write_atomically
from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.clock import wall_iso
from yatt.config.changing import Change, changed_keys
from yatt.config.load import load_resolved, parse_resolved, resolved_text
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.paths import RunPaths
from yatt.plain_files import read_plain

MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Changed:
    """Changes that were made together.

    Attributes:
        after: newest attempt before them.
        wall: time.
        words: a sentence per key.
    """

    after: int
    wall: str
    words: tuple[str, ...]


def load_run(paths: RunPaths) -> RunConfig:
    """Returns the config that the run's next attempt has, before a site's settings.

    Raises:
        ConfigError: it cannot be read.
        OSError: the run folder does not answer.
    """
    found = _record(paths)
    if found is None:
        return load_resolved(paths.config)
    try:
        return parse_resolved(found["config"])
    except ConfigError:  # written by another version: the user may have edited config.yaml for this one
        return load_resolved(paths.config)


def seal_config(paths: RunPaths) -> None:
    """Writes the record of a run that has none: a new one, or one of an older version.

    Raises:
        OSError: the run folder does not answer.
    """
    if _record(paths) is None:
        text = paths.config.read_text()
        write_atomically(
            paths.sealed_config, sealed_record({"original": text, "config": text, "changes": []}, 0)
        )


def check_unedited(paths: RunPaths) -> None:
    """Refuses a run whose `config.yaml` has other values than at its start.

    Raises:
        ConfigError: names every key that differs.
        OSError: the run folder does not answer.
    """
    found = _record(paths)
    data = read_or_none(paths.config)
    if found is None or data is None or data == found["original"].encode():
        return
    try:
        original = parse_resolved(found["original"])
    except ConfigError:
        return  # as in `load_run`
    if listed := changed_keys(original, load_resolved(paths.config)):
        lines = "\n".join(f"  {change.in_words()}" for change in listed)
        raise ConfigError(
            f"{paths.config} was edited after the run was started:\n{lines}\nA run keeps its config, so this "
            f"has no effect. Undo the edit. To change a key, run `yatt resume {paths.root} KEY=VALUE`."
        )


def record_changes(paths: RunPaths, config: RunConfig, listed: list[Change]) -> None:
    """Makes `config` the run's config from the next attempt on.

    Raises:
        OSError: the run folder does not answer; nothing was changed.
    """
    seal_config(paths)
    found = _record(paths)
    assert found is not None, "it was sealed"
    after = newest_attempt(paths)
    one = {"after": after, "wall": wall_iso(), "words": [change.in_words() for change in listed]}
    content = found | {"config": resolved_text(config), "changes": [*found["changes"], one]}
    write_atomically(paths.sealed_config, sealed_record(content, after))


def changes_of(paths: RunPaths) -> list[Changed]:
    """Returns all changes of a run, oldest first.

    Raises:
        ConfigError, OSError: see `load_run`.
    """
    listed = (_record(paths) or {}).get("changes", [])
    return [Changed(one["after"], one["wall"], tuple(one["words"])) for one in listed]


def _record(paths: RunPaths) -> dict[str, Any] | None:
    data = read_plain(paths.sealed_config, MAX_RECORD_BYTES)
    if data is None:
        return None
    if (found := unsealed_any(data)) is None:
        raise ConfigError(
            f"{paths.sealed_config} is damaged. Remove it: the run then has the config in config.yaml, "
            "without later changes, which you can make again with `yatt resume`."
        )
    return found
