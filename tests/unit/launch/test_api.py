"""`import yatt`: a run as plain data."""

import math

import pytest

import yatt
from tests.obs_runs import make_run, metrics
from yatt.adapters.run_folder.run_config import load_run
from yatt.errors import ConfigError
from yatt.obs.metrics import STEP


def test_the_package_gives_its_functions_and_no_others():
    assert all(callable(getattr(yatt, name)) for name in yatt.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="module 'yatt' has no attribute 'trainer_of'"):
        _ = yatt.trainer_of


def test_a_config_is_loaded_as_on_the_command_line(tmp_path):
    overlay = tmp_path / "over.yaml"
    overlay.write_text("rollout: {n: 4}\n")
    config = yatt.load_config("configs/quickstart.yaml", str(overlay), "trainer.total_iterations=7")
    assert (config.rollout.n, config.trainer.total_iterations) == (4, 7)
    with pytest.raises(ConfigError, match="Did you mean 'rollout'"):
        yatt.load_config("configs/quickstart.yaml", "rolout.n=4")


def test_a_run_is_plain_data(tmp_path):
    rows = [row | {"actor/kl": math.nan if row[STEP] == 2 else 0.5} for row in metrics(3)]
    paths = make_run(tmp_path, rows=rows)
    run = yatt.open_run(paths.root)
    assert run.folder == paths.root and run.config == load_run(paths)
    assert [row[STEP] for row in run.metrics()] == [1, 2, 3]
    assert run.status()["total_iterations"] == run.config.trainer.total_iterations
    assert list(run.events()) == [] and run.samples() == []
    frame = run.metrics_frame()
    assert list(frame.index) == [1, 2, 3] and frame["actor/kl"].isna().tolist() == [False, True, False]
    assert yatt.open_run(make_run(_below(tmp_path)).root).metrics_frame().empty
    with pytest.raises(ConfigError):
        run.stop()
    with pytest.raises(ConfigError, match="is not a run folder"):
        yatt.open_run(tmp_path / "none")


def _below(folder):
    (folder / "other").mkdir()
    return folder / "other"
