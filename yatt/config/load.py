"""Loads run files into a frozen config: strict, complete, and with helpful messages.

Strict: an unknown key is an error, so a typo never trains with a default. Complete: all mistakes in all files
are reported at once, because each further try may wait in the Slurm queue.
"""

import hashlib
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from datetime import date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from yatt.config.changing import sampling_keys
from yatt.config.check import broken_relations
from yatt.config.schema import RolloutSection, RunConfig
from yatt.config.sections.ranges import Free, Range, Text
from yatt.config.tree import (
    UNREADABLE,
    YamlNode,
    argument_tree,
    files_and_arguments,
    merge_trees,
    parse_tree,
    read_tree,
)
from yatt.credentials import HIDDEN, is_secret_name, redacted_text
from yatt.errors import ConfigError, Finding
from yatt.paths import RunPaths
from yatt.printable import printable

C = TypeVar("C")
_REFUSED = object()
MAX_SHOWN = 120
"""Maximum number of characters of a wrong value that a message repeats."""


def load_run_config(files: list[Path], arguments: list[str]) -> RunConfig:
    """Reads the first file and merges the others and the ``a.b=c`` arguments over it.

    Raises:
        ConfigError: names every wrong key, its file and line, the rule and what to write instead.
    """
    return load_as(RunConfig, files, arguments, broken_relations)


def load_command(
    file: Path,
    more: Sequence[str],
    rules: Callable[[RunConfig], Iterable[Finding]] = broken_relations,
) -> RunConfig:
    """Like `load_run_config`, with the words after the run file on a command line (`files_and_arguments`).

    Args:
        rules: the rules between sections.

    Raises:
        ConfigError: see `load_run_config`.
    """
    return load_as(RunConfig, *files_and_arguments(file, more), rules)


def load_as(
    cls: type[C], files: list[Path], arguments: list[str], rules: Callable[[C], Iterable[Finding]]
) -> C:
    """Like `load_run_config`, for any config dataclass; `rules` yields (key, mistake) between its sections.

    Raises:
        ConfigError: see `load_run_config`.
    """
    faults = list[Finding]()
    tree = read_parts(files, arguments, faults)
    return load_tree(cls, tree, ", ".join(map(str, files)), faults, rules)


def read_parts(files: list[Path], arguments: list[str], faults: list[Finding]) -> YamlNode:
    """Returns the tree of the first file, with the others and the ``a.b=c`` arguments merged over it.

    Raises:
        ConfigError: a file cannot be read, or is not YAML.
    """
    tree = read_tree(files[0], faults)
    for path in files[1:]:
        tree = merge_trees(tree, read_tree(path, faults))
    for argument in arguments:
        tree = merge_trees(tree, argument_tree(argument, faults))
    return tree


def load_over(config: C, arguments: list[str], rules: Callable[[C], Iterable[Finding]]) -> C:
    """Returns `config` with the values of the arguments, ``key=value`` each.

    Raises:
        ConfigError: see `load_run_config`.
    """
    faults = list[Finding]()
    tree = parse_tree(resolved_text(config), "as it was", faults)
    for argument in arguments:
        tree = merge_trees(tree, argument_tree(argument, faults))
    return load_tree(type(config), tree, "the arguments", faults, rules)  # which may have credentials


def load_resolved(path: Path) -> RunConfig:
    """Reads the resolved config of a run folder.

    Raises:
        ConfigError: see `load_run_config`.
    """
    return load_run_config([path], [])


def parse_resolved(text: str) -> RunConfig:
    """Reads what `resolved_text` returned.

    Raises:
        ConfigError: see `load_run_config`.
    """
    faults = list[Finding]()
    tree = parse_tree(text, "as it was", faults)
    return load_tree(RunConfig, tree, "the run's config", faults, broken_relations)


def load_attempt(paths: RunPaths, attempt: int) -> RunConfig:
    """Returns the config of one attempt: the run's config, unless its launcher wrote another one.

    Raises:
        ConfigError: see `load_run_config`.
    """
    own = paths.attempt_config(attempt)
    return load_resolved(own if own.exists() else paths.config)


def resolved_text(config: Any) -> str:
    """Returns the complete config as YAML, which `load_resolved` reads back to an equal config."""
    return yaml.safe_dump(plain_tree(asdict(config)), sort_keys=False, default_flow_style=False)


