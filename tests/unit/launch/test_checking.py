"""`yatt check` of entries of data files that are patterns or data sets of the hub."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from yatt.config.load import load_resolved
from yatt.errors import ConfigError
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
        return [f"{each.level} {each.says}" for each in found]

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


@pytest.mark.parametrize("entry", ["hf:a/b:train", "hf:a/b:main:train"])
def test_a_data_set_that_cannot_be_fetched_here_is_absent(entry):
    assert Absent("data.train_files", entry, has_config=False).explains("hf:a/b: cannot be fetched: offline")


def test_a_name_of_the_hub_is_no_folder_and_the_command_that_makes_one_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    with pytest.raises(ConfigError, match=f"hf download Qwen/Qwen3-0.6B --local-dir {folder}$"):
        check_model(str(folder), "model.path")
    for other in ("/nowhere/qwen", str(tmp_path / "a b" / "c"), str(tmp_path / "model"), str(folder / "x")):
        with pytest.raises(ConfigError) as caught:
            check_model(other, "model.path")
        assert "hf download" not in str(caught.value)
