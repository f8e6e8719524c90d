"""Which keys of a run may change when it is resumed: their sections say so (`sections.ranges.Changing`)."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from yatt.config.schema import RunConfig
from yatt.config.sections.ranges import OPERATIONAL, Changing, Kind
from yatt.credentials import is_secret_name


@dataclass(frozen=True, slots=True)
class Change:
    """One key with another value; list items have their index in the key, as `rewards.0.timeout_s`."""

    key: str
    was: Any
    now: Any

    def in_words(self) -> str:
        """A sentence with both values; without them where they may be credentials."""
        if "storage_options" in self.key or is_secret_name(self.key) or self.key == "logging.webhook_url":
            return f"{self.key} differs"
        return f"{self.key}: was {self.was!r}, is {self.now!r}"


def change_kind(key: str) -> Kind:
    """Returns the kind of a key, as in `Change.key`."""
    hint: Any = RunConfig
    parts = key.split(".")
    for number, part in enumerate(parts):
        hint, _ = _split(hint)
        if get_origin(hint) is tuple:
            hint = get_args(hint)[0]
            continue
        hint = _hints(hint).get(part, str) if isinstance(hint, type) and is_dataclass(hint) else str
        inner, fact = _split(hint)
        is_whole = is_dataclass(inner) and number + 1 == len(parts)  # what is said of it is said of its keys
        if fact is not None and not is_whole:
            return fact.kind
    return "mathematical"


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _split(hint: Any) -> tuple[Any, Changing | None]:
    """Returns a key's type, and whether it may change."""
    if get_origin(hint) is not Annotated:
        return hint, None
    inner, *facts = get_args(hint)
    return inner, next((fact for fact in facts if isinstance(fact, Changing)), None)


def sampling_keys(cls: type) -> set[str]:
    """Returns the keys of a section of engines that decide what samples are, but for their rounding."""
    found = {name: _split(hint)[1] for name, hint in _hints(cls).items()}
    return {name for name, fact in found.items() if fact is None or not (fact.is_size or fact == OPERATIONAL)}


def changed_keys(before: RunConfig, now: RunConfig) -> list[Change]:
    """Returns every key whose value differs, in the order of the run file. `data.weights` differs if a data
    file has another weight, not if the file has another path."""
    listed = _changes(asdict(before), asdict(now), "")
    if _weights(before) != _weights(now):
        return list(listed)
    return [change for change in listed if change.key.split(".")[:2] != ["data", "weights"]]


def _weights(config: RunConfig) -> list[float]:
    return [config.data.weights.get(file, 1.0) for file in config.data.train_files]


def is_allowed(change: Change, *, deterministic: bool) -> bool:
    """Whether a run may be resumed with this change."""
    if change.key.endswith(".engine") and "scripted" in (change.was, change.now):
        return False  # that engine has no model
    kind = change_kind(change.key)
    return kind == "operational" or (kind == "layout" and not deterministic)


def _changes(before: Any, now: Any, key: str) -> Iterator[Change]:
    if before == now:
        return
    pairs = _pairs(before, now)
    if pairs is None or change_kind(key) != "mathematical":
        yield Change(key, before, now)
        return
    for name, (was, value) in pairs.items():
        yield from _changes(was, value, f"{key}.{name}" if key else name)


def _pairs(before: Any, now: Any) -> dict[str, tuple[Any, Any]] | None:
    """Returns the parts of two sections or lists of sections, by name; None if they have others."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        return {name: (before[name], now[name]) for name in before}
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        is_sections = all(isinstance(item, Mapping) for item in (*before, *now))
        return {str(i): pair for i, pair in enumerate(zip(before, now, strict=True))} if is_sections else None
    return None
