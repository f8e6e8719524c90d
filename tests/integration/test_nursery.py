"""A forked worker is what an exec'd one is, from before it is its owner's child to its end."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import children_of
from tests.runs import LOADED, environment, kill, wait_for
from yatt.adapters.processes import bound, nursery_link
from yatt.adapters.processes.nursery_link import READY, REFUSED, Fork, ForkedProcess, NotForked
from yatt.adapters.processes.orphans import (
    PR_SET_CHILD_SUBREAPER,
    adopt_orphans,
    find_orphans,
    kill_orphan,
    reap_children,
)
from yatt.adapters.processes.process import open_log, spawn_to
from yatt.adapters.processes.stack_dump import stacks_here
from yatt.core.attempts.orphans import doomed_orphans

START_S = 60.0 * LOADED
OWN = "its own"


class Nursery:
    """A nursery of this process, for the worker `tests.nursery`."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.log = folder, folder / "nursery.log"
        self.link, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [
            sys.executable, "-P", "-m", "yatt.adapters.processes.nursery",
            "--kind", "tests", "--device", "cpu",
            "--mains", "tests.nursery", "--preload", "tests.nursery.preload", "--threads", "1",
            "--link", str(its.fileno()), "--run", str(folder), "--attempt", "1", "--name", "nursery-tests.1",
        ]  # fmt: skip
        output = open_log(self.log)
        with its:
            self.env = {**environment(), "PYTHONUNBUFFERED": "1", "REMOVED_BY_AN_IMPORT": "1", **env}
            self.process = spawn_to(argv, env=self.env, output=output, pass_fds=[its.fileno()])
        os.close(output)
        self.count = 0

    def first_words(self) -> str:
        self.link.settimeout(START_S)
        return self.link.recv(4096).decode()

    def ready(self) -> "Nursery":
        assert self.first_words() == READY.decode(), self.log.read_text()
        return self

    def program(self, does: str) -> tuple[list[str], dict[str, str], Path]:
        self.count += 1
        env = {**self.env, bound.MARK: f"node/{self.count}", bound.CPUS: "0", "CUDA_VISIBLE_DEVICES": "1"}
        argv = [sys.executable, "-P", "-m", "tests.nursery", "one", does]
        return argv, env, self.folder / f"{self.count}.log"

    def fork(self, does: str, fork: Fork | None = None, noted: Any = None) -> tuple[ForkedProcess, Path]:
        argv, env, log = self.program(does)
        output = open_log(log)
        try:
            own = fork or Fork(self.link)
            return own.run(argv, env, output, noted or (lambda _: None)), log
        finally:
            os.close(output)

    def start(self, does: str) -> tuple["subprocess.Popen[bytes]", Path]:
        argv, env, log = self.program(does)
        output = open_log(log)
        try:
            return spawn_to(argv, env=env, output=output), log
        finally:
            os.close(output)

    def close(self) -> None:
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery")).ready()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def no_child_left_behind(request) -> Iterator[None]:
    """As everywhere; the nursery of this module stays."""
    shared = request.getfixturevalue("nursery").process.pid if "nursery" in request.fixturenames else 0
    before = children_of(os.getpid()) | {shared}
    yield
    wait_for(lambda: not children_of(os.getpid()) - before, what="the end of all children")


def said(log: Path) -> dict[str, Any]:
    line = wait_for(lambda: log.exists() and log.read_text().partition("\n")[0], what="words")
    return json.loads(line)


def own_words(told: dict[str, Any], log: Path) -> dict[str, Any]:
    """Replaces what differs from process to process."""
    text = json.dumps(told["told"])
    number = log.stem
    return json.loads(text.replace(str(log), OWN).replace(f"node/{number}", OWN))


def test_a_forked_worker_is_like_a_started_one(nursery) -> None:
    forked, forked_log = nursery.fork("0")
    started, started_log = nursery.start("0")
    assert (forked.wait(), started.wait()) == (0, 0), forked_log.read_text()
    one, other = own_words(said(forked_log), forked_log), own_words(said(started_log), started_log)
    assert one.pop("main") == other.pop("main") == "tests.nursery.__main__"
    changed = {"SET_BY_AN_IMPORT": "1"}
    assert one.pop("env") | {"REMOVED_BY_AN_IMPORT": "1"} == other.pop("env") | changed, (
        "as its imports leave it"
    )
    assert one == other
    assert one["parent"] == os.getpid() and one["is_own_session"]
    assert one["state"]["Cpus_allowed_list"] == "0" and "CUDA_VISIBLE_DEVICES=1" in one["environ"]
    assert one["descriptors"]["1"] == one["descriptors"]["2"] == OWN and one["descriptors"]["0"] == os.devnull


