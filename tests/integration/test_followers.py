"""Followers: real packages without a network, each in its own process; and what happens without them."""

import json
import math
import os
import signal
import sys
from typing import Any

import pytest

from tests import obs_runs
from tests.faults.test_folder_between_attempts import Process
from tests.obs_runs import metrics
from tests.runs import HANG_S, wait_for
from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.ledger import COMMITTED, write_record
from yatt.config.load import load_resolved
from yatt.launch.attempt.follower import Followers
from yatt.obs.metrics import STEP, RowFile
from yatt.obs.trackers.follow import SAMPLES, Rows, Samples, TrackerState, sends_at_once, tracked_run
from yatt.obs.trackers.tracker import TrackedRun

OFFLINE = {"wandb_mode": "offline", "wandb_project": "tests"}
OWN = """
import json

class Lines:
    def __init__(self, run):
        self.file = open(run.folder / "lines.jsonl", "a")
        self.write("began", run.last_step, [run.id, run.name, run.config["trainer"]["total_iterations"]])

    def write(self, kind, step, content):
        self.file.write(json.dumps([kind, step, content]) + "\\n")
        self.file.flush()

    def log_row(self, step, row):
        self.write("row", step, row["critic/rewards/mean"])

    def log_samples(self, step, samples):
        self.write("samples", step, [sample["completion"] for sample in samples])

    def close(self):
        self.file.close()

def make_tracker(run):
    return Lines(run)
"""


def make_run(folder, *, logging=None, **more):
    """A run whose trackers get rows at once, unless it says something else."""
    return obs_runs.make_run(folder, logging={"send_rows": "at_once", **(logging or {})}, **more)


def committed(paths, iteration, *, attempt):
    """What an attempt's leader leaves after a commit."""
    (paths.claims / f"{attempt:06d}").mkdir(parents=True, exist_ok=True)
    write_record(paths, attempt, COMMITTED, {"iteration": iteration})


def last_step(paths, tracker="wandb"):
    return TrackerState(paths.tracker(tracker)).last()


def run_id(paths):
    return TrackerState(paths.tracker("wandb")).run_id()


def run_of(paths):
    config = load_resolved(paths.config)
    paths.tracker("wandb").mkdir(exist_ok=True)
    return tracked_run(paths, config, TrackerState(paths.tracker("wandb")))


def sample(step, number, *, attempt=1, completion="four"):
    return {
        STEP: step, "attempt": attempt, "sample": number, "prompt": "2 + 2 = |", "completion": completion,
        "reward": 1.0, "scores": {"exact": 1.0}, "verdicts": {"judge": "good"},
    }  # fmt: skip


def until(claim, what):
    wait_for(claim, what=f"this to be over: {what}")


def started(paths, **env):
    said: list[str] = []
    follower = Followers(paths, said.append)
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
    for file in sorted(paths.tracker("wandb").glob("offline-run-*/*.wandb")):
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
def test_rows_are_logged_offline_once_each_also_over_a_resume_under_one_run_id(tmp_path):
    pytest.importorskip("wandb")
    paths = make_run(tmp_path, rows=metrics(3), logging=OFFLINE)
    follower, said = started(paths)
    until(lambda: last_step(paths) == 3, "the first rows were not logged")
    RowFile(paths.metrics, 2, lambda: None).close()  # the attempt went on from its checkpoint of iteration 2
    append(paths, metrics(5)[1:5])
    until(lambda: last_step(paths) == 5, "the rows after the rewrite were not logged")
    follower.end(HANG_S)
    first_id = run_id(paths)

    RowFile(paths.metrics, 4, lambda: None).close()
    append(paths, metrics(7)[3:7])
    follower, more = started(paths)
    until(lambda: last_step(paths) == 7, "the rows after the restart were not logged")
    follower.end(HANG_S)

    steps = logged_steps(paths)
    assert [step for _, step in steps] == [1, 2, 3, 4, 5, 6, 7]
    folders = {folder for folder, _ in steps}
    assert len(folders) == 2
    assert {folder.rpartition("-")[2] for folder in folders} == {first_id, run_id(paths)} == {first_id}
    assert said == more == []


