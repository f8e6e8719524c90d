"""What is made from the config's classes is current, and says what the loader does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from tests.unit.core.test_placement import config
from yatt.config.document import FILE_KINDS, ROOT, documents, json_schema, meanings
from yatt.config.load import load_run_config, resolved_text
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError

RUN, SITE, _ = FILE_KINDS
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs" / "sites").glob("*.yaml")])
FILES += sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(documents()), ids=lambda path: path.name)
def test_the_documents_are_current(path: Path) -> None:
    assert path.read_text() == documents()[path], "run `make docs`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_names_its_schema_and_keeps_to_it(path: Path) -> None:
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    schema = json.loads((path.parent / found[1]).read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("kind", [RUN, SITE], ids=lambda kind: kind.name)
def test_what_is_resolved_keeps_to_the_schema(kind) -> None:
    whole = config(1, 1, 1, 0) if kind is RUN else SiteConfig()
    Draft202012Validator(json_schema(kind)).validate(yaml.safe_load(resolved_text(whole)))


MISTAKES: list[tuple[str, Any]] = [
    ("rollout.temprature", 1.0),
    ("rollout.n", 0),
    ("rollout.n", "8"),
    ("rollout.n", 2.5),
    ("optimizer.lr", "1e-6"),
    ("model.dtype", "float16"),
    ("data.train_files", "one.jsonl"),
    ("data.prompt_key", "two\nlines"),
    ("genrms", {"name": "judge"}),
    ("run.seed", -1),
]


@pytest.mark.parametrize(("key", "value"), MISTAKES)
def test_an_editor_marks_what_the_loader_refuses(tmp_path: Path, key: str, value: Any) -> None:
    tree = yaml.safe_load(resolved_text(config(1, 1, 1, 0)))
    Draft202012Validator(json_schema(RUN)).validate(tree)
    *sections, last = key.split(".")
    place = tree
    for section in sections:
        place = place[section]
    place[last] = value
    with pytest.raises(ValidationError):
        Draft202012Validator(json_schema(RUN)).validate(tree)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=re.escape(key)):
        load_run_config([tmp_path / "run.yaml"], [])


def test_every_key_says_what_it_means() -> None:
    text = documents()[ROOT / "docs" / "configuration.md"]
    silent = [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert silent == []
    assert meanings(SiteConfig)["qos"] == "sbatch --qos."


def test_common_keys_come_first_and_each_is_a_key_with_a_sentence() -> None:
    text = documents()[ROOT / "docs" / "configuration.md"]
    before, _, after = text.partition("\n## The run file")
    rows = re.findall(r"^\| \[`(\S+)`\]\(#\S+\) \| \S.*\. \| [`*].*[`*] \|$", before, re.MULTILINE)
    assert rows == [*RUN.common_keys, *SITE.common_keys]
    listed = {f"{section}.{name}".lstrip(".") for section, name in all_keys(after)}
    assert set(rows) <= listed


def all_keys(text: str) -> list[tuple[str, str]]:
    section, found = "", []
    for line in text.splitlines():
        if title := re.match(r"##(?:#? The|# `(\S+)`)", line):
            section = title[1] or ""
        elif key := re.match(r"\| `(\w+)` \|", line):
            found.append((section, key[1]))
    return found
