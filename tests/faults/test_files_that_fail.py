"""Files that cannot be read for a while: who starts waits for them, and blames nobody with exit code 2."""

import errno
import sys
import time

import pytest

from tests.faults.test_folder_between_attempts import Process
from tests.runs import HANG_S, REWARD, RunFile, command, rows, wait_for
from tests.tiny_models import make_qwen3
from yatt.adapters.files.files import unsealed_any
from yatt.config.site import SiteConfig
from yatt.launch.resolve.plan import JobPlan, write_plan
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults


def step_of(paths: RunPaths) -> list[str]:
    return [
        "env", "SLURM_PROCID=0", sys.executable, "-m", "yatt.launch.node.step", "--run", str(paths.root),
        "--attempt", "1", "--indexes", "0",
    ]  # fmt: skip


def test_a_step_of_a_job_waits_for_the_run_folder_and_only_then_says_whose_mistake_it_is(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    paths, weather = RunPaths(tmp_path / "run"), tmp_path / "weather"
    paths.root.mkdir()
    paths.config.write_text("no: config\n")
    write_plan(paths, JobPlan(submission="1", layout="flat", site=SiteConfig()))
    weather.write_text("error config.yaml")
    step = Process(step_of(paths), paths.root, weather)
    try:
        step.goes_on()
        weather.write_text("error controllers")
        log = paths.log(1, "node0")
        wait_for(lambda: log.exists() and log.read_text(), what="what the step says")
        step.goes_on()
        weather.unlink()
        assert step.process.wait(timeout=HANG_S) == 2, step.said
        assert unsealed_any(paths.controller_record(1, 0).read_bytes())["ended"] == 2
        assert "config.yaml" in log.read_text()
    finally:
        step.close()


READ_MODEL = """
import sys, threading
from functools import partial
from pathlib import Path
from yatt.adapters.files.patience import is_passing, with_retries
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.errors import ConfigError
from yatt.weights.convert import HFTensors
folder, weather, ticks = sys.argv[1], Path(sys.argv[2]), []

def fail(name, seconds):
    weather.write_text(f"error {name}")
    threading.Timer(seconds, weather.unlink).start()

fail("tokenizer.json", 2.0)
try:
    Tokenizer(folder)
except ConfigError as error:
    assert is_passing(error), error
else:
    raise AssertionError("nothing failed")
assert with_retries(partial(Tokenizer, folder)).encode("abc")
fail(".safetensors", 1.0)
source = HFTensors(folder, tick=lambda: ticks.append(1))
assert ticks, "no ticks while the folder was waited for"
ticks.clear()
fail(".safetensors", 1.0)
assert source.read("model.norm.weight").shape == (64,)
assert len(ticks) > 1, "no ticks while a tensor was waited for"
print("read", flush=True)
"""


def test_a_models_files_are_waited_for_with_ticks(tmp_path):
    folder, weather = tmp_path / "model", tmp_path / "weather"
    make_qwen3(folder, tied=True, seed=0)
    argv = [sys.executable, "-c", READ_MODEL, str(folder), str(weather)]
    reader = Process(argv, folder, weather)
    try:
        assert reader.process.wait(timeout=300) == 0, reader.said
        wait_for(lambda: "read\n" in reader.said, timeout_s=60, what="the last line")
    finally:
        reader.close()


# What Python makes of ESHUTDOWN is the error of a closed pipe too; of ETIMEDOUT, that of a limit.
@pytest.mark.parametrize("number", [errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["reward.py", "policy/tokenizer.json", "policy/config.json"])
def test_a_file_that_fails_before_the_start_is_no_mistake_of_the_user(tmp_path, monkeypatch, name, number):
    monkeypatch.setenv("YATT_SOAK_ERROR", str(number))
    run = RunFile(tmp_path / "a", {"launch": {"nodes": 1}, "trainer": {"total_iterations": 1}})
    argv, weather = command("run", str(run.write())), tmp_path / "weather"
    weather.write_text("error")
    started = Process(argv, run.folder / name, weather)
    try:
        code = started.process.wait(timeout=300)
    finally:
        started.close()
    assert code == (2 if number == errno.ENOSPC else 1), started.said  # who typed makes room on a full disk
    assert name.rpartition("/")[2] in "".join(started.said)
    assert "Traceback" not in "".join(started.said)
    assert not run.run_dir.exists()


@pytest.mark.slow
def test_a_data_file_that_fails_for_a_while_costs_no_sample(tmp_path):
    """The reward processes read rows; the time that takes is not their functions'."""
    settings = {"launch": {"nodes": 1, "reward_processes": 1}, "trainer": {"total_iterations": 3}}
    run, marks = RunFile(tmp_path / "a", settings), tmp_path / "called"
    run.folder.mkdir()
    # Its process has no row open yet when it is killed by its first call, and the weather turns bad.
    once = f"""
import os, pathlib
weather, called = pathlib.Path({str(tmp_path / "weather")!r}), pathlib.Path({str(marks)!r})
inner = compute_score
def compute_score(**arguments):
    if not called.exists():
        called.touch()
        weather.write_text("error")
        os._exit(1)
    return inner(**arguments)
"""
    (run.folder / "reward.py").write_text(REWARD + once)
    section = {"name": "digits", "path": str(run.folder / "reward.py"), "timeout_s": 1.0}
    run.settings = {"rewards": [section], **settings}
    argv, weather, events = (
        command("run", str(run.write())),
        tmp_path / "weather",
        run.run_dir / "events.jsonl",
    )
    started = Process(argv, run.folder / "train.jsonl", weather)
    try:
        wait_for(marks.exists, timeout_s=60, what="the first call")
        time.sleep(10.0)  # more than a call may take with its repeats: 1 + 2 + 4 s
        assert not rows(run.run_dir / "metrics.jsonl"), "the weather came too late"
        weather.unlink()
        assert started.process.wait(timeout=300) == 0, started.said
    finally:
        started.close()
    assert kinds(events, "rollout.group.drop") == kinds(events, "reward.kill") == []
    assert len(kinds(events, "attempt.start")) == 1


def kinds(events, kind):
    return [event for event in rows(events) if event["kind"] == kind]
