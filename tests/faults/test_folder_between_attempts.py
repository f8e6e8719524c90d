"""The run folder, or the data's, fails for a while between two attempts: that costs time, never exit 2."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.runs import HANG_S, ROOT, RunFile, command, environment, kill, living, rows, wait_for
from yatt.adapters.files.files import make_within, sealed_record, write_atomically
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.errors import ConfigError, FolderGone, FolderUnreachable, StaleAttempt, StoppedWaiting
from yatt.launch.folder.folder_wait import FolderWait
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults
WEATHER = ROOT / "tests" / "soak" / "weather"


def met(weather: Path, pid: int = 0) -> int:
    """How often the weather made a call fail, of this process or of any."""
    told = weather.with_name(weather.name + ".met")
    lines = told.read_text().splitlines() if told.exists() else []
    return sum(not pid or line.startswith(f"{pid} ") for line in lines)


class Process:
    """A process over whose folder the weather is made, and what it says."""

    def __init__(self, argv: list[str], folder: Path, weather: Path) -> None:
        self.weather, self.said = weather, list[str]()
        env = environment()
        env["PYTHONPATH"] = f"{WEATHER}:{env['PYTHONPATH']}"
        env |= {"YATT_SOAK_RUN": str(folder), "YATT_SOAK_WEATHER": str(weather), "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True)
        self._reader.start()

    def waits(self) -> list[str]:
        return [line for line in self.said if "run folder" in line and "does not answer" in line]

    def goes_on(self, times: int = 3) -> None:
        """Returns once this weather was met some more times: what fails again is tried again."""
        before = met(self.weather, self.process.pid)
        wait_for(lambda: met(self.weather, self.process.pid) >= before + times, what=f"{times} failures")
        assert self.process.poll() is None, self.said

    def ends_with(self, timeout_s: float) -> int:
        """Its exit code; where it stands still is in what it says."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self._reader.join(timeout=HANG_S)
            raise AssertionError("\n".join(["it does not end:", *self.said])) from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=HANG_S)
        self._reader.join(timeout=HANG_S)
        self.process.stdout.close()


@pytest.fixture
def between(tmp_path: Path) -> Iterator[tuple[RunFile, Process]]:
    """A run whose controllers were killed after a commit, while its folder fails: the launcher waits."""
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1}, "trainer": {"total_iterations": 6},
        "checkpoint": {"url": str(tmp_path / "store")},
    })  # fmt: skip
    launcher = Process(command("run", str(run.write())), run.run_dir, tmp_path / "weather")
    try:
        events = run.run_dir / "events.jsonl"
        wait_for(
            lambda: [e for e in rows(events) if e["kind"] == "ckpt.commit"], timeout_s=90, what="a commit"
        )
        launcher.weather.write_text("error")
        for pid, module in living(run.run_dir).items():
            if module == "yatt.control":
                kill(pid)
        wait_for(launcher.waits, timeout_s=60, what="the launcher to wait")
        yield run, launcher
    finally:
        launcher.close()


def test_a_run_folder_that_fails_between_two_attempts_is_waited_for(between) -> None:
    run, launcher = between
    assert "(launch.phase_timeout_s)" in launcher.waits()[0]
    launcher.goes_on()
    launcher.weather.unlink()
    assert launcher.ends_with(300) == 0, launcher.said
    assert [attempt.ended["exit_code"] for attempt in started_attempts(RunPaths(run.run_dir))] == [1, 0]
    steps = [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 7))


def test_a_signal_ends_the_wait_for_the_run_folder(between) -> None:
    _, launcher = between
    launcher.process.terminate()
    assert launcher.ends_with(60) == 75, launcher.said
    assert any("stopped by a signal while the run folder" in line for line in launcher.said)


