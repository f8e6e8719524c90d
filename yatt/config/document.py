"""Generates documents from the config's classes: `docs/configuration.md`, and JSON schemas for editors.

    python -m yatt.config.document        writes them (`make docs`)

A key's meaning is the text below it in the class. A test checks that the generated files are up to date.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from yatt.config.changing import change_kind
from yatt.config.schema import RunConfig
from yatt.config.sections.ranges import EngineValue, Free, Range, Text
from yatt.config.sections.sft import SftConfig
from yatt.config.site import SiteConfig

ROOT = Path(__file__).parents[2]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file that users write."""

    name: str
    config: type
    title: str
    about: str
    common_keys: tuple[str, ...] = ()
    """Keys that most files of this kind set: the page lists them first."""


FILE_KINDS = (
    FileKind(
        "run",
        RunConfig,
        "The run file",
        "Read by `yatt run` and `yatt submit`.",
        common_keys=(
            "run.dir",
            "model.path",
            "data.train_files",
            "data.val_files",
            "data.prompt_key",
            "data.ground_truth_key",
            "data.max_prompt_tokens",
            "rollout.n",
            "rollout.max_response_tokens",
            "rollout.tp_size",
            "rewards[].path",
            "genrms[].model",
            "genrms[].template",
            "algorithm.adv_estimator",
            "algorithm.kl_in",
            "algorithm.kl_coef",
            "optimizer.lr",
            "trainer.total_iterations",
            "trainer.train_batch_size",
            "trainer.mini_batch_size",
            "trainer.max_tokens_per_micro_batch",
            "validation.reward",
            "validation.every",
            "checkpoint.url",
            "checkpoint.save_every",
            "placement.mode",
            "launch.nodes",
            "launch.gpus_per_node",
        ),
    ),
    FileKind(
        "site",
        SiteConfig,
        "The site file",
        "Read by `yatt submit --site` and `yatt diagnose --site`.",
        common_keys=("account", "partition", "time_limit_min", "cpus_per_node", "setup", "sbatch_args"),
    ),
    FileKind("sft", SftConfig, "The SFT file", "Read by `yatt sft`."),
)

HEAD = """# Configuration

Every key of the files that yatt reads, generated from the config classes by `make docs`. A key that is not
listed is refused. Values are written as YAML: `1.0e-6`, not `1e-6`, which YAML reads as text.

Of several files, and of `KEY=VALUE` arguments after them, the last one wins, key by key; lists are replaced.
An empty section takes back what was written before it: `data.weights={}`.

Editors with a YAML language server complete keys and show these texts if a file begins with
`# yaml-language-server: $schema=PATH`, where PATH is that of `run.json`, `site.json` or `sft.json` in
`configs/schema/`, or of `overlay.json` for an overlay of a run file, which has no required keys.

The column *change* says what `yatt resume RUN KEY=VALUE` may change: *yes* marks operational keys, which do
not affect what is trained; *layout* marks keys that change the order of sums, and so the rounding, and are
kept with `run.deterministic`. All others decide what is trained: a run keeps them.
"""


def markdown() -> str:
    """Returns the keys of all files, section by section."""
    parts = [HEAD, *_common_keys()]
    for kind in FILE_KINDS:
        parts.append(f"\n## {kind.title}\n\n{kind.about}\n")
        parts.extend(_sections(kind.config, "", is_run=kind.config is RunConfig))
    return "".join(parts)


def _common_keys() -> Iterator[str]:
    """Yields a short table of each file's common keys, with links to the sections that explain them."""
    yield "\n## The keys that people set\n\n"
    yield "Each links to its section, which has all other keys too. `[]` marks entries of a list.\n"
    for kind in FILE_KINDS:
        if kind.common_keys:
            yield f"\n{kind.title}:\n\n| key | meaning | default |\n|---|---|---|\n"
            yield from (_common_row(kind, key) for key in kind.common_keys)


def _common_row(kind: FileKind, key: str) -> str:
    prefix, _, name = key.rpartition(".")
    cls: type | None = kind.config
    for section in prefix.split(".") if prefix else ():
        assert cls is not None, f"{key}: only a section has keys"
        cls = _section_of(_hints(cls)[section.removesuffix("[]")])
    assert cls is not None, f"{key}: only a section has keys"
    (f,) = (f for f in fields(cls) if f.name == name)
    anchor = re.sub(r"[^\w -]", "", (prefix or kind.title).lower()).replace(" ", "-")
    return f"| [`{key}`](#{anchor}) | {_first_sentence(meanings(cls)[name])} | {_default(f)} |\n"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]


def json_schema(kind: FileKind) -> dict[str, Any]:
    """Returns the schema with which an editor checks and completes a file; the loader checks more."""
    return {"$schema": DRAFT, "title": f"yatt: {kind.title.lower()}", **_object(kind.config)}


def overlay_schema() -> dict[str, Any]:
    """Returns the schema of an overlay of a run file: no key is required."""
    found: dict[str, Any] = _without_required(json_schema(FILE_KINDS[0]))
    return {**found, "title": "yatt: an overlay of a run file"}


