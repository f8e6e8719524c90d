"""Parses YAML text into a tree of values, each with the place where it was written.

Overlays and ``a.b=c`` arguments are merged here, so that a later error names the file and line (or argument)
of the value. A file is not trusted: its size, its nesting depth and the expansion of its aliases are limited,
and a value that YAML cannot read is reported like any other mistake.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from yatt.credentials import is_secret_name, redacted_text
from yatt.errors import ConfigError, Finding
from yatt.printable import printable

MAX_BYTES = 1 << 19
MAX_DEPTH = 24
MAX_VALUES = 50_000
"""Maximum number of values of one file, with aliases expanded."""

UNREADABLE: Final = object()
"""Placeholder for a value whose mistake is already reported."""

_KEY = re.compile(r"(?!.*\.(ya?ml|json)$)[a-z][a-z0-9_]*([.\[][a-z0-9_]+\]?)+")
"""What looks like a config key: words with dots."""

_SCALAR_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""Errors of PyYAML's constructors for texts that do not fit their tag."""


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its place: ``run.yaml:12`` or ``argument 'a.b=c'``."""

    value: Any  # dict[str, YamlNode], list[YamlNode] or a YAML scalar
    at: str


def read_tree(path: Path, faults: list[Finding]) -> YamlNode:
    """Parses one file. Duplicate keys are mistakes; the first one is kept.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        data = _read_regular(path)
    except OSError as error:
        says = f"{path}: cannot be read ({error.strerror})."
        if isinstance(error, FileNotFoundError) and _KEY.fullmatch(str(path)):
            raise ConfigError(f"{says} It is no file; did you mean {path}=VALUE?") from error
        raise ConfigError(f"{says} Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{printable(str(path))}: {error}") from error
    try:
        return parse_tree(data.decode(), str(path), faults)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: is not text in UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from error


def _read_regular(path: Path) -> bytes:
    """Returns the content of a regular file of at most `MAX_BYTES`. Does not block on a FIFO or a device.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a regular file, or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is not a regular file. Write the YAML to a file and give its path.")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 10} KiB, too large for a config. Check the path.")
    return data


def parse_tree(text: str, name: str, faults: list[Finding]) -> YamlNode:
    """Parses `text`; places are written as ``name:line``.

    Raises:
        ConfigError: not YAML, nested too deeply, or too large once aliases are expanded.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML. {_yaml_error(error, text)}") from error
    if root is None:
        return YamlNode({}, f"{name}:1")
    return _Converter(name, loader, faults).convert(root, 0)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses deep nesting while it parses."""

    # lm-format-enforcer, which vLLM imports, turns dates into text in PyYAML's own table.
    yaml_constructors: ClassVar = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp,
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def _yaml_error(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = printable(getattr(error, "problem", None) or getattr(error, "reason", None) or str(error))
    if mark is not None:
        return f"Line {mark.line + 1}: {problem}."
    position = getattr(error, "position", None)
    if not isinstance(position, int):
        return f"{problem}."
    shown = ascii(text[position : position + 1])
    return f"Line {text.count(chr(10), 0, position) + 1}: {shown} cannot be in a YAML file; delete it."


@dataclass(slots=True)
class _Converter:
    """Converts composed YAML nodes to `YamlNode`s, and collects mistakes."""

    name: str
    loader: yaml.SafeLoader
    faults: list[Finding]
    count: int = 0

    def convert(self, node: yaml.Node, depth: int) -> YamlNode:
        """Converts `node` and everything below it.

        Raises:
            ConfigError: too deep or too many values, because of aliases.
        """
        at = self._place(node)
        self.count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{at}: {_TOO_DEEP}; an alias (*name) must not contain itself.")
        if self.count > MAX_VALUES:
            raise ConfigError(
                f"{at}: has more than {MAX_VALUES} values with aliases (*name) expanded; use fewer."
            )
        if isinstance(node, yaml.SequenceNode):
            return YamlNode([self.convert(item, depth + 1) for item in node.value], at)
        if isinstance(node, yaml.MappingNode):
            return YamlNode(self._mapping(node, depth), at)
        return YamlNode(self._scalar(node), at)

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, YamlNode]:
        out: dict[str, YamlNode] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in out:
                says = f"key '{key}' is written twice (first at {out[key].at}); delete one of them."
                self.faults.append(Finding(place=self._place(key_node), says=says))
            elif key is not None:
                out[key] = self.convert(value_node, depth + 1)
        return out

    def _key(self, node: yaml.Node) -> str | None:
        """Returns the key's text as it is written (YAML reads YES and NO as true and false), or None after
        reporting a mistake."""
        if node.tag == "tag:yaml.org,2002:merge":
            says = "merge keys (<<) are not supported; write all keys, or use an overlay file."
        elif not isinstance(node, yaml.ScalarNode):
            says = "a key must be a word, not a list or a section."
        else:
            return None if self._scalar(node) is UNREADABLE else str(node.value)
        self.faults.append(Finding(place=self._place(node), says=says))
        return None

    def _scalar(self, node: yaml.Node) -> Any:
        """Returns the scalar's value by YAML 1.1, but keeps 4:00:00 as text: YAML 1.1 reads it as 14400."""
        try:
            value = self.loader.construct_object(node)
        except yaml.YAMLError as error:
            why = getattr(error, "problem", None) or "unknown tag"
        except _SCALAR_ERRORS as error:
            why = str(error) or type(error).__name__
        else:
            return node.value if ":" in str(node.value) and isinstance(value, (int, float)) else value
        kind = node.tag.rpartition(":")[2]
        says = (
            f"{_short(node.value)} cannot be read as YAML's '{kind}' ({why}); put it in quotes if it is "
            "text, without a tag (!!) before it."
        )
        self.faults.append(Finding(place=self._place(node), says=says))
        return UNREADABLE