@pytest.mark.slow
def test_samples_are_a_table_at_wandb(tmp_path):
    pytest.importorskip("wandb")
    samples = [sample(1, 0), sample(1, 1, completion="five"), sample(2, 2)]
    logging = {**OFFLINE, "send_samples": True}
    paths = make_run(tmp_path, rows=metrics(2), samples=samples, logging=logging)
    followers, said = started(paths)
    until(lambda: last_step(paths) == 2, "the rows were not logged")
    followers.end(HANG_S)
    assert said == []
    files = paths.tracker("wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    tables = sorted((json.loads(file.read_text()) for file in files), key=lambda t: -len(t["data"]))
    column = tables[0]["columns"].index("completion")
    assert [[row[column] for row in table["data"]] for table in tables] == [["four", "five"], ["four"]]
    assert sorted(step for _, step in logged_steps(paths)) == [1, 1, 2, 2]


def broken_package(folder, text, name="wandb"):
    package = folder / "broken" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", os.getcwd())))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ImportError('No module named wandb')", "pip install 'yatt[wandb]'"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os\nos._exit(0)", "exit code 0"),
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


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_one_line_of_news_with_its_cure(tmp_path, tracker):
    paths = make_run(tmp_path, rows=metrics(1), logging={"trackers": [tracker]})
    missing = f"raise ImportError('No module named {tracker}')"
    followers, said = started(paths, PYTHONPATH=broken_package(tmp_path, missing, tracker))
    until(lambda: followers.check() or said, "the end was not noticed")
    followers.end()
    assert len(said) == 1 and said[0].startswith(f"{tracker}: ")
    assert f"pip install 'yatt[{tracker}]', or take {tracker} out of logging.trackers" in said[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_library\n", "mine.py:1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("make = None\n", "mine.py defines no function make_tracker(run)"),
        (
            "def make_tracker(run): raise ValueError('no\\nservice: https://me:pass@host/x')",
            "no service: https://***@host/x",
        ),
        ("def make_tracker(run): return object()", "no attribute 'log_row'"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "killed by SIGKILL"),
    ],
)
def test_a_users_tracker_that_fails_is_one_line_of_news_and_the_others_go_on(tmp_path, text, told):
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "other.py").write_text(OWN)
    trackers = [str(tmp_path / name) for name in ("mine.py", "other.py")]
    paths = make_run(tmp_path, rows=metrics(2), logging={"trackers": trackers})
    followers, said = started(paths)
    until(lambda: followers.check() or said, "the end was not noticed")
    until(lambda: last_step(paths, "other") == 2, "the other tracker did not go on")
    append(paths, metrics(3)[2:])
    followers.end(HANG_S)
    assert len(said) == 1 and said[0].startswith("mine: ") and told in said[0]
    assert "pass" not in said[0]
    assert last_step(paths, "other") == 3


def own_lines(paths):
    return [json.loads(line) for line in (paths.trackers / "mine" / "lines.jsonl").read_text().splitlines()]