def _without_required(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {key: child for key, child in schema.items() if key != "required" or isinstance(child, dict)}
        return {key: _without_required(child) for key, child in kept.items()}
    return [_without_required(child) for child in schema] if isinstance(schema, list) else schema


@cache
def meanings(cls: type) -> dict[str, str]:
    """Returns the text below each key of a section, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef), "a class has one definition"
    found = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(statement.target, ast.Name), "a field has a name"
            assert isinstance(after.value, ast.Constant), "what stands below a field is its meaning"
            found[statement.target.id] = re.sub(r"\s+", " ", str(after.value.value)).strip()
    return found


def _sections(cls: type, prefix: str, *, is_run: bool) -> Iterator[str]:
    """Yields a table of the section's own keys, then those of its subsections.

    Args:
        is_run: tables say which keys `yatt resume` may change.
    """
    plain = [f for f in fields(cls) if _section_of(_hints(cls)[f.name]) is None]
    if plain:
        heading = f"\n### `{prefix}`\n" if prefix else ""
        about = f"\n{_paragraph(cls)}\n" if prefix else ""
        titles = ("key", "value", "default", "meaning", *(("change",) if is_run else ()))
        yield f"{heading}{about}\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
        yield from (_row(cls, f, *((_change(prefix, f),) if is_run else ())) for f in plain)
    for f in fields(cls):
        if (below := _section_of(_hints(cls)[f.name])) is not None:
            origin = get_origin(_bare(_hints(cls)[f.name]))
            mark = "[]" if origin is tuple else ".NAME" if origin is dict else ""
            yield from _sections(below, f"{prefix}.{f.name}{mark}".lstrip("."), is_run=is_run)


_CHANGES = {"operational": "yes", "layout": "layout", "mathematical": "no"}


def _change(prefix: str, f: "Field[Any]") -> str:
    return _CHANGES[change_kind(f"{prefix}.{f.name}".replace("[]", ".0"))]


def _row(cls: type, f: "Field[Any]", *more: str) -> str:
    cells = (f"`{f.name}`", _kind(_hints(cls)[f.name]), _default(f), meanings(cls).get(f.name, ""), *more)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _paragraph(cls: type) -> str:
    return re.sub(r"\s+", " ", inspect.getdoc(cls) or "").strip()


def _default(f: "Field[Any]") -> str:
    if f.default is MISSING and f.default_factory is MISSING:
        return "**required**"
    value = _json(f.default if f.default_factory is MISSING else f.default_factory())
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _json(value: Any) -> Any:
    return [_json(child) for child in value] if isinstance(value, (tuple, list)) else value


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _section_of(hint: Any) -> type | None:
    """Returns the class of a section, or of the sections in a list or dictionary."""
    hint = _bare(hint)
    if get_origin(hint) in (tuple, dict):
        hint = _bare(get_args(hint)[0 if get_origin(hint) is tuple else 1])
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _kind(hint: Any) -> str:
    """Returns the type in words, with the allowed range."""
    if hint in (Free, EngineValue):
        return "any plain value" if hint == Free else "any value"
    rules = [rule for rule in get_args(hint)[1:] if isinstance(rule, Range)] if _is_annotated(hint) else []
    hint = _bare(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"list: {_kind(args[0])}"
    if origin is dict:
        return f"section of names: {_kind(args[1])}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(arg) for arg in args if arg is not type(None)))
    return f"{_WORDS[hint]}, {rules[0]}" if rules else _WORDS[hint]


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _object(cls: type) -> dict[str, Any]:
    hints = _hints(cls)
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    properties = {f.name: _property(cls, f, hints[f.name]) for f in fields(cls)}
    found = {"type": "object", "description": _paragraph(cls), "additionalProperties": False}
    return {**found, "properties": properties, **({"required": required} if required else {})}


def _property(cls: type, f: "Field[Any]", hint: Any) -> dict[str, Any]:
    found = _schema(hint)
    if about := meanings(cls).get(f.name, ""):
        found["description"] = about
    value = f.default if f.default is not MISSING else None
    if isinstance(value, (str, int, float, bool)):
        found["default"] = value
    return found


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _schema(hint: Any) -> dict[str, Any]:
    if _is_annotated(hint):
        return _limited(_schema(get_args(hint)[0]), get_args(hint)[1:])
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(arg) for arg in args]}
    below = _section_of(hint)
    return {"type": _TYPES[hint]} if below is None else _object(below)


def _limited(found: dict[str, Any], rules: tuple[Any, ...]) -> dict[str, Any]:
    for rule in rules:
        if isinstance(rule, Text) and rule.is_line:
            found["pattern"] = f"^[^\\n{re.escape(rule.without)}]*$"
        if isinstance(rule, Range):
            found["exclusiveMinimum" if rule.low_open else "minimum"] = rule.low
            found["exclusiveMaximum" if rule.high_open else "maximum"] = rule.high
            if rule.also is not None:
                found = {"anyOf": [{"const": rule.also}, found]}
    return found


def documents() -> dict[Path, str]:
    """Returns the path and the text of every generated file."""
    schemas = {kind.name: json_schema(kind) for kind in FILE_KINDS} | {"overlay": overlay_schema()}
    folder = ROOT / "configs" / "schema"
    return {
        ROOT / "docs" / "configuration.md": markdown(),
        **{folder / f"{name}.json": json.dumps(found, indent=1) + "\n" for name, found in schemas.items()},
    }


def main() -> None:
    """Writes the files."""
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