def _short(text: object, most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def merge_trees(base: YamlNode, over: YamlNode, key: str = "") -> YamlNode:
    """Merges two trees: `over` wins; sections are merged key by key, lists and scalars are replaced.

    A section whose keys are numbers is merged into the items of a list, from 0. An empty one, ``{}``, takes
    back what `base` has there.

    Args:
        key: the key of both, for messages.

    Raises:
        ConfigError: the list has no item of a number.
    """
    if key and over.value == {}:
        return over
    if isinstance(base.value, list) and isinstance(over.value, dict) and all(map(_is_index, over.value)):
        return _merged_items(base.value, over, base.at, key)
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for name, node in over.value.items():
        inner = f"{key}.{name}" if key else name
        merged[name] = merge_trees(merged[name], node, inner) if name in merged else node
    return YamlNode(merged, base.at)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _merged_items(items: list[YamlNode], over: YamlNode, at: str, key: str) -> YamlNode:
    merged = list(items)
    for name, node in over.value.items():
        if int(name) >= len(merged):
            has = f"its last one is {len(merged) - 1}" if merged else "it is empty"
            raise ConfigError(
                f"{node.at}: {key} has no item {name}; {has}. To add one, write the whole list."
            )
        merged[int(name)] = merge_trees(merged[int(name)], node, f"{key}.{name}")
    return YamlNode(merged, at)


def files_and_arguments(file: Path, more: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Divides the words after a file on a command line, which are mixed: the file with its overlays, and
    arguments ``a.b=c``."""
    overlays = [Path(part) for part in more if "=" not in part]
    return [file, *overlays], [part for part in more if "=" in part]


def argument_tree(argument: str, faults: list[Finding]) -> YamlNode:
    """Parses one ``a.b=c`` argument into a tree; c is YAML. A number selects an item of a list, from 0:
    ``rewards.0.path=c`` or, as in messages, ``rewards[0].path=c``.

    Raises:
        ConfigError: no '=' in it, an empty key, or a value that is not YAML.
    """
    path, sign, text = argument.partition("=")
    shown = f"{path}=..." if is_secret_name(path.rpartition(".")[2]) else redacted_text(argument)
    path = re.sub(r"\[([0-9]{1,6})\]", r".\1", path)
    if not sign or not all(path.split(".")) or path.count(".") > MAX_DEPTH:
        raise ConfigError(f"argument '{shown}': write section.key=value.")
    at = f"argument '{shown}'"
    node = _relocate(parse_tree(text, at, faults), at)
    if text.strip() == "":
        node = YamlNode("", at)
    for key in reversed(path.split(".")):
        node = YamlNode({key: node}, at)
    return node


def _relocate(node: YamlNode, at: str) -> YamlNode:
    if isinstance(node.value, dict):
        return YamlNode({key: _relocate(child, at) for key, child in node.value.items()}, at)
    if isinstance(node.value, list):
        return YamlNode([_relocate(child, at) for child in node.value], at)
    return YamlNode(node.value, at)