def test_the_launcher_of_a_job_waits_for_the_run_folder_too(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.claims.mkdir(parents=True)
    write_atomically(paths.finished, sealed_record({}, 1))
    weather = tmp_path / "weather"
    weather.write_text("error")
    argv = [sys.executable, "-m", "yatt.launch.attempt.job", str(paths.root)]
    job = Process(argv, paths.root, weather)
    try:
        wait_for(job.waits, timeout_s=60, what="the launcher to wait")
        weather.unlink()
        assert job.ends_with(120) == 0, job.said
        assert any("is finished: nothing to do" in line for line in job.said)
    finally:
        job.close()


READ_DATA = """
import sys
from pathlib import Path
from yatt.adapters.inputs.dataset import RowFiles, check_rows
from yatt.config.schema import DataSection
data = DataSection(train_files=(sys.argv[1],), ground_truth_key="")
try:
    check_rows(data.train_files, data)
except OSError:  # or BrokenPipeError, which is what Python makes of ESHUTDOWN
    print("passing OSError", flush=True)
rows = RowFiles(data.train_files, data, Path(sys.argv[2]), limit_s=60)
print("rows", len(rows), flush=True)
rows.close()
"""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_data_files_that_cannot_be_read_for_a_while_are_no_mistake_of_the_users(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if name.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), folder / name)
    else:
        (folder / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    weather = tmp_path / "weather"
    weather.write_text("error")
    argv = [sys.executable, "-c", READ_DATA, str(folder / name), str(tmp_path)]
    reader = Process(argv, folder, weather)
    try:
        wait_for(lambda: "passing OSError\n" in reader.said, timeout_s=60, what="the first error")
        weather.unlink()
        assert reader.process.wait(timeout=300) == 0, reader.said
        wait_for(lambda: "rows 2\n" in reader.said, timeout_s=60, what="the rows")
    finally:
        reader.close()


def waiting(
    root: Path, said: list[str], *, limit_s: float = 30.0, signals: list[int] | None = None
) -> FolderWait:
    ending = frozenset({signal.SIGTERM})
    return FolderWait(root=root, limit_s=limit_s, signals=signals or [], ending=ending, say=said.append)


def failing(times: int, error: Exception):
    left = [times]

    def step() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return step


def in_words(number: int) -> ConfigError:
    error = ConfigError("config.yaml: cannot be read")
    error.__cause__ = OSError(number, "weather")
    return error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "weather"), in_words(errno.ESTALE)])
def test_a_step_is_tried_again_after_what_may_pass_in_whatever_words(tmp_path: Path, error) -> None:
    said: list[str] = []
    assert waiting(tmp_path, said)(failing(2, error)) == "done"
    assert len(said) == 1


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "weather"), in_words(errno.EIO), OSError(errno.EACCES, "no"), in_words(errno.EROFS)],
)
def test_what_does_not_pass_in_time_or_at_all_is_a_failure_and_not_the_users(tmp_path: Path, error) -> None:
    with pytest.raises(FolderUnreachable, match="cannot be used") as caught:
        waiting(tmp_path, [], limit_s=0.3)(failing(10**6, error))
    assert caught.value.exit_code == 1


def test_what_a_step_says_about_the_run_is_passed_on(tmp_path: Path) -> None:
    for error in (StaleAttempt("newer"), ConfigError("a mistake in the file")):
        with pytest.raises(type(error)):
            waiting(tmp_path, [])(failing(1, error))
    with pytest.raises(FolderGone):
        waiting(tmp_path, [])(partial(make_within, tmp_path / "gone", tmp_path / "gone" / "claims"))


def test_a_signal_ends_a_wait_once_unless_it_has_had_its_effect(tmp_path: Path) -> None:
    wait = waiting(tmp_path, [], signals=[signal.SIGTERM])
    assert wait(failing(0, OSError(errno.EIO, "x"))) == "done"
    with pytest.raises(StoppedWaiting):  # it came between two waits
        wait(failing(10**6, OSError(errno.EIO, "x")))
    wait.num_heeded = 1
    assert wait(failing(2, OSError(errno.EIO, "x"))) == "done"
    signals: list[int] = []
    wait = FolderWait(
        root=tmp_path, limit_s=60, signals=signals, ending=frozenset({signal.SIGTERM}),
        say=lambda _: signals.append(signal.SIGTERM),
    )  # fmt: skip
    with pytest.raises(StoppedWaiting) as caught:
        wait(failing(10**6, OSError(errno.EIO, os.strerror(errno.EIO))))
    assert caught.value.exit_code == 75