def test_a_users_tracker_gets_each_row_and_the_samples_of_each_iteration_once(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    samples = [sample(1, 0), sample(1, 1, completion="five"), sample(2, 2)]
    logging = {"trackers": [str(tmp_path / "mine.py")], "send_samples": True}
    paths = make_run(tmp_path, rows=metrics(2), samples=samples, logging=logging)
    followers, said = started(paths)
    until(lambda: TrackerState(paths.trackers / "mine").last(SAMPLES) == 1, "samples were not logged")
    followers.end(HANG_S)
    identity = [TrackerState(paths.trackers / "mine").run_id(), "run", 24]
    first = [
        ["began", -1, identity], ["row", 1, 0.1], ["row", 2, 0.2],
        ["samples", 1, ["four", "five"]], ["samples", 2, ["four"]],
    ]  # fmt: skip
    assert own_lines(paths) == first

    RowFile(paths.metrics, 2, lambda: None).close()
    RowFile(paths.samples, 2, lambda: None).close()
    append(paths, metrics(3)[1:])
    with paths.samples.open("a") as file:
        file.writelines(json.dumps(sample(step, step, attempt=2)) + "\n" for step in (2, 3))
    followers, more = started(paths)
    until(lambda: last_step(paths, "mine") == 3, "the rows after the restart were not logged")
    followers.end(HANG_S)
    assert own_lines(paths)[len(first) :] == [
        ["began", 2, identity],
        ["row", 3, pytest.approx(0.3)],
        ["samples", 3, ["four"]],
    ]
    assert said == more == []


def test_without_send_samples_no_text_leaves_the_run_folder(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    logging = {"trackers": [str(tmp_path / "mine.py")]}
    paths = make_run(tmp_path, rows=metrics(2), samples=[sample(1, 0)], logging=logging)
    followers, _ = started(paths)
    until(lambda: last_step(paths, "mine") == 2, "the rows were not logged")
    followers.end(HANG_S)
    assert [kind for kind, *_ in own_lines(paths)] == ["began", "row", "row"]


def test_samples_wait_until_their_iteration_is_complete_and_are_those_of_the_newest_attempt(tmp_path):
    file = tmp_path / "samples.jsonl"

    def write(*records):
        with file.open("a") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)

    samples = Samples(file, 1)
    write(sample(1, 0), sample(2, 0), sample(3, 0, completion="old"))
    assert [step for step, _ in samples.until(3)] == [2]
    write(sample(3, 0, attempt=2, completion="new"))
    assert [(s, [each["completion"] for each in found]) for s, found in samples.until(4)] == [(3, ["new"])]
    RowFile(file, 3, lambda: None).close()
    write(sample(3, 0, attempt=3), sample(4, 0, attempt=3))
    assert [step for step, _ in samples.until(5)] == [4]


def shown_by_tensorboard(paths):
    """The scalars' (step, value) and the texts' (step, cells by row) by tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(paths.trackers / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts: dict[str, list] = {}
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            cells = [cell.decode() for cell in event.tensor_proto.string_val]
            width = event.tensor_proto.tensor_shape.dim[1].size
            rows = [tuple(cells[i : i + width]) for i in range(0, len(cells), width)]
            texts.setdefault(tag, []).append((event.step, rows))
    return scalars, texts


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_over_a_resume_and_a_kill_and_the_samples(tmp_path):
    pytest.importorskip("tensorboard")
    logging = {"trackers": ["tensorboard"], "send_samples": True}
    samples = [sample(1, 0), sample(1, 1), sample(2, 2)]
    paths = make_run(tmp_path, rows=metrics(3), samples=samples, logging=logging)
    followers, said = started(paths)
    until(lambda: last_step(paths, "tensorboard") == 3, "the first rows were not logged")
    noted = TrackerState(paths.tracker("tensorboard"))
    until(lambda: noted.last(SAMPLES) == 2, "the samples before the last row were not logged")
    (process,) = followers.processes
    os.killpg(process.pid, signal.SIGKILL)
    until(lambda: followers.check() or said, "the end was not noticed")
    TrackerState(paths.trackers / "tensorboard").logged(2)  # as if it had been killed between row and note

    RowFile(paths.metrics, 3, lambda: None).close()
    append(paths, [{STEP: 3, "critic/rewards/mean": 7.0}, {STEP: 4, "critic/rewards/mean": math.nan}])
    followers, more = started(paths)
    until(lambda: last_step(paths, "tensorboard") == 4, "the rows after the restart were not logged")
    followers.end(HANG_S)
    assert len(said) == 1 and more == []

    scalars, texts = shown_by_tensorboard(paths)
    rewards = scalars["critic/rewards/mean"]
    assert [step for step, _ in rewards] == [1, 2, 3, 4]
    assert [value for _, value in rewards[:3]] == pytest.approx([0.1, 0.2, 7.0]) and math.isnan(rewards[3][1])
    assert STEP not in scalars
    assert [(step, len(rows)) for step, rows in texts["samples"]] == [(1, 3), (2, 2)]
    header, first, _ = texts["samples"][0][1]
    cells = dict(zip(header, first, strict=True))
    assert cells["prompt"] == "    2 + 2 = |\n" and cells["completion"] == "    four\n"
    assert (cells["reward"], cells["advantage"]) == ("1", "")
    assert dict(texts["config"][0][1])["optimizer.lr"] == "0.001"


@pytest.mark.slow
def test_mlflow_has_one_run_over_all_starts_with_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read, as the tracker writes
    tracking = pytest.importorskip("mlflow.tracking")
    logging = {"trackers": ["mlflow"], "send_samples": True}
    paths = make_run(tmp_path, rows=metrics(3), samples=[sample(1, 0), sample(3, 1)], logging=logging)
    append(paths, [{STEP: 4, "val-core/sum, hard/exact/mean@4": math.inf}])
    followers, said = started(paths, MLFLOW_TRACKING_URI="")
    until(lambda: last_step(paths, "mlflow") == 4, "the first rows were not logged")
    followers.end(HANG_S)
    text = paths.config.read_text().replace("total_iterations: 24", "total_iterations: 30")
    paths.config.write_text(text)
    append(paths, metrics(5)[4:])
    followers, more = started(paths, MLFLOW_TRACKING_URI="")
    until(lambda: last_step(paths, "mlflow") == 5, "the rows after the restart were not logged")
    followers.end(HANG_S)
    assert said == more == []

    client = tracking.MlflowClient(tracking_uri=(paths.trackers / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("yatt")
    (found,) = client.search_runs([experiment.experiment_id])
    key = found.info.run_id
    history = client.get_metric_history(key, "critic/rewards/mean")
    assert [(m.step, m.value) for m in history] == [(n, pytest.approx(n / 10)) for n in (1, 2, 3, 5)]
    (best,) = client.get_metric_history(key, "val-core/sum_ hard/exact/mean_at_4")
    assert (best.step, best.value) == (4, math.inf)
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.params["trainer.total_iterations"] == "24"
    assert [file.path for file in client.list_artifacts(key, "samples")] == [
        "samples/000001.json", "samples/000003.json"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("timing_s/step", "timing_s/step"),
        ("val-core/a b/é/mean@8", "val-core/a b/_/mean_at_8"),
        ("/a//./../b", "a/b"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_of_metrics_that_mlflow_accepts(key, name):
    validation = pytest.importorskip("mlflow.utils.validation")
    from yatt.obs.trackers.mlflow import metric_name

    assert metric_name(key) == name
    validation._validate_metric_name(name)


def test_a_follower_that_does_not_end_is_killed_with_its_group(tmp_path):
    text = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = make_run(tmp_path, logging=OFFLINE)
    follower, said = started(paths, PYTHONPATH=broken_package(tmp_path, text))
    until(lambda: "deaf" in paths.tracker_log("wandb").read_text(), "it did not start")
    (process,) = follower.processes
    follower.end(limit_s=0.3)
    assert process.returncode == -signal.SIGKILL
    assert len(said) == 1 and "did not end within 0.3 s" in said[0]


def test_nothing_is_started_without_trackers(tmp_path):
    paths = make_run(tmp_path)
    follower, said = started(paths)
    follower.check()
    follower.end()
    assert not follower.processes and said == []
    assert not paths.tracker("wandb").exists() and not paths.trackers.exists()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_tracker_never_has_numbers_of_iterations_that_were_lost(tmp_path, is_killed):
    """An attempt is at 7 with a checkpoint of 4; the next one repeats 5 to 7, with other numbers."""
    (tmp_path / "lines.py").write_text(OWN)
    tracker = {"trackers": [str(tmp_path / "lines.py")], "send_rows": "committed"}
    paths = make_run(tmp_path, rows=metrics(7), logging=tracker, checkpoint={"save_every": 2})
    committed(paths, 4, attempt=1)
    follower, said = started(paths)
    until(lambda: last_step(paths, "lines") == 4, "rows that the checkpoint covers were not logged")
    if is_killed:
        follower.end(HANG_S)
    RowFile(paths.metrics, 5, lambda: None).close()
    append(paths, [{**row, "critic/rewards/mean": 100.0 + row[STEP]} for row in metrics(8)[4:]])
    committed(paths, 4, attempt=2)
    if is_killed:
        follower, said = started(paths)
    committed(paths, 6, attempt=2)
    until(lambda: last_step(paths, "lines") == 6, "rows of the second attempt were not logged")
    write_atomically(paths.finished, sealed_record({}, 2))
    follower.end(HANG_S)
    lines = [json.loads(line) for line in (paths.tracker("lines") / "lines.jsonl").read_text().splitlines()]
    logged = [(step, value) for kind, step, value in lines if kind == "row"]
    assert logged == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 105.0), (6, 106.0), (7, 107.0), (8, 108.0)]
    assert said == []


@pytest.mark.parametrize(
    ("logging", "checkpoint", "is_at_once"),
    [
        ({}, {}, True), ({}, {"save_every": 10}, False), ({}, {"save_every_minutes": 10}, False),
        ({"send_rows": "at_once"}, {"save_every": 10}, True),
    ],
)  # fmt: skip
def test_rows_wait_for_checkpoints_if_there_are_some(tmp_path, logging, checkpoint, is_at_once):
    paths = obs_runs.make_run(tmp_path, logging=logging, checkpoint=checkpoint)
    assert sends_at_once(load_resolved(paths.config)) == is_at_once


def test_each_step_is_new_once(tmp_path):
    paths = make_run(
        tmp_path, rows=[{STEP: 2}, {STEP: 3, "a": 1.0, "b": None}, {STEP: 3, "a": 2.0}, {STEP: 1}]
    )
    rows = Rows(paths.metrics, 2)
    assert list(rows.until(2)) == []
    assert list(rows.until(9)) == [{STEP: 3, "a": 1.0}]
    append(paths, [{STEP: 4, "a": 4.0}, {STEP: 5}])
    assert list(rows.until(3)) == []
    RowFile(paths.metrics, 4, lambda: None).close()
    append(paths, [{STEP: 4, "a": 5.0}])
    assert list(rows.until(9)) == [{STEP: 4, "a": 5.0}], "of a file that was written anew"


def wandb_settings(run: TrackedRun) -> dict[str, Any]:
    from yatt.obs.trackers.wandb import wandb_arguments

    return wandb_arguments(run)


def test_only_an_online_run_asks_wandb_to_resume(tmp_path):
    paths = make_run(tmp_path, logging={"wandb_mode": "online", "wandb_name": "mine"})
    settings = wandb_settings(run_of(paths))
    assert (settings["resume"], settings["name"], settings["id"]) == ("allow", "mine", run_id(paths))


@pytest.mark.slow
def test_a_run_folder_that_fails_for_a_while_costs_the_follower_time(tmp_path):
    pytest.importorskip("wandb")
    row = {STEP: 4, "actor/pg_loss": math.nan, "actor/grad_norm": math.inf}
    paths = make_run(tmp_path, rows=(*metrics(3), row), logging=OFFLINE)
    weather = tmp_path / "weather"
    weather.write_text("error config.yaml")
    argv = [sys.executable, "-m", "yatt.obs.trackers.follow", "--run", str(paths.root), "--tracker", "wandb"]
    follower = Process(argv, paths.root, weather)
    try:
        follower.goes_on()
        weather.write_text("error .last_step.")
        until(lambda: list(paths.tracker("wandb").glob("offline-run-*")), "wandb did not begin")
        follower.goes_on()
        weather.unlink()
        append(paths, [{STEP: 5}])
        until(lambda: last_step(paths) == 5, "the row after the trouble was not logged")
        follower.process.terminate()
        assert follower.process.wait(timeout=HANG_S) == 0, follower.said
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
    told = wandb_settings(run_of(paths))["config"]
    assert told["checkpoint"]["storage_options"] == {"endpoint_url": "***", "profile": "***"}
    assert "internal" not in repr(told) and "hidden-profile" not in repr(told)


def test_the_webhooks_url_is_not_told(tmp_path):
    paths = make_run(tmp_path, logging={"wandb_project": "p", "webhook_url": "https://chat/services/secret"})
    assert "secret" not in repr(wandb_settings(run_of(paths)))
