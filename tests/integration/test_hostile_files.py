"""Chat templates, tokenizers and data files that hang, allocate or kill their reader: each is refused by name
within its limits, and only the process that reads it is lost."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, RunFile, yatt
from tests.tiny_models import make_tokenizer
from yatt.adapters.processes.watched_trial import Stages, answer_watched, run_watched
from yatt.config.load import load_run_config, resolved_text
from yatt.config.schema import GenRMSection, RunConfig, VerdictSection
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs, is_looked_at

pytestmark = pytest.mark.slow
MODULE = "tests.integration.test_hostile_files"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RECURSES = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
TEMPLATES = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages + 1 }}": "TypeError",
    "{{ 'a' * 4294967296 }}": "needs more memory than a check may take",
    "{% set ns = namespace(s='a' * 1000) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}":
        "needs more memory than a check may take",
    "{{ '%4294967296d' | format(1) }}": "needs more memory than a check may take",
    RECURSES: "RecursionError",
    "{{ messages[9].content.x }}": "refuses a prompt",
    "{{ raise_exception('only one turn') }}": "only one turn",
    "{% for": "refuses a prompt",
    LOOPS: "took longer than 10 s and was ended",
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = RunFile(tmp_path_factory.mktemp("good"))
    run.folder.mkdir(exist_ok=True)
    prompts = [{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(40)]
    (run.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run.write()
    return run


@pytest.fixture
def config(good: RunFile, tmp_path: Path) -> RunConfig:
    """A run whose policy's folder has only a tokenizer, in the test's own folder."""
    make_tokenizer(tmp_path / "policy")
    found = load_run_config([good.folder / "run.yaml"], [])
    (tmp_path / "policy" / "config.json").write_bytes((good.folder / "policy" / "config.json").read_bytes())
    return replace(found, model=replace(found.model, path=str(tmp_path / "policy")))


def judged(config: RunConfig, folder: Path, **changes: Any) -> RunConfig:
    values = {
        "name": "judge", "model": str(folder), "template": "{prompt} {completion}", "chat": True,
        "max_model_tokens": 256, "verdict": VerdictSection(pattern="([YN])", scores={"Y": 1.0}),
    } | changes  # fmt: skip
    return replace(config, genrms=(GenRMSection(**values),))


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def test_good_files_are_accepted_without_a_note(config: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    check_inputs(config)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_hostile_template_of_the_policy_is_refused_by_name(config: RunConfig, template: str) -> None:
    folder = Path(config.model.path)
    (folder / "chat_template.jinja").write_text(template)
    said = refused(config)
    assert TEMPLATES[template] in said
    assert str(folder) in said
    assert len(said.splitlines()) == 1, "one sentence"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a' * 4294967296 }}"])
def test_a_hostile_template_of_a_judge_is_refused_by_name(
    config: RunConfig, tmp_path: Path, template: str
) -> None:
    make_tokenizer(tmp_path / "judge")
    (tmp_path / "judge" / "chat_template.jinja").write_text(template)
    said = refused(judged(config, tmp_path / "judge"))
    assert TEMPLATES[template] in said and str(tmp_path / "judge") in said


def test_a_judge_with_chat_and_no_template_is_refused(config: RunConfig, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "judge")
    path = tmp_path / "judge" / "tokenizer_config.json"
    values = json.loads(path.read_text())
    del values["chat_template"]
    path.write_text(json.dumps(values))
    said = refused(judged(config, tmp_path / "judge"))
    assert "genrms[0].chat: " in said and "has no chat template" in said and "write chat: false" in said
    check_inputs(judged(config, tmp_path / "judge", chat=False))


def test_a_question_that_does_not_fit_into_the_judges_context_is_refused(
    config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path / "judge")
    said = refused(judged(config, tmp_path / "judge", max_model_tokens=32))
    assert "genrms[0].max_model_tokens: the longest question has " in said
    assert "data.max_prompt_tokens 32 + rollout.max_response_tokens 8" in said
    check_inputs(judged(config, tmp_path / "judge", max_model_tokens=256, max_tokens=8))
    assert "note" not in capfd.readouterr().err
    check_inputs(judged(config, tmp_path / "judge", max_model_tokens=256, max_tokens=250))
    assert "leaves less than genrms[0].max_tokens 250 of 256" in capfd.readouterr().err


def test_a_template_that_only_some_prompts_break_is_refused_with_the_row(
    config: RunConfig, tmp_path: Path
) -> None:
    (Path(config.model.path) / "chat_template.jinja").write_text(
        "{% if '31' in messages[0].content %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}"
    )
    said = refused(config)
    assert "train.jsonl: row 32" in said or "refuses a prompt: ZeroDivisionError" in said


def test_many_long_prompts_are_noted_and_only_long_ones_are_refused(
    config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": "one plus two " * (1 if i % 2 else 100)} for i in range(700)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = replace(config, data=replace(config.data, train_files=(str(data),)))
    check_inputs(changed)
    assert f"prompts of {data} that were looked at are longer than 32 tokens" in capfd.readouterr().err
    looked_at = [row for i, row in enumerate(rows) if is_looked_at(i)]
    assert 512 < len(looked_at) < 700
    for i, row in enumerate(rows):  # only prompts that are not looked at are short
        row["prompt"] = "one plus two " * (100 if is_looked_at(i) else 1)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_inputs(changed)
    data.write_text("".join(json.dumps({"prompt": "one plus two " * 100}) + "\n" for _ in rows))
    assert f"data.max_prompt_tokens: every prompt of {data} is longer than 32 tokens" in refused(changed)


def test_tokens_that_the_model_has_not_are_refused(config: RunConfig) -> None:
    path = Path(config.model.path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 40}))
    assert "but its config.json says vocab_size=40" in refused(config)


CHECK = """
import resource, sys
from yatt.config.load import parse_resolved
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
try:
    check_inputs(parse_resolved(sys.argv[1]))
