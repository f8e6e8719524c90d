"""`yatt check` of entries of data files that are patterns or data sets of the hub."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.obs_runs import make_run
from tests.runs import RunFile
from tests.tiny_models import make_qwen3
from yatt.cli.main import main
from yatt.config.load import load_resolved
from yatt.errors import ConfigError, Finding
from yatt.launch.checks.model_check import check_model
from yatt.launch.commands.checking import Absent, check_run


@pytest.fixture
def told(tmp_path):
    """Returns what a check says about data files."""
    config = load_resolved(make_run(tmp_path).config)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1"}\n')

    def check(*entries, elsewhere=False, **data):
        section = replace(config.data, train_files=entries, val_files=(), **data)
        found = check_run(replace(config, data=section), elsewhere=elsewhere)
        return [f"{each.level} {each.in_words()}" for each in found]

    return check


def test_entries_that_became_no_files_are_not_also_called_missing_files(told, tmp_path):
    both, first = f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"
    said = told(both, first, weights={both: 2.0, first: 3.0})
    assert any("by two entries" in line for line in said)
    assert not any("no such data file" in line for line in [*said, *told("hf:a/b")])


def test_elsewhere_a_pattern_is_absent_only_if_no_file_fits_it(told, tmp_path):
    here, there = f"{tmp_path}/*.jsonl", f"{tmp_path}/*.parquet"
    said = told(here, there, elsewhere=True)
    assert f"skip data.train_files: {there} is not on this machine" in said
    assert not any(f"{here} is not on this machine" in line for line in said)


def test_elsewhere_a_tracker_of_the_users_own_is_absent(tmp_path):
    config = load_resolved(make_run(tmp_path).config)
    logging = replace(config.logging, trackers=("tensorboard", f"{tmp_path}/mine.py"))
    said = [each.in_words() for each in check_run(replace(config, logging=logging), elsewhere=True)]
    assert [line for line in said if "trackers" in line or "tensorboard" in line] == [
        f"logging.trackers: {tmp_path}/mine.py is not on this machine"
    ]


@pytest.mark.parametrize("entry", ["hf:a/b:train", "hf:a/b:main:train"])
def test_a_data_set_that_cannot_be_fetched_here_is_absent(entry):
    absent = Absent("data.train_files", entry, has_config=False)
    says = "hf:a/b: cannot be fetched: offline"
    assert absent.explains(Finding(says=says, missing=entry)) and not absent.explains(Finding(says=says))


def test_a_name_of_the_hub_is_no_folder_and_the_command_that_makes_one_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    with pytest.raises(ConfigError, match=f"hf download Qwen/Qwen3-0.6B --local-dir {folder}$"):
        check_model(str(folder), "model.path")
    for other in ("/nowhere/qwen", str(tmp_path / "a b" / "c"), str(tmp_path / "model"), str(folder / "x")):
        with pytest.raises(ConfigError) as caught:
            check_model(other, "model.path")
        assert "hf download" not in str(caught.value)


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Returns exit code and output of `yatt check` with these words."""

    def check(settings: dict[str, Any], *words: str) -> tuple[int, str]:
        file = RunFile(tmp_path / "runs", settings).write()
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["yatt", "check", str(file), *words])
        return main(), capsys.readouterr().out

    return check


def failures_of(output: str) -> list[dict[str, str]]:
    return [each for each in json.loads(output)["found"] if each["level"] == "fail"]


@pytest.mark.parametrize("rows", ["qwen-prompts.jsonl", "other.jsonl"])
@pytest.mark.parametrize("has_config", [True, False])
def test_bad_rows_whose_path_begins_with_that_of_an_absent_model_are_refused(
    checked, tmp_path, rows: str, has_config: bool
) -> None:
    model, data = tmp_path / "qwen", tmp_path / rows
    data.write_text('{"prompt": "1"}\n{"prompt": has no end\n')
    if has_config:
        make_qwen3(model, tied=True)
        for path in (*model.glob("*.safetensors"), model / "tokenizer.json"):
            path.unlink()
    settings = {"model": {"path": str(model)}, "data": {"train_files": [str(data)]}}
    code, output = checked(settings, "--elsewhere", "--json")
    (failure,) = failures_of(output)
    assert code == 2 and failure["says"].startswith(f"{data}: row 2 is not JSON"), failure
    what = f"of {model} only config.json is" if has_config else f"{model} is not"
    assert f"model.path: {what} on this machine" in output


def test_what_a_config_says_is_checked_though_its_weights_are_elsewhere(checked, tmp_path) -> None:
    """The mistake was taken for a lack of the folder, because " has no " was in its text."""
    model = tmp_path / "qwen"
    make_qwen3(model, tied=True)
    for path in model.glob("*.safetensors"):
        path.unlink()
    settings = {"model": {"path": str(model)}, "rollout": {"engine": "vllm"}}
    more = ("rollout.expert_parallel=true", "rollout.tp_size=2", "launch.device=cuda")
    code, output = checked(settings, "--elsewhere", "--json", *more)
    (failure,) = failures_of(output)
    assert code == 2 and "expert_parallel has no effect" in failure["says"], failure


def test_a_file_that_raises_two_lines_is_one_mistake_with_key_and_place(checked, tmp_path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text('raise ValueError("first line\\n  second line: has no end")\n')
    settings = {"rewards": [{"name": "mine", "path": str(reward)}]}
    code, output = checked(settings, "--json")
    (failure,) = failures_of(output)
    assert code == 2 and (failure["key"], failure["place"]) == ("rewards[mine].path", f"{reward}:1")
    code, output = checked(settings)
    words = f"rewards[mine].path: {reward}:1: ValueError: first line second line: has no end."
    assert f"fail  {words}" in output.splitlines() and output.endswith("run.yaml: 1 mistake\n")


def test_mistakes_of_a_run_file_have_its_lines_as_values(checked) -> None:
    code, output = checked({}, "rollout.n=0", "rolout.n=1", "--json")
    found = failures_of(output)
    assert code == 2 and [(each["key"], each["place"]) for each in found] == [
        ("rolout", "argument 'rolout.n=1'"),
        ("rollout.n", "argument 'rollout.n=0'"),
    ]
    assert found[1]["says"].startswith("argument 'rollout.n=0': rollout.n is 0; write ")


def test_only_what_is_in_an_absent_folder_is_absent() -> None:
    absent = Absent("model.path", "/data/qwen", has_config=False)
    for missing, is_explained in (
        ("/data/qwen", True), ("/data/qwen/tokenizer.json", True), ("/data/qwen-tracker.py", False),
        ("/data", False), ("", False),
    ):  # fmt: skip
        assert absent.explains(Finding(says="/data/qwen has no file", missing=missing)) is is_explained


def test_a_broken_config_is_one_mistake_with_the_line_that_names_its_folder(checked, tmp_path) -> None:
    """Two readers find it, of which one does not know the key."""
    model = tmp_path / "broken"
    make_qwen3(model, tied=True)
    (model / "config.json").write_text('{"a": ')
    settings = {"model": {"path": str(model)}}
    code, output = checked(settings, "--json")
    (failure,) = (each for each in failures_of(output) if "config.json" in each["says"])
    assert code == 2 and failure["key"] == "model.path"
    file, line = failure["place"].rsplit(":", 1)
    assert str(model) in Path(file).read_text().splitlines()[int(line) - 1]