@pytest.mark.parametrize("does, code", [("0", 0), ("7", 7), ("fail", 1), ("sleep", -signal.SIGHUP)])
def test_a_forked_worker_ends_with_the_exit_code_of_its_program(nursery, does, code) -> None:
    forked, log = nursery.fork(does)
    said(log)
    if does == "sleep":
        os.killpg(forked.pid, signal.SIGHUP)
    assert forked.wait() == code
    assert ("ValueError: as it was told to" in log.read_text()) == (does == "fail")


def test_random_numbers_differ_between_children(tmp_path) -> None:
    nursery, drawn = Nursery(tmp_path, PLANTED="torch").ready(), set()
    for _ in range(4):
        forked, log = nursery.fork("0")
        assert forked.wait() == 0
        drawn.update(said(log)["drawn"])
    nursery.close()
    assert len(drawn) == 12, "of Python's generator, of numpy's and of torch's"


def test_many_threads_may_order_at_once(nursery) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: nursery.fork("0"), range(64)))
    assert [forked.wait() for forked, _ in found] == [0] * 64
    assert len({said(log)["told"]["env"][bound.MARK] for _, log in found}) == 64


def test_a_whole_environment_of_any_size_travels(nursery) -> None:
    argv, env, log = nursery.program("0")
    env["LARGE"] = "x" * (1 << 17) + "\u00fc"
    env["NOT_UTF8"] = os.fsdecode(b"\xff")
    output = open_log(log)
    forked = Fork(nursery.link).run(argv, env, output, lambda _: None)
    os.close(output)
    assert forked.wait() == 0
    told = said(log)["told"]
    assert f"LARGE={env['LARGE']}" in told["environ"]
    assert (told["env"]["LARGE"], told["env"]["NOT_UTF8"]) == (env["LARGE"], env["NOT_UTF8"])


