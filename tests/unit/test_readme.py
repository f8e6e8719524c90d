"""What the README and the page of documents show works as it stands."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.runs import ROOT
from yatt.cli.main import GROUPS, command_parser, main
from yatt.config.load import load_command
from yatt.config.site import load_site
from yatt.launch.commands.submit import plan_job, show_job
from yatt.launch.resolve.resolved import Resolved

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def test_commands_are_listed_once_and_as_the_help_lists_them() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(command_parser()[1].choices)
    rows = re.findall(r"^\| ([a-z ]+) \| ((?:`\w+` ?)+) \|$", README, re.MULTILINE)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in listed if f"yatt {name}" not in page] == []
    assert {task: tuple(re.findall(r"`(\w+)`", names)) for task, names in rows} == GROUPS


def test_links_between_documents_lead_to_what_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "adr").glob("*.md")]
    lost = [
        f"{page.name}: {target}{anchor}"
        for page in pages
        for target, anchor in LINK.findall(page.read_text())
        if "://" not in target and not leads(page, target, anchor)
    ]
    assert len(pages) > 15 and lost == []


def test_each_decision_has_one_line_in_the_index() -> None:
    adrs = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    rows = re.findall(
        r"^\| \[(\d{4})\]\((\S+)\) \| [^|]+ \| (in force|superseded by \d{4}) \|$", index, re.MULTILINE
    )
    assert len(adrs) > 40 and sorted(name for _, name, _ in rows) == adrs
    assert [name for number, name, _ in rows if not name.startswith(f"{number}-")] == []
    numbers = {name[:4] for name in adrs}
    moved = re.findall(r"(\d{4}) → (\d{4})", index)
    assert [pair for pair in moved if pair[0] in numbers or pair[1] not in numbers] == []
    for name in adrs:
        assert (ROOT / "docs" / "adr" / name).read_text().startswith(f"# {name[:4]} "), name


def test_decisions_that_texts_name_are_there() -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("0*.md")}
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    texts = [ROOT / name for name in listed.stdout.splitlines()]
    texts = [
        path for path in texts if path.suffix in (".md", ".py", ".json", ".toml", ".yaml") and path.exists()
    ]
    named = [
        (str(path.relative_to(ROOT)), number)
        for path in texts
        for number in re.findall(r"\b(?:adr/|ADR )(\d{4})\b", path.read_text())
    ]
    assert len(named) > 50 and [found for found in named if found[1] not in numbers] == []


def leads(page: Path, target: str, anchor: str) -> bool:
    found = (page.parent / target) if target else page
    if not found.exists() or not anchor:
        return found.exists()
    titles = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
    return anchor[1:] in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_files_of_the_readme_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward is tried on a row of GSM8K's form; the model is elsewhere; the job is only shown."""
    for name, text in re.findall(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    rows = [{"question": "1+1", "answer": "2"}] * 64
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["yatt", "check", "run.yaml", "--site", "site.yaml", "--elsewhere"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "skip  model.path" in said and "run.yaml: ok" in said, said
    config, site = load_command(Path("run.yaml"), ("launch.nodes=4",)), load_site(Path("site.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert show_job(config, plan_job(Resolved(config=config, site=site), may_lack_slurm=True), "") == 0
    shown = capsys.readouterr().out
    for line in ("--account=my-project", "--partition=gpu", "--time=1440", "--nodes=4", "module load cuda"):
        assert line in shown, line


def test_a_term_has_one_entry_in_the_glossary_and_what_it_names_is_there() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [row for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) if row != "term"]
    terms = [
        term.strip().lower() for row in rows for term in re.split(r",| / |;", re.sub(r"\([^)]*\)", "", row))
    ]
    assert len(terms) > 100 and len(rows) <= 75, "a reader learns about seventy words, not more"
    assert [term for term in set(terms) if terms.count(term) > 1] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "yatt").rglob("*.py"))
    of_code = text.partition("## Words of the code")[2]
    names = [
        name
        for cell in re.findall(r"\| ([^|]+) \|$", of_code, re.MULTILINE)
        for name in cell.split("`")[1::2]
    ]
    lost = [
        name for name in names
        if not any((ROOT / "yatt").glob(f"**/{name.removeprefix('yatt/')}"))
        and not all(re.search(rf"\b{part}\b", sources) for part in name.split("."))
    ]  # fmt: skip
    assert len(names) > 40 and lost == []


def test_keys_beside_those_of_others_are_keys_of_the_run_file() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    ours = [
        row.rsplit("|", 2)[1] for row in page.partition("## Conv")[0].splitlines() if row.startswith("| ")
    ]
    keys = [key for cell in ours for key in re.findall(r"`([\w.\[\]]+)(?:: \w+)?`", cell) if "." in key]
    known = {f"{section}.{name}" for section, name in documented_keys()}
    assert len(keys) > 25 and [key for key in keys if key not in known] == []


def documented_keys() -> list[tuple[str, str]]:
    section, found = "", []
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if title := re.match(r"### `(.*)`", line):
            section = title[1]
        elif key := re.match(r"\| `(\w+)` \|", line):
            found.append((section, key[1]))
    return found
