"""What tests fork instead of starting it is like a started process, for itself and for everybody else."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forked.lots import the_stem
from tests.forked.popen import ForkingPopen, Stem
from tests.runs import ROOT, RunFile, command, environment, living, rows, wait_for
from yatt.obs.metrics import comparable_results

pytestmark = pytest.mark.slow
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(scope="module")
def stem() -> Stem:
    return the_stem()


def worker(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tests.nursery", *words]


def told(stem: Stem | None, words: list[str], **how: Any) -> dict[str, Any]:
    """What the worker of `tests.nursery` says about itself."""
    process = ForkingPopen(words, stem, **PIPES, **how)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 7, errors
    return json.loads(output)


@pytest.mark.parametrize("is_session", [True, False])
@pytest.mark.parametrize("is_safe", [True, False])
def test_a_forked_process_is_what_a_started_one_is(
    stem: Stem, tmp_path: Path, is_session: bool, is_safe: bool
) -> None:
    kept, written = os.pipe()
    words = [word for word in worker("some words", "7") if is_safe or word != "-P"]
    how = {
        "env": {**environment(), "GIVEN": "ä\n=", "YATT_WORKER": "a mark"}, "cwd": tmp_path,
        "stdin": subprocess.DEVNULL, "pass_fds": [kept], "start_new_session": is_session,
    }  # fmt: skip
    before = os.umask(0o027)
    try:
        forked, started = told(stem, words, **how), told(None, words, **how)
    finally:
        os.umask(before)
        os.close(kept)
        os.close(written)
    assert (len(forked["drawn"]), len(started["drawn"])) == (3, 1), "only a stem has imported numpy and torch"
    assert forked["drawn"][0] != started["drawn"][0]
    assert (forked["told"]["is_own_session"], forked["told"]["parent"]) == (is_session, os.getpid())
    for each in (forked, started):
        pipes = {name: target.partition(":")[0] for name, target in each["told"].pop("descriptors").items()}
        assert {"0": "/dev/null", "1": "pipe", "2": "pipe", str(kept): "pipe"}.items() <= pipes.items()
        # Python's own handlers are the same in both; faulthandler and libraries may have set others.
        each["told"]["state"].pop("SigCgt")
    assert forked["told"].pop("path")[0] == started["told"].pop("path")[0]
    assert forked["told"].pop("comm") and started["told"].pop("comm")
    ignored = [each["told"]["state"].pop("SigIgn") for each in (forked, started)]
    usr = 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGUSR2 - 1
    assert int(ignored[0], 16) & ~usr == int(ignored[1], 16), "a worker ignores what is for controllers"
    assert forked["told"] == started["told"]


def test_its_end_is_the_ends_of_a_program(stem: Stem) -> None:
    def ended(words: list[str], number: int = 0) -> tuple[int, str]:
        process = ForkingPopen(words, stem, env=environment(), **PIPES)
        if number:
            process.stdout.readline()
            process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        return process.returncode, errors

    code, errors = ended(worker("fail"))
    assert code == 1 and "ValueError: as it was told to" in errors and "Traceback" in errors
    assert ended(worker("200"))[0] == 200
    assert ended(worker("sleep"), signal.SIGKILL)[0] == -signal.SIGKILL
    assert ended(worker("sleep"), signal.SIGTERM)[0] == -signal.SIGTERM
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as a shell's background has it
        code, errors = ended(worker("sleep"), signal.SIGINT)
        assert code == -signal.SIGINT and "KeyboardInterrupt" in errors
    code, errors = ended([sys.executable, "-m", "yatt.nothing"])
    assert code == 1 and "No module named yatt.nothing" in errors


def test_what_it_cannot_be_like_is_started(stem: Stem) -> None:
    usual = environment()
    assert stem.can(command("--version"), usual)
    for name in ("PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS", "LC_ALL", "PYTHONHASHSEED"):
        assert not stem.can(command("--version"), {**usual, name: "/other"})
    assert stem.can(command("--version"), {**usual, "PYTHONUNBUFFERED": "1", "YATT_SITE": "x"})
    for words in (["sh", "-c", "true"], [sys.executable, "-c", "pass"], [sys.executable, "-m", "pip"]):
        assert not stem.can(words, usual)


def test_many_threads_may_ask_at_once(stem: Stem) -> None:
    codes = []

    def run(number: int) -> None:
        process = ForkingPopen(worker(str(number)), stem, env=environment(), **PIPES)
        process.communicate(timeout=300)
        codes.append(process.returncode)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == list(range(1, 9))


def test_a_run_of_forked_processes_has_the_results_of_a_started_one(stem: Stem, tmp_path: Path) -> None:
    found = []
    for index, each in enumerate((stem, None)):
        run = RunFile(
            tmp_path / str(index), {"model": {"trainer": "megatron"}, "launch": {"nurseries": not index}}
        )
        process = ForkingPopen(
            command("run", str(run.write())), each, env=environment(), cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        wait_for(partial(rows, run.run_dir / "metrics.jsonl"), what="an iteration")
        controllers = [module for module in living(run.run_dir).values() if module == "yatt.control"]
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert len(controllers) == 2, "their stems are none of the run's processes"
        assert not living(run.run_dir)
        found.append(list(map(comparable_results, rows(run.run_dir / "metrics.jsonl"))))
    assert found[0] == found[1] and len(found[0]) == 4