def test_the_owners_end_is_the_childs(tmp_path) -> None:
    """The parent-death signal, also of children of a nursery that has ended before."""
    program = (
        "from tests.integration.test_nursery import *; adopt_orphans()\n"
        "nursery = Nursery(Path(sys.argv[1])).ready()\n"
        "first, second = nursery.fork('sleep')[0], nursery.fork('sleep')[0]\n"
        "os.kill(nursery.process.pid, signal.SIGKILL); nursery.process.wait()\n"
        "print(first.pid, second.pid, flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2 and all(os.getsid(pid) == pid for pid in pids), "the nursery's end is not theirs"
    owner.kill()
    owner.communicate()

    def are_gone() -> bool:
        reap_children(pids)  # of ours now, as we are a subreaper
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    wait_for(are_gone, what="the end of the children")


@pytest.mark.parametrize("planted, why", [
    ("a thread", "its imports have started threads"), ("a GPU", "its imports have opened a GPU"),
])  # fmt: skip
def test_a_nursery_that_is_not_like_a_new_process_says_so(tmp_path, planted, why) -> None:
    (tmp_path / "device0").touch()
    nursery = Nursery(tmp_path, PLANTED=planted, PLANTED_DEVICE=str(tmp_path / "device"))
    try:
        assert nursery.first_words() == REFUSED.decode() + why
        assert nursery.process.wait(timeout=START_S) == 0
        with pytest.raises(NotForked, match="Broken pipe"):
            nursery.fork("0")
    finally:
        nursery.close()


def test_threads_of_linear_algebra_are_no_obstacle(tmp_path) -> None:
    nursery = Nursery(tmp_path, OMP_NUM_THREADS="2").ready()
    forked, log = nursery.fork("0")
    assert forked.wait() == 0 and said(log)["told"]["state"]["Threads"] == "1"
    nursery.close()


def test_a_library_that_cannot_be_imported_is_told_in_its_log(tmp_path) -> None:
    nursery = Nursery(tmp_path, PLANTED="an end")
    assert nursery.first_words() == ""
    assert "this library cannot be imported" in nursery.log.read_text()
    nursery.close()


def test_packages_that_have_changed_are_not_forked(tmp_path) -> None:
    packages = tmp_path / "base" / f"lib/python3.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    nursery = Nursery(tmp_path, PYTHONUSERBASE=str(tmp_path / "base")).ready()
    forked, _ = nursery.fork("0")
    assert forked.wait() == 0
    (packages / "other-2.0.dist-info").mkdir()
    os.utime(packages, ns=(1, 1))  # a filesystem's clock may be coarse
    with pytest.raises(NotForked, match="site-packages has changed since it was imported"):
        nursery.fork("0")
    nursery.close()


def test_a_nursery_that_stands_still_costs_a_time_limit_only(tmp_path, monkeypatch) -> None:
    nursery = Nursery(tmp_path).ready()
    monkeypatch.setattr(nursery_link, "FORK_S", 0.2)
    os.kill(nursery.process.pid, signal.SIGSTOP)
    noted: list[int] = []
    with pytest.raises(NotForked, match="does not answer within"):
        nursery.fork("0", noted=noted.append)
    monkeypatch.undo()
    os.kill(nursery.process.pid, signal.SIGCONT)
    forked, _ = nursery.fork("0")  # after the one that nobody waits for any more
    assert forked.wait() == 0 and not noted
    assert not (tmp_path / "1.log").read_text(), "the first one has not begun"
    nursery.close()


def test_a_process_between_that_stands_still_costs_a_limit(tmp_path, monkeypatch) -> None:
    nursery, stopped = Nursery(tmp_path).ready(), list[int]()
    monkeypatch.setattr(nursery_link, "FORK_S", 0.5)
    monkeypatch.setattr(nursery_link, "FATE_S", 0.5)

    def stop_its_parent(pid: int) -> None:
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        os.kill(parent, signal.SIGSTOP)
        stopped.extend((parent, pid))

    with pytest.raises(NotForked, match="does not answer within"):
        nursery.fork("sleep", noted=stop_its_parent)
    assert stopped[0] not in (nursery.process.pid, os.getpid())
    os.kill(stopped[0], signal.SIGCONT)

    def is_gone() -> bool:
        reap_children(stopped[1:])
        return not Path(f"/proc/{stopped[1]}").exists()

    wait_for(is_gone, what="the end of a child that nobody waits for")
    assert not (tmp_path / "1.log").read_text(), "it has not begun"
    nursery.close()


def test_a_start_that_is_cancelled_leaves_nothing(nursery) -> None:
    """At any moment: the child runs and is known, or there is none."""
    for number in range(40):
        fork, pids = Fork(nursery.link), list[int]()
        canceller = threading.Timer(number * 0.0005, fork.cancel)
        canceller.start()
        try:
            forked, _ = nursery.fork("sleep", fork, pids.append)
        except NotForked:
            pass
        else:
            assert forked.pid in pids
            if forked.returncode is None:
                os.kill(forked.pid, signal.SIGKILL)
            assert forked.wait() == -signal.SIGKILL
        canceller.join()
        reap_children(children_of(os.getpid()) - {nursery.process.pid})


def test_a_child_that_is_killed_before_it_begins_is_reaped(nursery) -> None:
    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    forked, _ = nursery.fork("sleep", noted=kill)
    assert forked.wait() == -signal.SIGKILL, "as if it had been killed a moment later"


@pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "planted: not noted"])
def test_nobody_takes_a_child_for_a_stray(nursery, is_noted) -> None:
    """The controller's watch of orphans, as fast as it can, with workers that end meanwhile."""
    known, over, killed = {nursery.process.pid: "node/nursery"}, threading.Event(), list[int]()

    def watch() -> None:
        while not over.is_set():
            found, ended = find_orphans(frozenset(known))
            living = dict(known)
            reap_children(set(ended) - living.keys())
            found = [each for each in found if each.pid not in living]
            for pid in doomed_orphans(found, living, known=(), has_ended=True):
                killed.append(pid)
                kill_orphan(pid)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for number in range(30 if is_noted else 1000):
            if killed:
                break
            mark = f"node/{nursery.count + 1}"
            note = (lambda pid, mark=mark: known.update({pid: mark})) if is_noted else (lambda _: None)
            with contextlib.suppress(NotForked):
                forked, _ = nursery.fork("sleep", noted=note)
                known[forked.pid] = mark
                time.sleep(0.001 * (number % 3))
                if forked.returncode is None:
                    kill(forked.pid)  # the watch may have been faster
                forked.wait()
                known.pop(forked.pid)
    finally:
        over.set()
        watching.join()
        reap_children(children_of(os.getpid()) - {nursery.process.pid})
    assert bool(killed) == (not is_noted)


def test_stacks_are_told_under_the_right_name(nursery) -> None:
    def waits_for_orders() -> bool:
        (dump,) = stacks_here(nursery.folder, 20.0)
        assert dump.name == "nursery-tests.1"
        return "recv_fds" in dump.text

    wait_for(waits_for_orders, what="the nursery to have begun")
    forked, log = nursery.fork("sleep")
    said(log)
    names = [dump.name for dump in stacks_here(nursery.folder, 20.0)]
    os.kill(forked.pid, signal.SIGKILL)
    forked.wait()
    assert names == ["nursery-tests.1"], "not twice: the child answers for itself, or not at all"
