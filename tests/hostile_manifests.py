"""Manifests of strangers, drawn from a whole one: changed in some places, and sealed as anyone can.

They lead only to what the tests have planted. Code without the rule deletes what a manifest names, so no test
may name anything of the machine.
"""

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from yatt.checkpoint.commit.manifest_format import Manifest, sealed_manifest
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit

DEEP = "DEEP"
"""Stands for 100,000 lists in one another, which Python's encoder cannot write."""

PATHS = (
    "", ".", "..", "../thesis/chapter", "../../thesis/chapter", "{outside}/thesis/chapter",
    "../dot_profile", "{outside}/dot_profile", "{outside}/zeros", "{outside}/pipe", "run_id",
    "top.safetensors", "manifests/00000001.000001.json", "global_step_2", "{folder}", "{folder}/",
    "{folder}/..", "{folder}//x", "{folder}/../../../thesis/chapter", "{folder}/.hidden",
    "{folder}/rank-00000.safetensors/../../../../dot_profile", "{folder}/rank-00000.safetensors\0",
    "{folder}/rank-00000.safetensors\n", "{folder}/RANK-00000.safetensors",
    "{folder}/rank-00000.safetensors ", "{folder}/link.safetensors", "./{folder}/rank-00000.safetensors",
    "global_step_9/000001-0123abcd/rank-00000.safetensors", "{folder}/rank-00001.safetensors",
    "{folder}/node-00000.groups", "{folder}\\..\\..\\x", "%2e%2e/thesis", "~/dot_profile",
    "global_step_2/000001-zzzzzzzz/rank-00000.safetensors", "\uff0e\uff0e/thesis/chapter",
    "{folder}/" + "r" * 600, "file://{outside}/dot_profile", "s3://elsewhere/theirs", "\x1b[2J", "\ud7ff",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1 << 31, (1 << 50) + 1, 1 << 62, 1 << 64, 1 << 80, 10**400, 0.5, -0.0, 1e308,
    "", "a", "\x1b[2J", "7", "float32", "int4", "NaN", "a" * 70_000, [], {}, [[]], [0], [1 << 40] * 7,
    [-1, 4], {"": {}}, ["a", "b"], [1] * 40, DEEP, 10**9, "main.x", "000001",
)  # fmt: skip
SCALARS: tuple[Any, ...] = (
    {}, [], DEEP, {"step": "x"}, {"step": -1e300}, {"param_groups": [{"params": [0]}]}, {"scheduler": DEEP},
    {"scheduler": {"num_steps": 1 << 80}}, {"scheduler": []}, {"moments": "exp_avg"}, {"kl_coef": [1]},
    {"x": DEEP}, {"param_groups": [{"betas": [0.9] * 99}]}, 3, "step", None, {"param_groups": {}},
)  # fmt: skip
KINDS = ("path",) * 3 + ("value",) * 2 + ("remove", "add", "repeat", "scalars", "number")


@dataclass(frozen=True)
class HostileManifest:
    """Bytes, and the name under which they are put."""

    name: str
    data: bytes


def drawn_manifest(draw: random.Random, whole: bytes, outside: Path) -> HostileManifest:
    """Draws a manifest.

    Args:
        whole: of iteration 2 of attempt 1.
        outside: a folder that paths lead to.
    """
    fields = json.loads(whole)
    folder = fields["files"][0]["path"].rpartition("/")[0]
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            _change(draw, fields, draw.choice(PATHS).format(folder=folder, outside=outside))
    numbers = fields.get("iteration"), fields.get("attempt")
    is_named = all(type(each) is int and 0 <= each < 10**15 for each in numbers)
    return HostileManifest(manifest_name(Commit(*numbers if is_named else (2, 1))), _sealed(draw, fields))


def _change(draw: random.Random, fields: dict[str, Any], path: str) -> None:
    kind = draw.choice(KINDS)
    if kind == "scalars":
        fields["common"] = draw.choice(SCALARS)
    elif kind == "number":
        key = draw.choice(("iteration", "attempt", "schema_version"))
        fields[key] = draw.choice((0, 1, 2, 3, 10**9, 10**14))
    elif kind == "path":
        files = [*fields["files"], *fields["nodes"]]
        for file in draw.sample(files, draw.choice((1, len(files)))):
            file["path"] = path
    else:
        _change_at(draw, fields, kind)


def _change_at(draw: random.Random, fields: dict[str, Any], kind: str) -> None:
    *way, last = draw.choice([place for place in _places(fields) if place])
    within: Any = fields
    for key in way:
        within = within[key]
    if kind == "remove":
        del within[last]
    elif kind == "add" and isinstance(within, dict):
        within["more"] = draw.choice(VALUES)
    elif kind == "repeat" and isinstance(within, list):
        within.append(within[last])
    else:
        within[last] = draw.choice(VALUES)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields every place in a JSON value, as keys from the root."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*at, key))


def _sealed(draw: random.Random, fields: dict[str, Any]) -> bytes:
    """Seals as yatt does what yatt can decode, and anything else by the rule; seldom not at all."""
    data = _encoded(fields, "")
    try:
        decoded = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _encoded(fields, draw.choice((hashlib.sha256(data).hexdigest(), "", "x")))
    return sealed_manifest(decoded) if draw.random() > 0.05 else _encoded(fields, "x")


def sealed_fields(fields: dict[str, Any]) -> bytes:
    """A manifest of these fields, well sealed."""
    return _sealed(random.Random(0), fields)


def _encoded(fields: dict[str, Any], seal: str) -> bytes:
    text = json.dumps({**fields, "seal": seal}, separators=(",", ":"), ensure_ascii=False)
    return text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode("utf-8", "surrogatepass")