except ConfigError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_line_without_end_is_refused_in_bounded_memory(config: RunConfig, tmp_path: Path) -> None:
    data = tmp_path / "endless.jsonl"
    with data.open("wb") as file:
        file.truncate(8 << 30)  # NUL bytes: no line end
    endless = replace(config, data=replace(config.data, train_files=(str(data),)))
    done = subprocess.run(  # a process of its own: other tests have larger children
        [sys.executable, "-c", CHECK, resolved_text(endless)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    *said, peak = done.stdout.splitlines()
    assert f"{data}: row 1 has more than 64 MiB" in "\n".join(said)
    assert int(peak) < 3 << 20, "KiB"


def test_the_command_says_one_sentence_and_exits_with_2(good: RunFile, config: RunConfig) -> None:
    folder = Path(config.model.path)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 4294967296 }}")
    (folder / "model.safetensors").write_bytes((good.folder / "policy" / "model.safetensors").read_bytes())
    done = yatt("run", str(good.folder / "run.yaml"), f"model.path={folder}")
    assert done.returncode == 2, done.stderr
    assert "needs more memory than a check may take" in done.stderr and str(folder) in done.stderr
    assert "Traceback" not in done.stderr
    assert not good.run_dir.exists()


def test_a_reader_that_is_killed_costs_only_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(
        ConfigError, match=r"reading /x ended the process that checks it \(killed by SIGABRT\)"
    ):
        run_watched(MODULE, ["abort"], 30)
    with pytest.raises(ConfigError, match="reading /x took longer than 5 s and was ended"):
        run_watched(MODULE, ["sleep"], 5)
    assert run_watched(MODULE, ["tick"], 5) == ["ticked"], "progress extends the limit"


def play(stages: Stages, kind: str) -> tuple[list[ConfigError], list[str]]:
    """The trials of the test above."""
    with stages.doing("reading /x"):
        if kind == "abort":
            os.abort()
        for _ in range(100):
            time.sleep(0.1)
            if kind == "tick":
                stages.tick()
    return [], ["ticked"]


if __name__ == "__main__":
    answer_watched(play)
