"""YAML text to a tree of values that know where they were written.

Overlays and ``a.b=c`` arguments are merged here, before anything is interpreted, so that a later
error names the file and line (or argument) the value really came from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from yatt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place: ``run.yaml:12`` or ``argument 'a.b=c'``."""

    value: Any  # dict[str, Node], list[Node] or a YAML scalar
    at: str


def read_tree(path: Path, faults: list[str]) -> Node:
    """Parse one file. Duplicate keys are faults; the first one is kept.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 ({error.reason}).") from error
    return parse_tree(text, str(path), faults)


def parse_tree(text: str, name: str, faults: list[str]) -> Node:
    """Parse `text`; places are called ``name:line``.

    Raises:
        ConfigError: not YAML.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML. {_yaml_error(error)}") from error
    if root is None:
        return Node({}, f"{name}:1")
    return _convert(root, name, yaml.SafeLoader(""), faults)


def _yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"Line {mark.line + 1}: {problem}." if mark is not None else f"{problem}."


def _convert(node: yaml.Node, name: str, loader: yaml.SafeLoader, faults: list[str]) -> Node:
    at = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(item, name, loader, faults) for item in node.value], at)
    if not isinstance(node, yaml.MappingNode):
        return Node(_scalar(node, loader), at)
    out: dict[str, Node] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node))
        if key in out:
            line = key_node.start_mark.line + 1
            faults.append(
                f"{name}:{line}: key '{key}' is written twice (first at {out[key].at}); delete one."
            )
            continue
        out[key] = _convert(value_node, name, loader, faults)
    return Node(out, at)


def _scalar(node: yaml.Node, loader: yaml.SafeLoader) -> Any:
    """As YAML 1.1 reads it, but 4:00:00 is text: YAML 1.1 makes 14400 of it, which no limit here is in."""
    value = loader.construct_object(node)
    return node.value if ":" in str(node.value) and isinstance(value, (int, float)) else value


def merge(base: Node, over: Node) -> Node:
    """`over` wins; sections are merged key by key, lists and scalars are replaced whole."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, base.at)


def argument_tree(argument: str, faults: list[str]) -> Node:
    """One ``a.b=c`` as a tree; c is YAML.

    Raises:
        ConfigError: no '=' in it, an empty key, or a value that is not YAML.
    """
    path, sign, text = argument.partition("=")
    if not sign or not all(path.split(".")):
        raise ConfigError(f"argument '{argument}': write section.key=value.")
    at = f"argument '{argument}'"
    node = _relocate(parse_tree(text, at, faults), at)
    if text.strip() == "":
        node = Node("", at)
    for key in reversed(path.split(".")):
        node = Node({key: node}, at)
    return node


def _relocate(node: Node, at: str) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _relocate(child, at) for key, child in node.value.items()}, at)
    if isinstance(node.value, list):
        return Node([_relocate(child, at) for child in node.value], at)
    return Node(node.value, at)
