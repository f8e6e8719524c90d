"""docs/extending.md is true: its code blocks, as they stand, make a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.runs import ROOT, RunFile, rows, yatt
from tests.tiny_models import make_phi3, make_scripted_model
from yatt.adapters.inputs.model_family import model_of_run
from yatt.config.schema import AlgorithmSection, LoggingSection, ModelSection
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_algorithm, check_trackers
from yatt.obs.metrics import STEP

PAGE = ROOT / "docs" / "extending.md"


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE.read_text(), re.S | re.M)
    return ["\n".join(line.removeprefix("   ") for line in block.splitlines()) + "\n" for block in found]


def family_file(folder: Path) -> Path:
    """The page's model family, in a file of this folder."""
    (text,) = [block for block in blocks("python") if block.startswith("# my_family.py\n")]
    (file := folder / "my_family.py").write_text(text)
    return file


def written(folder: Path) -> dict[str, Any]:
    """The page's files in a folder; gives the settings of its run file."""
    folder.mkdir(exist_ok=True)
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "each file begins with its name"
        (folder / name[1]).write_text(block)
    settings: dict[str, Any] = {}
    for block in blocks("yaml"):
        settings |= yaml.safe_load(block)
    del settings["model"]  # the other sections' runs have a model of a family in the package
    for reward in settings["rewards"]:
        reward["path"] = str(folder / reward["path"])
    (genrm,) = settings["genrms"]
    genrm["path"], genrm["model"] = str(folder / genrm["path"]), make_scripted_model(folder / "judge")
    (folder / "judge" / "model.safetensors").write_bytes(b"")
    genrm |= {"engine": "scripted", "max_model_tokens": 2000, "max_tokens": 8}
    for section in ("algorithm", "environment"):
        settings[section]["path"] = str(folder / settings[section]["path"])
    logging = settings["logging"]
    logging["trackers"] = [str(folder / t) if t.endswith(".py") else t for t in logging["trackers"]]
    return settings


