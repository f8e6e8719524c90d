"""A config with the place of each value: file and line, argument, or default."""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from yatt.config.check import broken_relations
from yatt.config.load import load_tree, plain_tree, read_parts
from yatt.config.schema import RunConfig
from yatt.config.tree import YamlNode
from yatt.errors import Finding
from yatt.printable import printable

DEFAULT = "default"
FILLED_IN = "filled in by run.kind"


def load_with_origins(files: list[Path], arguments: list[str]) -> tuple[RunConfig, dict[str, str]]:
    """Returns the config, and where each of its values was written, by key (`rewards.0.path`).

    Raises:
        ConfigError: see `yatt.config.load.load_run_config`.
    """
    faults = list[Finding]()
    tree = read_parts(files, arguments, faults)
    config = load_tree(RunConfig, tree, ", ".join(map(str, files)), faults, broken_relations)
    usual, values = dict(_leaves(_defaults(RunConfig), "")), dict(_leaves(asdict(config), ""))
    origins = dict(_origins(asdict(config), tree, ""))
    for key, at in origins.items():
        if at == DEFAULT and values.get(key) != usual.get(key, values.get(key)):
            origins[key] = FILLED_IN
    return config, origins


def origins_of_run(config: RunConfig) -> dict[str, str]:
    """Returns `DEFAULT` for the keys of a run's config that have their default, and else the file, by key."""
    usual = dict(_leaves(_defaults(RunConfig), ""))
    found = {}
    for key, value in _leaves(asdict(config), ""):
        any_item = re.sub(r"\.[0-9]+\.", ".*.", key)
        is_empty = value == [] and any(name.startswith(f"{key}.*.") for name in usual)
        is_usual = is_empty or (any_item in usual and usual[any_item] == value)
        found[key] = DEFAULT if is_usual else "config.yaml"
    return found


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is None:
        yield key, plain_tree(value)
        return
    for name, part in parts:
        yield from _leaves(part, f"{key}.{name}" if key else name)


def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the defaults of a section's keys; a required key is missing. Those of a list's items have the
    index `*`."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        field = cls.__dataclass_fields__[name]
        item = next((arg for arg in get_args(hint) if is_dataclass(arg)), None)
        if is_dataclass(hint):
            found[name] = _defaults(hint)
        elif item is not None:
            found[name] = {"*": _defaults(item)}
        elif field.default is not MISSING:
            found[name] = field.default
        elif field.default_factory is not MISSING:
            found[name] = field.default_factory()
    return found


def _origins(value: Any, node: YamlNode | None, key: str) -> Iterator[tuple[str, str]]:
    parts = _parts(value)
    if parts is None:
        yield key, node.at if node is not None else DEFAULT
        return
    for name, part in parts:
        yield from _origins(part, _child(node, name), f"{key}.{name}" if key else name)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the keys of a section, or the items of a list of sections; None of a plain value."""
    if isinstance(value, dict) and value:
        return list(value.items())
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, dict) for item in value):
        return [(str(index), item) for index, item in enumerate(value)]
    return None


def _child(node: YamlNode | None, name: str) -> YamlNode | None:
    if node is None:
        return None
    if isinstance(node.value, list):
        item: YamlNode = node.value[int(name)]
        return item
    found = node.value.get(name) if isinstance(node.value, dict) else None
    return found if isinstance(found, YamlNode) else None


def annotated_yaml(config: RunConfig, origins: dict[str, str], *, only_written: bool) -> str:
    """Returns the config as YAML, with the place of each value in a comment; it loads to the same config.

    Args:
        only_written: leave out values that are defaults.
    """
    lines = list(_lines(asdict(config), origins, "", only_written))
    width = min(max((len(text) for text, _ in lines), default=0), 60)
    return "".join(f"{text.ljust(width)}  # {printable(at)}\n" if at else f"{text}\n" for text, at in lines)


def _lines(value: Any, origins: dict[str, str], key: str, only_written: bool) -> Iterator[tuple[str, str]]:
    """Yields lines of YAML, each with the place of its value; headings of sections have none."""
    for name, part in _parts(value) or ():
        inner = f"{key}.{name}" if key else name
        label = "-" if isinstance(value, (list, tuple)) else f"{_flow(name)}:"
        if _parts(part) is None:
            if not (only_written and origins[inner] == DEFAULT):
                yield f"{label} {_flow(part)}", origins[inner]
            continue
        below = list(_lines(part, origins, inner, only_written))
        if label == "-" and below:
            yield f"- {below[0][0]}", below[0][1]
            yield from ((f"  {text}", at) for text, at in below[1:])
        elif below:
            yield label, ""
            indent = "" if isinstance(part, (list, tuple)) else "  "
            yield from ((f"{indent}{text}", at) for text, at in below)


def _flow(value: Any) -> str:
    """Returns a value as YAML on one line."""
    text: str = yaml.safe_dump(plain_tree(value), default_flow_style=True, sort_keys=False, width=10**9)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if "\n" not in text else json.dumps(plain_tree(value), ensure_ascii=False)
