"""The wandb follower: the real package, offline, in its own process; and what happens without it."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.test_folder_between_attempts import Process
from tests.obs_runs import make_run, metrics
from yatt.config.load import load_resolved
from yatt.launch.follower import Follower
from yatt.obs.metrics import STEP, RowFile
from yatt.obs.wandb import last_step, new_rows, run_id, settings_of

OFFLINE = {"wandb_mode": "offline", "wandb_project": "tests"}
LIMIT_S = 60.0


def until(claim, what):
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def started(paths, **env):
    said: list[str] = []
    follower = Follower(paths, said.append)
    follower.start(load_resolved(paths.config), {**os.environ, **env})
    return follower, said


def records_of(file) -> list[bytes]:
    """The records of one of wandb's files: LevelDB's log format after a header of seven bytes."""
    data, offset, found, parts = file.read_bytes(), 7, [], []
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        parts.append(data[offset + 7 : offset + 7 + size])
        offset += 7 + size
        if kind in (1, 4):  # whole, or last part
            found.append(b"".join(parts))
            parts = []
    return found


def logged_steps(paths) -> list[tuple[str, int]]:
    """Folder and step of every row in wandb's own files, in order."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    steps = []
    for file in sorted(paths.wandb.glob("offline-run-*/*.wandb")):
        for data in records_of(file):
            record = messages.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                if STEP in (item.key, *item.nested_key):
                    steps.append((file.parent.name, json.loads(item.value_json)))
    return steps


def append(paths, rows):
    with paths.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_rows_are_logged_offline_once_each_also_over_a_resume_under_one_run_id(tmp_path):
    pytest.importorskip("wandb")
    paths = make_run(tmp_path, rows=metrics(3), logging=OFFLINE)
    follower, said = started(paths)
    until(lambda: last_step(paths) == 3, "the first rows were not logged")
    RowFile(paths.metrics, 2, lambda: None).close()  # the attempt went on from its checkpoint of iteration 2
    append(paths, metrics(5)[1:5])
    until(lambda: last_step(paths) == 5, "the rows after the rewrite were not logged")
    follower.end(LIMIT_S)
    first_id = run_id(paths)

    RowFile(paths.metrics, 4, lambda: None).close()
    append(paths, metrics(7)[3:7])
    follower, more = started(paths)
    until(lambda: last_step(paths) == 7, "the rows after the restart were not logged")
    follower.end(LIMIT_S)

    steps = logged_steps(paths)
    assert [step for _, step in steps] == [1, 2, 3, 4, 5, 6, 7]
    folders = {folder for folder, _ in steps}
    assert len(folders) == 2
    assert {folder.rpartition("-")[2] for folder in folders} == {first_id, run_id(paths)} == {first_id}
    assert said == more == []


def broken_package(folder, text):
    package = folder / "broken" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", os.getcwd())))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ImportError('No module named wandb')", "pip install 'yatt[wandb]'"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("def init(**_): raise RuntimeError('no disk')\nSettings = dict", "RuntimeError: no disk"),
    ],
)
def test_a_follower_that_fails_is_one_line_of_news_and_no_more(tmp_path, text, told):
    paths = make_run(tmp_path, rows=metrics(1), logging=OFFLINE)
    follower, said = started(paths, PYTHONPATH=broken_package(tmp_path, text))
    until(lambda: follower.check() or said, "the end was not noticed")
    follower.check()
    follower.end()
    assert len(said) == 1 and said[0].startswith("wandb: ")
    assert told in said[0]


def test_a_follower_that_does_not_end_is_killed_with_its_group(tmp_path):
    text = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = make_run(tmp_path, logging=OFFLINE)
    follower, said = started(paths, PYTHONPATH=broken_package(tmp_path, text))
    until(lambda: "deaf" in paths.wandb_log.read_text(), "it did not start")
    process = follower.process
    follower.end(limit_s=0.3)
    assert process.returncode == -signal.SIGKILL
    assert len(said) == 1 and "did not end within 0.3 s" in said[0]


def test_nothing_is_started_when_wandb_is_disabled(tmp_path):
    paths = make_run(tmp_path)
    follower, said = started(paths)
    follower.check()
    follower.end()
    assert follower.process is None and said == [] and not paths.wandb.exists()


def test_each_step_is_new_once():
    rows = [{STEP: 2, "a": None}, {STEP: 3, "a": 1.0}, {STEP: 3, "a": 2.0}, {STEP: 1}]
    assert new_rows(rows, 2) == [{STEP: 3, "a": 1.0}]


def test_only_an_online_run_asks_wandb_to_resume(tmp_path):
    paths = make_run(tmp_path, logging={"wandb_mode": "online", "wandb_name": "mine"})
    paths.wandb.mkdir()
    settings = settings_of(paths, load_resolved(paths.config))
    assert (settings["resume"], settings["name"], settings["id"]) == ("allow", "mine", run_id(paths))


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_folder_that_fails_for_a_while_costs_the_follower_time(tmp_path):
    pytest.importorskip("wandb")
    row = {STEP: 4, "actor/pg_loss": math.nan, "actor/grad_norm": math.inf}
    paths = make_run(tmp_path, rows=(*metrics(3), row), logging=OFFLINE)
    weather = tmp_path / "weather"
    weather.write_text("error config.yaml")
    argv = [sys.executable, "-m", "yatt.obs.wandb", "--run", str(paths.root)]
    follower = Process(argv, paths.root, weather)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            follower.process.wait(timeout=10)
        weather.write_text("error .last_step.")
        until(lambda: list(paths.wandb.glob("offline-run-*")), "wandb did not begin")
        with pytest.raises(subprocess.TimeoutExpired):
            follower.process.wait(timeout=3)
        weather.unlink()
        append(paths, [{STEP: 5}])
        until(lambda: last_step(paths) == 5, "the row after the trouble was not logged")
        follower.process.terminate()
        assert follower.process.wait(timeout=LIMIT_S) == 0, follower.said
    finally:
        follower.close()
    assert [step for _, step in logged_steps(paths)] == [1, 2, 3, 4, 5]


def test_values_of_storage_options_are_not_told(tmp_path):
    options = {"endpoint_url": "https://store.internal", "profile": "hidden-profile"}
    origin = {"url": "s3://b/x", "storage_options": options}
    paths = make_run(
        tmp_path,
        checkpoint={"url": "s3://b/y", "storage_options": options},
        run={"dir": str(tmp_path / "run"), "from_checkpoint": origin},
    )
    paths.wandb.mkdir()
    told = settings_of(paths, load_resolved(paths.config))["config"]
    assert told["checkpoint"]["storage_options"] == {"endpoint_url": "***", "profile": "***"}
    assert "internal" not in repr(told) and "hidden-profile" not in repr(told)


def test_the_webhooks_url_is_not_told(tmp_path):
    paths = make_run(tmp_path, logging={"wandb_project": "p", "webhook_url": "https://chat/services/secret"})
    paths.wandb.mkdir()
    assert "secret" not in repr(settings_of(paths, load_resolved(paths.config)))