def test_its_reward_and_its_algorithm_train(tmp_path: Path) -> None:
    settings = written(tmp_path / "mine")
    data = {"ground_truth_key": "prompt"}
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "data": data, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = rows(run.run_dir / "metrics.jsonl")
    assert [row["training/global_step"] for row in metrics] == [1, 2, 3, 4]
    assert "critic/score/exact_match/mean" in metrics[0]
    assert all(row["actor/grad_norm"] >= 0 for row in metrics)
    assert all(1 < row["num_turns/mean"] <= 2 for row in metrics)
    assert max(row["environment/steps"] for row in metrics) > 0
    assert all(0 <= row["critic/score/judge/mean"] <= 1 and row["genrm/judge/asked"] > 0 for row in metrics)
    table = (run.run_dir / "trackers" / "my_tracker" / "rewards.csv").read_text().splitlines()
    assert table == [f"{row[STEP]},{row['critic/rewards/mean']}" for row in metrics]
    assert list((run.run_dir / "trackers" / "tensorboard").glob("events.out.tfevents.*"))
    assert "the run continues without it" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def make_algorithm(section)\n", "algorithm.path: .*my_algorithm.py: .*expected ':'"),
        (
            "def make(section): ...\n",
            "algorithm.factory: .*my_algorithm.py defines no function make_algorithm",
        ),
        (None, "algorithm.path: .*my_algorithm.py: No such file or directory"),
    ],
)
def test_a_mistake_in_the_algorithms_file_is_named_before_anything_starts(
    tmp_path: Path, text: str | None, says: str
) -> None:
    settings = written(tmp_path / "mine")
    file = tmp_path / "mine" / "my_algorithm.py"
    file.unlink() if text is None else file.write_text(text)
    run = RunFile(tmp_path, {"data": {"ground_truth_key": "prompt"}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def make_tracker(run)\n", "logging.trackers: .*my_tracker.py: .*expected ':'"),
        ("class Table: ...\n", "logging.trackers: .*my_tracker.py defines no function make_tracker"),
        (None, "logging.trackers: .*my_tracker.py: No such file or directory"),
    ],
)
def test_a_mistake_in_the_trackers_file_is_named_before_anything_starts(
    tmp_path: Path, text: str | None, says: str
) -> None:
    settings = written(tmp_path / "mine")
    file = tmp_path / "mine" / "my_tracker.py"
    file.unlink() if text is None else file.write_text(text)
    run = RunFile(tmp_path, {"data": {"ground_truth_key": "prompt"}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr


def test_the_page_s_other_tracker_is_accepted(tmp_path: Path) -> None:
    written(tmp_path)
    check_trackers(LoggingSection(trackers=(str(tmp_path / "my_swanlab.py"),)))


@pytest.mark.parametrize(
    "text", ["make_algorithm = lambda section: None", "from other import make_algorithm"]
)
def test_the_factory_may_be_any_name_of_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(f"{text}\n")
    check_algorithm(AlgorithmSection(path=str(tmp_path / "own.py")))


def test_an_algorithm_that_lacks_a_method_ends_the_run_with_the_users_exit_code(tmp_path: Path) -> None:
    settings = written(tmp_path / "mine")
    (tmp_path / "mine" / "my_algorithm.py").write_text("def make_algorithm(section):\n    return object()\n")
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "data": {"ground_truth_key": "prompt"}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2, done.stderr
    assert "returns has no needs, advantages, loss; see docs/extending.md" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def other(text, episode): ...\n", "my_environment.py has no function 'step' .it has: other."),
        ("import no_such_module\n", "environment.*no_such_module"),
        (None, "my_environment.py"),
    ],
)
def test_a_mistake_in_the_environments_file_is_named_before_anything_starts(
    tmp_path: Path, text: str | None, says: str
) -> None:
    settings = written(tmp_path / "mine")
    file = tmp_path / "mine" / "my_environment.py"
    file.unlink() if text is None else file.write_text(text)
    run = RunFile(tmp_path, {"data": {"ground_truth_key": "prompt"}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr


def test_an_environment_that_fails_drops_groups_and_is_named(tmp_path: Path) -> None:
    settings = written(tmp_path / "mine")
    (tmp_path / "mine" / "my_environment.py").write_text("def step(text, episode):\n    return 1 / 0\n")
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "data": {"ground_truth_key": "prompt"}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2, done.stderr
    assert re.search("my_environment.py:step failed at .*my_environment.py:2 on the sum sample", done.stdout)


def phi3_run(folder: Path, **settings: Any) -> RunFile:
    """A run as the section on families says: its file, its setting, a model of that family."""
    (folder / "mine").mkdir()
    family_file(folder / "mine")
    (model,) = [found["model"] for block in blocks("yaml") if "model" in (found := yaml.safe_load(block))]
    assert make_phi3(folder / model["path"]) == str(folder / "policy")
    model = {"path": str(folder / model["path"]), "family": str(folder / "mine" / model["family"])}
    return RunFile(folder, {"model": model, "rollout": {"engine": "transformers"}, **settings})


def test_its_family_trains_a_model_that_the_package_does_not_know(tmp_path: Path) -> None:
    import transformers

    trainer = {"total_iterations": 2, "pipeline_model_parallel_size": 2}
    run = phi3_run(tmp_path, trainer=trainer, sync={"probe_prompts": 2, "tolerance": 1.0e-4})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = rows(run.run_dir / "metrics.jsonl")
    assert [row["training/global_step"] for row in metrics] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in metrics)
    folders = tmp_path / "policy", run.run_dir / "model"
    start, trained = (transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert type(trained).__name__ == "Phi3ForCausalLM"
    before, after = start.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    changes = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert min(changes.values()) > 0, "every tensor is trained"
    assert max(changes.values()) < 0.02, "rows in another order would differ by more: weights are about 0.08"


GOOD = "from my_family import *\nfrom dataclasses import replace\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"model\.family: no file .*other\.py; write the path of a Python file"),
        ("families = []\n", r"model\.family: .*other\.py has no family = Family"),
        ("family = Family(\n", r"model\.family: .*other\.py:1: '\(' was never closed"),
        ("import no_such_module\n", r"model\.family: .*other\.py:1: .*no_such_module"),
        ("import os\nos._exit(3)\n", r"model\.family: loading .*other\.py ended the process \(.*3"),
        (
            f"{GOOD}family = replace(family, read=lambda values: values['no_such_key'])\n",
            r"model\.family: .*other\.py:3: KeyError.*no_such_key",
        ),
        (
            f"{GOOD}family = replace(family, rows=lambda shape: rows(shape)[1:])\n",
            r"model\.family: phi3: no row is embedding",
        ),
        (
            f"{GOOD}family = replace(family, rows=lambda shape: rows(shape) + rows(shape)[-1:])\n",
            r"model\.family: phi3: two rows have the parameter output_layer\.weight",
        ),
        (f"{GOOD}family = replace(family, model_type='phi4')\n", r"architecture 'phi3' is not supported"),
        (
            f"{GOOD}family = replace(family, architecture='Phi4ForCausalLM')\n",
            "architecture Phi3ForCausalLM cannot be trained; use .*Phi4ForCausalLM",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_the_familys_file_is_named_before_anything_starts(
    tmp_path: Path, text: str | None, says: str
) -> None:
    run = phi3_run(tmp_path)
    run.settings["model"]["family"] = str(file := tmp_path / "mine" / "other.py")
    if text is not None:
        file.write_text(text)
    done = yatt("run", str(run.write()))
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr and not run.run_dir.exists()


WRONG = """
def rows_of(shape):
    table = rows(shape)
    return [replace(row, {change}) if "{name}" in row.name else row for row in table]

family = replace(family, rows=rows_of)
"""


@pytest.mark.parametrize(
    ("name", "change", "code", "says"),
    [
        (
            "linear_fc2.weight",
            "width=row.width * 2",
            2,
            r"nothing was started:\n  model\.path: .*down_proj.weight with shape \(64, 128\); .*and 2 more",
        ),
        ("linear_qkv.weight", "groups=1", 93, "log-probs of the probe differ"),
    ],
)
def test_a_table_that_only_the_weights_contradict_ends_the_run(
    tmp_path: Path, name: str, change: str, code: int, says: str
) -> None:
    one = {"launch": {"nodes": 1}, "sync": {"probe_prompts": 2, "tolerance": 1.0e-4}}
    run = phi3_run(tmp_path, **one)
    run.settings["model"]["family"] = str(file := tmp_path / "mine" / "other.py")
    file.write_text(GOOD + WRONG.format(name=name, change=change))
    done = yatt("run", str(run.write()))
    assert done.returncode == code and re.search(says, done.stdout + done.stderr), done.stdout + done.stderr


EXTRA = """
from yatt.models.rows import vector_row

def rows_of(shape):
    return [*rows(shape), vector_row("decoder.extra.weight", "model.extra.weight", 8)]

family = replace(family, rows=rows_of)
"""


def test_a_row_that_is_no_parameter_is_never_published(tmp_path: Path) -> None:
    run = phi3_run(tmp_path, launch={"nodes": 1})
    save_file(
        {"model.extra.weight": torch.ones(8)}, Path(run.settings["model"]["path"]) / "extra.safetensors"
    )
    run.settings["model"]["family"] = str(file := tmp_path / "mine" / "other.py")
    file.write_text(GOOD + EXTRA)
    done = yatt("run", str(run.write()))
    says = done.stdout + done.stderr
    assert done.returncode == 2 and "the table has a row for decoder.extra.weight, which the model" in says, (
        says
    )


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"sliding_window": 2047}, "config.json says sliding_window=2047"),
        ({"resid_pdrop": 0.1}, "config.json says resid_pdrop=0.1"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "RoPE scaling .*longrope.* is not sup",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, "RoPE scaling .*0.75"),
    ],
)
def test_its_family_refuses_by_name_what_the_trainer_cannot_do(
    tmp_path: Path, setting: dict[str, Any], says: str
) -> None:
    values = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **setting}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=says):
        model_of_run(ModelSection(path=str(tmp_path), family=str(family_file(tmp_path))))
