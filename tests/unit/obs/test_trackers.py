"""What trackers get: entries of the config, the config itself, tables of samples."""

import pytest

from tests.obs_runs import make_run
from yatt.config.load import load_resolved
from yatt.config.sections.operation import LoggingSection, tracker_name
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_trackers
from yatt.launch.resolve.completed import completed_config
from yatt.obs.trackers.table import COLUMNS, MOST_CHARS, table_cells
from yatt.obs.trackers.tracker import dotted_keys


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        (["wandb"], "trackers: wandb has its own key; write wandb_mode: online or offline"),
        (["swanlab"], "trackers: 'swanlab' is unknown; write tensorboard, mlflow, or the path of a .py file"),
        (["mlflow", "a/mlflow.py"], "trackers: two are named mlflow"),
        (["a/mine.py", "b/mine.py"], "trackers: two are named mine"),
        (["wandb.py"], "trackers: two are named wandb"),
    ],
)
def test_trackers_that_are_unknown_or_named_alike_are_refused(tmp_path, trackers, says):
    with pytest.raises(ConfigError, match=f"logging.*{says}"):
        load_resolved(make_run(tmp_path, logging={"trackers": trackers}).config)


@pytest.mark.parametrize("none", [{"samples_per_iteration": 0}, {"rollouts": "none"}])
def test_samples_that_are_not_recorded_cannot_be_printed(tmp_path, none):
    with pytest.raises(ConfigError, match="print_sample_every: no sample is recorded"):
        load_resolved(make_run(tmp_path, logging={"print_sample_every": 10, **none}).config)


def test_a_users_file_keeps_its_meaning_in_every_folder(tmp_path, monkeypatch):
    paths = make_run(tmp_path, logging={"trackers": ["tensorboard", "mine/own.py"]})
    config = load_resolved(paths.config)
    monkeypatch.chdir(tmp_path)
    trackers = completed_config(config).logging.trackers
    assert trackers == ("tensorboard", str(tmp_path / "mine" / "own.py"))
    assert [tracker_name(each) for each in trackers] == ["tensorboard", "own"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("def make_tracker(:", "invalid syntax"),
        ("x = 1", "defines no function make_tr"),
    ],
)
def test_a_users_file_is_read_before_the_start(tmp_path, text, says):
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=f"logging.trackers: .*own.py.* {says}"):
        check_trackers(LoggingSection(trackers=("mlflow", str(tmp_path / "own.py"))))


def test_a_config_is_flat_with_the_keys_of_the_command_line():
    config = {"a": {"b": 1, "c": {}}, "d": [{"e": "x"}, {"e": None}], "f": ("p", "q")}
    assert dotted_keys(config) == {"a.b": 1, "a.c": {}, "d.0.e": "x", "d.1.e": None, "f": ("p", "q")}


def test_a_samples_cells_are_texts_and_numbers_and_long_texts_lose_their_middle():
    sample = {
        "sample": 3, "prompt": "p" * (MOST_CHARS + 10), "scores": {"exact": float("nan")}, "reward": 0.5,
        "ground_truth": ["a", 1], "advantage": None,
    }  # fmt: skip
    found = dict(zip(COLUMNS, table_cells(sample), strict=True))
    assert found["sample"] == 3 and found["reward"] == 0.5 and found["advantage"] is None
    assert found["scores"] == '{"exact": null}' and found["ground_truth"] == '["a", 1]'
    half = "p" * (MOST_CHARS // 2)
    assert found["prompt"] == f"{half}\n... 10 characters ...\n{half}"