def without_secrets(config: RunConfig) -> RunConfig:
    """Returns the config as it may be shown elsewhere: without `logging.webhook_url`, which lets its reader
    post, and with the names only of `storage_options`, because a driver may have a credential under any."""

    def hidden(options: Mapping[str, Free]) -> dict[str, Free]:
        return dict.fromkeys(options, HIDDEN)

    origin, checkpoint = config.run.from_checkpoint, config.checkpoint
    origin = replace(origin, storage_options=hidden(origin.storage_options))
    return replace(
        config,
        run=replace(config.run, from_checkpoint=origin),
        checkpoint=replace(checkpoint, storage_options=hidden(checkpoint.storage_options)),
        logging=replace(config.logging, webhook_url=""),
    )


def config_hash(config: RunConfig) -> str:
    """Returns the first 16 hex digits of the SHA-256 of the resolved text."""
    return hashlib.sha256(resolved_text(config).encode()).hexdigest()[:16]


def samples_hash(config: RunConfig) -> str:
    """Returns the same for the parts that decide what samples and scores are: two attempts with equal hashes
    and weights may use each other's prompt groups. Without deterministic mode, sizes of engines are none of
    these parts, because they change the rounding of samples only; they may be changed after a lack of memory.
    """
    whole = asdict(config)
    parts = {name: whole[name] for name in ("data", "model", "rollout", "environment", "rewards", "genrms")}
    if not config.run.deterministic:
        parts["rollout"] = {k: parts["rollout"][k] for k in sampling_keys(RolloutSection)}
    parts["run"] = [config.run.id, config.run.seed, config.run.deterministic]
    return hashlib.sha256(yaml.safe_dump(plain_tree(parts), sort_keys=True).encode()).hexdigest()[:16]


def plain_tree(value: Any) -> Any:
    """Returns a value with lists instead of tuples, as YAML has it."""
    if isinstance(value, dict):
        return {key: plain_tree(child) for key, child in value.items()}
    return [plain_tree(child) for child in value] if isinstance(value, (tuple, list)) else value


def load_tree(
    cls: type[C],
    tree: YamlNode,
    name: str,
    faults: list[Finding],
    rules: Callable[[C], Iterable[Finding]],
) -> C:
    """Converts a tree to a config; `name` is that of its source, `faults` the mistakes found so far.

    Raises:
        ConfigError: see `load_run_config`.
    """
    config = _section(cls, tree, "", faults)
    if config is not _REFUSED and not faults:
        faults += [replace(fault, place=_place(tree, fault.key)) for fault in rules(config)]
    if faults:
        count = "1 mistake" if len(faults) == 1 else f"{len(faults)} mistakes"
        raise ConfigError(heading=f"{name}: {count}, nothing was started.", findings=map(_printable, faults))
    assert isinstance(config, cls), "no faults means a config"
    return config


def _printable(fault: Finding) -> Finding:
    """The mistake without credentials and control characters. A name and what follows it may be a secret."""
    named = f"{fault.key}: "
    says = redacted_text(f"{named}{fault.says}").removeprefix(redacted_text(named))
    place, key, says = (printable(redacted_text(part)) for part in (fault.place, fault.key, says))
    return replace(fault, place=place, key=key, says=says)


def _place(tree: YamlNode, key: str) -> str:
    """Returns the place of the deepest part of `key` that is written in a file."""
    node = tree
    for part in key.replace("]", "").replace("[", ".").split("."):
        child = node.value.get(part) if isinstance(node.value, dict) else None
        if isinstance(node.value, list) and part.isdigit() and int(part) < len(node.value):
            child = node.value[int(part)]
        if child is None:
            break
        node = child
    return node.at


def _section(cls: Any, node: YamlNode, key: str, faults: list[Finding]) -> Any:
    if node.value is UNREADABLE:
        return _REFUSED
    if not isinstance(node.value, dict):
        says = f"must be a section of keys, not {_told(key, node.value)}."
        faults.append(Finding(place=node.at, key=key or "the file", says=says))
        return _REFUSED
    hints, known = get_type_hints(cls, include_extras=True), {f.name: f for f in fields(cls)}
    before = len(faults)
    faults += [
        Finding(place=child.at, key=_join(key, name), says=_unknown(name, list(known)))
        for name, child in node.value.items()
        if name not in known
    ]
    values = {
        name: _value(hints[name], node.value[name], _join(key, name), faults)
        for name in known
        if name in node.value
    }
    faults += [
        Finding(place=node.at, key=_join(key, name), says="missing, and it has no default; write it.")
        for name, field in known.items()
        if name not in node.value and _is_required(field)
    ]
    if len(faults) > before or any(value is _REFUSED for value in values.values()):
        return _REFUSED
    try:
        return cls(**values)
    except ValueError as error:  # a rule of the section's own __post_init__
        faults.append(Finding(place=node.at, key=key or "the file", says=str(error)))
        return _REFUSED


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Known keys: {', '.join(known)}."
    return f"no such key. {hint}"


