"""Functions are called on a few rows before a start: what fails, ends its process or hangs is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, yatt
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks import score_trial
from yatt.launch.checks.score_trial import try_scores

GOOD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str == ground_truth else 0.25
"""


def config_of(folder: Path, text: str, *more: dict[str, Any], **sections: Any) -> RunConfig:
    """A run with a reward `mine` of this text, and `more` rewards; eight rows, of which every third has no
    label."""
    rows = [
        {"prompt": f"{i}?", "answer": str(i), "extra_info": {} if i % 3 == 2 else {"label": i}}
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(text)
    run = folder / "run.json"
    content = {
        "run": {"dir": str(folder / "run")},
        "data": {"train_files": [str(folder / "rows.jsonl")], "ground_truth_key": "answer"},
        "model": {"path": "/models/x"},
        "optimizer": {"lr": 0.001},
        "trainer": {"total_iterations": 1, "train_batch_size": 4, "mini_batch_size": 2},
        "rewards": [{"name": "mine", "path": str(folder / "mine.py")}, *more],
        **sections,
    }
    run.write_text(json.dumps(content))
    return load_run_config([run], [])


def lines_of(config: RunConfig) -> list[str]:
    return [each.in_words() for each in try_scores(config)]


def test_scores_of_the_truth_and_of_an_empty_text_are_shown(tmp_path: Path, capfd) -> None:
    assert lines_of(config_of(tmp_path, GOOD)) == [
        "rewards[mine]: ground truth: 1 1 1 1 1; empty text: 0.25 0.25 0.25 0.25 0.25"
    ]
    assert capfd.readouterr().err == ""


def test_a_truth_that_scores_no_higher_is_doubted(tmp_path: Path) -> None:
    (line,) = lines_of(config_of(tmp_path, GOOD.replace("solution_str == ground_truth", "False")))
    assert "(the ground truth scores no higher than an empty text: is data.ground_truth_key right" in line


def test_a_function_that_fails_on_every_row_is_refused_with_place_and_cure(tmp_path: Path) -> None:
    text = GOOD.replace("return 1.0", "return extra_info['lable'] if True else 1.0")
    with pytest.raises(ConfigError) as refused:
        try_scores(config_of(tmp_path, text))
    says = str(refused.value)
    assert says.startswith("rewards[mine]: all 10 trial calls failed; the first, with the ground truth as ")
    assert f"KeyError: 'lable' at {tmp_path}/mine.py:3" in says
    assert f"{tmp_path}/rows.jsonl" in says
    assert says.endswith("rewards[mine].trial: false starts without a trial.")


def test_a_function_that_fails_on_some_rows_is_told(tmp_path: Path, capfd) -> None:
    text = GOOD.replace("return 1.0", "extra_info['label']\n    return 1.0")
    (line,) = lines_of(config_of(tmp_path, text))
    assert "1 1 failed 1 1" in line
    err = capfd.readouterr().err
    assert "yatt: note: rewards[mine]: 2 of 10 trial calls failed; the first, with the ground truth" in err
    assert "KeyError: 'label'" in err


def test_an_error_of_many_odd_lines_is_told_in_one_short_line_that_can_be_shown(
    tmp_path: Path, capfd
) -> None:
    work = "raise ConnectionError('a\\nb\\x1b[31m\\0\\u202e' + 'x' * 9000)"
    lines_of(config_of(tmp_path, GOOD.replace("return", f"{work}\n    return")))
    (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("yatt: note: rewards")]
    assert "ConnectionError: a b\\x1b[31m\\x00\\u202ex" in told and told.endswith(
        f"x at {tmp_path}/mine.py:3"
    )
    assert told.isprintable() and len(told) < 1000


@pytest.mark.parametrize(
    "work",
    [
        "raise ConnectionError('no route')", "raise ImportError('no cuda')", "raise TimeoutError()",
        "import os; os.environ['YATT_NOT_HERE']", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import re; re.search('<a>(.*)</a>', solution_str)[1]",
        "import re; re.search('<a>(.*)</a>', solution_str).group(1)", "solution_str.split('####')[1]",
        "assert '####' in solution_str",
        "for line in solution_str.split('Answer:')[1:]: found = line\n    found",
    ],
)  # fmt: skip
def test_what_may_be_of_this_machine_or_of_the_text_is_told_and_not_refused(
    tmp_path: Path, capfd, work: str
) -> None:
    lines_of(config_of(tmp_path, GOOD.replace("return", f"{work}\n    return")))
    err = capfd.readouterr().err
    assert "yatt: note: rewards[mine]: all " in err and "trial calls failed" in err


def test_a_function_that_is_not_loaded_in_time_is_told_and_the_next_is_tried(
    tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setattr(score_trial, "CALL_S", 3.0)
    other = tmp_path / "other.py"
    other.write_text(GOOD)
    text = "import threading\nthreading.Event().wait()\n" + GOOD
    lines = lines_of(config_of(tmp_path, text, {"name": "other", "path": str(other)}))
    assert [line.partition(":")[0] for line in lines] == ["rewards[mine]", "rewards[other]"]
    assert "rewards[mine] was not tried: no answer within 3 s" in capfd.readouterr().err


@pytest.mark.parametrize("end", ["os._exit(3)", "os.abort()", "sys.exit()"])
def test_a_function_that_ends_its_process_is_told_and_the_next_is_tried(
    tmp_path: Path, capfd, end: str
) -> None:
    """Not refused: a library may lack what another machine has."""
    other = tmp_path / "other.py"
    other.write_text(GOOD)
    text = "import os\nimport sys\n" + GOOD.replace("return", f"{end}\n    return")
    lines = lines_of(config_of(tmp_path, text, {"name": "other", "path": str(other)}))
    assert lines[1].startswith("rewards[other]: ground truth: 1 1 1 1 1")
    assert "yatt: note: rewards[mine]: all " in capfd.readouterr().err


def test_a_function_that_hangs_is_ended_and_told_and_the_next_is_tried(
    tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setattr(score_trial, "CALL_S", 3.0)
    other = tmp_path / "other.py"
    other.write_text(GOOD)
    text = "import threading\n" + GOOD.replace("return", "threading.Event().wait()\n    return")
    lines = lines_of(config_of(tmp_path, text, {"name": "other", "path": str(other)}))
    assert lines[0] == "rewards[mine]: ground truth: failed"
    assert lines[1].startswith("rewards[other]: ground truth: 1 1 1 1 1")
    assert "no answer within 3 s" in capfd.readouterr().err


BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(solution_strs)) for _ in solution_strs]
"""
TRL = """
def compute_score(prompts, completions, answer, **columns):
    return [float(len(completions)) if text == truth else None for text, truth in zip(completions, answer)]
"""


@pytest.mark.parametrize(
    ("text", "settings", "line"),
    [
        (BATCH, {"scope": "batch"}, "ground truth: 10 10 10 10 10; empty text: 10 10 10 10 10"),
        (BATCH, {"scope": "group"}, "ground truth: 2 2 2 2 2; empty text: 2 2 2 2 2"),
        (TRL, {"style": "trl"}, "ground truth: 2 2 2 2 2; empty text: - - - - -"),
    ],
)
def test_lists_are_called_as_a_run_does(
    tmp_path: Path, text: str, settings: dict[str, str], line: str
) -> None:
    config = config_of(tmp_path, GOOD)
    (tmp_path / "mine.py").write_text(text)
    content = json.loads((tmp_path / "run.json").read_text())
    content["rewards"][0].update(settings)
    (tmp_path / "run.json").write_text(json.dumps(content))
    config = load_run_config([tmp_path / "run.json"], [])
    (found,) = lines_of(config)
    assert found.removeprefix("rewards[mine]: ").startswith(line)


def test_an_environment_is_called_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "def step(text, episode):\n    return None if text == episode.ground_truth else 'again'\n"
    )
    config = config_of(tmp_path, GOOD, environment={"path": str(tmp_path / "world.py")})
    assert lines_of(config)[1] == (f"environment: ground truth:{' ends' * 5}; empty text:{' answers' * 5}")


def test_a_truth_that_is_no_text_is_no_completion(tmp_path: Path) -> None:
    config = config_of(tmp_path, GOOD)
    rows = [{"prompt": "?", "answer": ["assert f() == 1"]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert lines_of(config) == ["rewards[mine]: empty text: 0.25"]


def test_a_function_without_a_trial_is_not_called(tmp_path: Path) -> None:
    called = tmp_path / "called"
    text = GOOD.replace("return", f"open({str(called)!r}, 'w')\n    return")
    config = config_of(tmp_path, text)
    content = json.loads((tmp_path / "run.json").read_text())
    content["rewards"][0]["trial"] = False
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert lines_of(load_run_config([tmp_path / "run.json"], [])) == []
    assert not called.exists()
    assert lines_of(config)
    assert called.exists()


def test_a_broken_function_never_starts_a_run(tmp_path: Path) -> None:
    """The commands refuse it, with its place; and a check shows the scores of one that works."""
    (tmp_path / "reward.py").write_text(GOOD.replace("return", "extra_info['lable']\n    return"))
    run = RunFile(tmp_path, {"rewards": [{"name": "r", "path": str(tmp_path / "reward.py"), "trial": True}]})
    file = str(run.write())
    for command in ("check", "run"):
        done = yatt(command, file)
        assert done.returncode == 2
        assert "KeyError: 'lable'" in done.stdout + done.stderr
    assert not run.run_dir.exists()
    (tmp_path / "reward.py").write_text(GOOD)
    done = yatt("check", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "call  rewards[r]: empty text: 0.25" in done.stdout
