"""`yatt simulate` as a user types it."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.obs_runs import event, make_run
from tests.runs import ROOT, yatt
from yatt.cli.main import main
from yatt.errors import EXIT_USER_MISTAKE

JUDGE = {"name": "judge", "model": "judge", "template": "{completion}?", "verdict": {"pattern": "([0-9])"}}
SECTIONS: dict[str, Any] = {
    "launch": {"nodes": 4, "gpus_per_node": 1},
    "data": {"train_files": ["a.jsonl"], "max_prompt_tokens": 64},
    "model": {"path": "policy"},
    "rollout": {"n": 4, "max_response_tokens": 1024, "max_num_seqs": 16},
    "genrms": [JUDGE],
    "placement": {"mode": "partial", "genrm_gpu_sets": 1},
    "optimizer": {"lr": 1.0e-6},
    "trainer": {"total_iterations": 9, "train_batch_size": 8, "mini_batch_size": 8},
}
GIVEN = (
    "--lengths", "300,0.8", "--speed", "rollout=0.01,0.001", "--speed", "genrm:judge=0.01,0.001",
    "--verdict-tokens", "judge=200", "--switch-s", "1", "--train-s", "9", "--iterations", "3",
)  # fmt: skip


def run_file(folder: Path, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump({"run": {"dir": str(folder / "run")}, **SECTIONS}))
    return str(path)


def measured_run(folder: Path, **changes: Any) -> Path:
    role = {"step_s": 0.01, "sequence_s": 0.001, "room": 16, "engines": 1, "slabs": 2, "idle": 0.1}
    load = {
        "iteration": 1, "seconds": 9.0, "num_samples": 32, "lengths": [20.0 * i for i in range(21)],
        "verdicts": {"genrm:judge": 200.0}, "roles": {"rollout": role, "genrm:judge": role}, "switch_s": 1.0,
        "train_s": 9.0, "kept": 1.0,
    }  # fmt: skip
    paths = make_run(folder, events=[event(1, "batch.load", **{**load, **changes})], rewards=[], **SECTIONS)
    return paths.root


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, which saves the start of an interpreter for each call."""

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["yatt", "simulate", *words])
        code = main()
        return Done(code, *capsys.readouterr())

    return run


def test_it_prints_a_table_and_a_recommendation_with_what_to_write(tmp_path):
    done = yatt("simulate", run_file(tmp_path), *GIVEN)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any(line.startswith("setting ") and "idle genrm:judge" in line for line in lines)
    assert any(line.startswith("as configured: partial, 1 of 4 GPU sets to GenRMs ") for line in lines)
    assert any(re.match(r"recommended: .* Write .*placement\.", line) for line in lines), done.stdout
    assert any(line.startswith("The model leaves out: ") for line in lines)


def test_a_dynamic_split_is_recommended_with_the_key_that_turns_it_on(simulate, tmp_path):
    long_verdicts = ("--verdict-tokens", "judge=2000", "--switch-s", "0.1", "--lengths", "300,1.5")
    done = simulate(run_file(tmp_path), *GIVEN, *long_verdicts, "--json")
    found = [each for each in json.loads(done.stdout)["results"] if each["is_dynamic"]]
    assert found
    assert all("placement.split=dynamic" in each["settings"] for each in found)
    again = simulate(run_file(tmp_path), *found[0]["settings"], *GIVEN, *long_verdicts, "--json")
    assert json.loads(again.stdout)["results"][0]["iteration_s"] == found[0]["iteration_s"]


def test_json_has_every_setting_and_the_same_result_each_time(simulate, tmp_path):
    done, again = (simulate(run_file(tmp_path), *GIVEN, "--json") for _ in range(2))
    found = json.loads(done.stdout)
    assert done.stdout == again.stdout
    assert found["results"][0]["is_own"]
    assert found["recommended"]["iteration_s"] == min(each["iteration_s"] for each in found["results"])
    assert simulate(run_file(tmp_path), *GIVEN, "--json", "--seed", "1").stdout != done.stdout