def _value(hint: Any, node: YamlNode, key: str, faults: list[Finding]) -> Any:
    """Converts `node` for a key of type `hint`; returns `_REFUSED` after reporting a mistake."""
    if node.value is UNREADABLE:
        return _REFUSED
    if is_dataclass(hint):
        return _section(hint, node, key, faults)
    hint = _choice(hint, node.value)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = _value(args[0], node, key, faults)
        return value if value is _REFUSED else _in_rules(value, args[1:], node, key, faults)
    if origin in (tuple, dict) and isinstance(node.value, list if origin is tuple else dict):
        return _values(origin, args, node, key, faults)
    value = _scalar(hint, node.value)
    if value is _REFUSED:
        says = f"{_told(key, node.value)} is not {_wanted(hint)}.{_yaml_trap(hint, node.value)}"
        faults.append(Finding(place=node.at, key=key, says=says))
    return value


def _values(origin: Any, args: tuple[Any, ...], node: YamlNode, key: str, faults: list[Finding]) -> Any:
    """Converts a list's or a dictionary's values."""
    if origin is tuple:
        listed = [_value(args[0], child, f"{key}[{i}]", faults) for i, child in enumerate(node.value)]
        return _REFUSED if any(value is _REFUSED for value in listed) else tuple(listed)
    named = {name: _value(args[1], child, _join(key, name), faults) for name, child in node.value.items()}
    return _REFUSED if any(value is _REFUSED for value in named.values()) else named


def _scalar(hint: Any, value: Any) -> Any:
    """Returns `value` as a `hint`; an int is also accepted as a float."""
    if get_origin(hint) is Literal:
        return value if value in get_args(hint) else _REFUSED
    if hint is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else _REFUSED
    return value if get_origin(hint) is None and type(value) is hint else _REFUSED


def _in_rules(value: Any, rules: tuple[Any, ...], node: YamlNode, key: str, faults: list[Finding]) -> Any:
    """Returns `value` if its rules allow it."""
    for limit in rules:
        if isinstance(limit, Range) and value not in limit:
            says, has_colon = f"is {_shown(value)}; write {limit}.", False
        elif isinstance(limit, Text) and (wrong := limit.fault(value)):
            says, has_colon = f"{_told(key, value)} {wrong}.", True
        else:
            continue
        faults.append(Finding(place=node.at, key=key, says=says, has_colon=has_colon))
        return _REFUSED
    return value


def _choice(hint: Any, value: Any) -> Any:
    """Selects the union member that fits the value's type; else returns the whole union."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next((choice for choice in get_args(hint) if type(value) is _plain_type(choice)), hint)


def _plain_type(hint: Any) -> Any:
    """Returns the type without its rules, as YAML has it."""
    origin = get_origin(hint) or hint
    return get_args(hint)[0] if origin is Annotated else list if origin is tuple else origin


def _told(key: str, value: Any) -> str:
    """Shows a value, unless the option or variable at `key` may be a credential."""
    section, _, name = key.rpartition(".")
    is_hidden = section.rpartition(".")[2] in ("storage_options", "env") and is_secret_name(name)
    return "the value" if is_hidden else _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    try:
        shown = repr(value)
    except ValueError:  # more digits than Python writes out
        return "a number of thousands of digits"
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


_WANTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_WANTED |= {list: "a list", dict: "a section"}


def _wanted(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_wanted, get_args(hint))))
    return _WANTED[_plain_type(hint)]


MOST_SHOWN_INT = 1e18
"""Larger ones are no mistake of form."""


def _yaml_trap(hint: Any, value: Any) -> str:
    """Returns a hint if YAML 1.1 has read the text as another type."""
    is_text = isinstance(value, str) and _is_number(value)
    if hint is int and (is_text or isinstance(value, float)) and abs(number := float(value)) < MOST_SHOWN_INT:
        return f" Write {int(number)}." if number.is_integer() else ""
    if hint in (float, int) and is_text:
        return f" YAML reads {value} as text; write {float(value):.1e}." if "e" in value.lower() else ""
    if get_origin(hint) is tuple and isinstance(value, str):
        return f" Write [{value}]."
    return _TEXT_TRAPS.get(type(value), "") if hint is str else ""


_TEXT_TRAPS: dict[type, str] = {
    int: " YAML reads 0123 as a number; put it in quotes.",
    bool: " YAML reads yes, no, on and off as true or false; put it in quotes.",
    date: " YAML reads it as a date; put it in quotes.",
    datetime: " YAML reads it as a time; put it in quotes.",
}


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
