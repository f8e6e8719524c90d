"""docs/extending.md is true: its code blocks, as they stand, make a run with own reward and own algorithm."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import ROOT, RunFile, rows, yatt
from yatt.config.schema import AlgorithmSection
from yatt.launch.user_code import check_algorithm

PAGE = ROOT / "docs" / "extending.md"
pytestmark = pytest.mark.timeout(600)


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE.read_text(), re.S | re.M)
    return ["\n".join(line.removeprefix("   ") for line in block.splitlines()) + "\n" for block in found]


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
    for reward in settings["rewards"]:
        reward["path"] = str(folder / reward["path"])
    settings["algorithm"]["path"] = str(folder / settings["algorithm"]["path"])
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