@pytest.mark.parametrize("left_out", ["--lengths", "--speed", "--verdict-tokens", "--switch-s", "--train-s"])
def test_a_figure_that_nobody_gives_is_asked_for(simulate, tmp_path, left_out):
    pairs = [GIVEN[i : i + 2] for i in range(0, len(GIVEN), 2)]
    rest = [word for pair in pairs if pair[0] != left_out for word in pair]
    done = simulate(run_file(tmp_path), *rest)
    assert done.returncode == EXIT_USER_MISTAKE
    assert f"write {left_out} " in done.stderr
    assert "--run RUN" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lengths", "300"), "write MEAN,SIGMA"),
        (("--lengths", "0,1"), "1 token or more"),
        (("--lengths", "300,99"), "not a number from 0 to 4"),
        (("--speed", "rollout=0,0"), "at least one must be above 0"),
        (("--speed", "rollout=1"), "write ROLE=STEP_S,SEQUENCE_S"),
        (("--speed", "genrm:other=1,1"), "there is rollout, genrm:judge"),
        (("--verdict-tokens", "other=1"), "there is judge"),
        (("--train-s", "nan"), "not a number from 0"),
        (("--switch-s", "-1"), "not a number from 0"),
        (("--kept", "0"), "write 0.01 to 1"),
        (("--iterations", "2"), "write 3 to 1000"),
        (("--gpus", "99999"), "write 1 to 16384"),
        (("--gpus", "1"), "use more nodes or GPUs"),
        (("--run", "nowhere"), "not a run folder"),
        (("placement.genrm_gpu_sets=9",), "placement.genrm_gpu_sets"),
        (("--html", "/nowhere/page.html"), "cannot be written"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_with_the_rule(simulate, tmp_path, words, says):
    done = simulate(run_file(tmp_path), *GIVEN, *words)
    assert (done.returncode, says in done.stderr) == (EXIT_USER_MISTAKE, True), done.stderr


def test_a_run_folder_gives_the_config_and_the_figures_and_the_command_line_replaces_them(simulate, tmp_path):
    run = measured_run(tmp_path)
    alone = json.loads(simulate(str(run), "--json").stdout)
    with_file = json.loads(simulate(run_file(tmp_path), "--run", str(run), "--json").stdout)
    assert alone["results"] == with_file["results"]
    assert "measured in iteration 1 of" in alone["figures"]
    slower = json.loads(simulate(str(run), "rollout.n=4", "--train-s", "90", "--json").stdout)
    added_s = slower["results"][0]["iteration_s"] - alone["results"][0]["iteration_s"]
    assert added_s == pytest.approx(81.0)


@pytest.mark.parametrize(
    ("measured", "judging", "says"),
    [
        ({}, {}, "'judge' writes 200 tokens in 1 answers per completion"),
        ({"genrm:judge": 2.5}, {}, "'judge' writes 200 tokens in 2.5 answers per completion"),
        ({}, {"genrms[0].votes": 3, "genrms[0].temperature": 1}, "in 3 answers per completion"),
    ],
)
def test_answers_per_completion_are_those_measured_else_those_of_the_way(
    simulate, tmp_path, measured, judging, says
):
    run = measured_run(tmp_path, questions=measured)
    done = simulate(str(run), *(f"{key}={value}" for key, value in judging.items()))
    assert says in done.stdout, done


def test_a_run_folder_that_measured_no_training_asks_for_it(simulate, tmp_path):
    done = simulate(str(measured_run(tmp_path, train_s=0)))
    assert done.returncode == EXIT_USER_MISTAKE
    assert "write --train-s S" in done.stderr
    assert "--lengths" not in done.stderr


def test_the_commands_of_the_page_work_as_they_stand(simulate, tmp_path):
    text = (ROOT / "docs" / "commands.md").read_text().replace("\\\n", " ")
    lines = [re.split(r"\s+# ", line)[0] for line in text.splitlines() if line.startswith("yatt simulate ")]
    words = {"RUN": str(measured_run(tmp_path)), "run.yaml": run_file(tmp_path), "4096": "8"}
    assert len(lines) == 3
    for line in lines:
        done = simulate(*(words.get(word, word) for word in shlex.split(line)[2:]))
        assert (done.returncode, done.stderr) == (0, ""), line


@pytest.mark.slow
def test_at_another_size_it_says_what_is_scaled(simulate, tmp_path):
    no_genrm = (
        "genrms=[]",
        "placement.mode=colocated",
        "placement.genrm_gpu_sets=0",
        "rewards=[{name: rule, path: 'builtin:exact'}]",
    )
    given = ("--lengths", "300,0.8", "--speed", "rollout=0.01,0.001", "--switch-s", "1", "--train-s", "9")
    arguments = (run_file(tmp_path), *no_genrm, *given, "--iterations", "3")
    done = simulate(*arguments, "--gpus", "512")
    assert "512 GPUs on 512 nodes" in done.stdout
    assert re.search(r"1/2 of the GPU sets .* if all GPU sets are simulated", done.stdout), done.stdout
    assert "all GPU sets and requests" in simulate(*arguments).stdout


def test_the_page_needs_no_other_file_and_shows_names_as_text(simulate, tmp_path):
    page = tmp_path / "page.html"
    done = simulate(run_file(tmp_path, "<b>&run.yaml"), *GIVEN, "--html", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "&lt;b&gt;&amp;run.yaml" in text
    assert "<b>&run" not in text
    assert not re.search(r"<script|src=|href=|@import|url\(", text)
    assert text.count("<svg") == 1 + 2 * 2
    assert all(f'class="p-{role}"' in text for role in ("rollout", "genrm", "trainer", "switch"))
