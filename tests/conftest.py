"""Shared by all tests: a clean environment, and no child process left behind."""

import contextlib
import gc
import itertools
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.dealing import QUICK_FOLDERS, SEED, Dealing, computing_and_waiting
from tests.durations import read_durations
from tests.forked import lots
from tests.runs import HANG_S, wait_for
from tests.seeds import Seed, tell
from tests.speed import slowness_now
from yatt.engine.environment import choose_device, prepare_environment

# Workers are started without the working directory on their path; those of tests are modules of `tests`.
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)

# Engine libraries read the environment once, at import, and any test may be the first to import them. Tests
# of a GPU, which are run by themselves, have its settings.
IS_GPU = any("tests/gpu/" in word for word in sys.argv)
prepare_environment(device=choose_device("auto") if IS_GPU else "cpu", threads=1)
for variable in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):  # they hide what users see
    os.environ.pop(variable, None)
sys.dont_write_bytecode = False  # nor are tests rewritten and compiled at each start
lots.remember_environment()
hypothesis.settings.register_profile("yatt", deadline=None)  # how fast the machine is must not decide
hypothesis.settings.load_profile("yatt")
AGAIN_S = 15.0
DEALING = pytest.StashKey[Dealing]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test's time limit come again: one that strikes in a callback, the event loop only logs."""
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s:
        signal.setitimer(signal.ITIMER_REAL, left_s, AGAIN_S)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Dealing:
    until = config.getoption("--until")
    until_s = None if until is None else time.monotonic() + until - time.time()
    dealing = Dealing(config, log, until_s, is_long=config.getoption("--part") == "long")
    config.stash[DEALING] = dealing
    return dealing


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says which tests a run with an end has left out, and which were never measured."""
    dealing = config.stash.get(DEALING, None)
    lines = dealing.report() if dealing is not None else []
    if lines:
        terminalreporter.section("time of the tests")
    for line in lines:
        terminalreporter.line(line)


MOST_CPU_S = float(os.environ.get("YATT_MOST_CPU_S", "0"))
"""Seconds of CPU that a run of the tests may use, with all its processes, on a quiet machine; 0 is no limit.
Not wall time, nor CPU seconds as they are: how busy the machine is otherwise must not decide (`speed.py`)."""

SLOWNESS = pytest.StashKey[list[float]]()
"""How slow the machine was, as seen by this process at each `TESTS_A_LOOK` tests and by its workers."""

TURN = pytest.StashKey[Iterator[int]]()
TESTS_A_LOOK = 25


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[SLOWNESS].extend(getattr(node, "workeroutput", {}).get("slowness", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`make quick` stays quick: a run over its limit fails. So does one that has proved too little."""
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["slowness"] = config.stash[SLOWNESS]
        return
    dealing = config.stash.get(DEALING, None)
    if dealing is not None and not dealing.has_proved and not config.getoption("--measure"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if not MOST_CPU_S:
        return
    used_s, slowness = used_cpu_s(), statistics.median(config.stash[SLOWNESS] or [1.0])
    sys.stdout.write(
        f"\n{used_s:.0f} CPU seconds used on a machine {slowness:.2f} times as slow as a quiet one: "
    )
    sys.stdout.write(f"{used_s / slowness:.0f} of {MOST_CPU_S:.0f}\n")
    if used_s / slowness > MOST_CPU_S:
        sys.stdout.write("too many: mark what is slow, or move it\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


LONG_MARKS = ("slow", "faults", "slurm")
LONG_MARK = re.compile(r"\bmark\.(slow|faults|slurm)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "long"), help="only the quick tests, or only the long ones")
    parser.addoption(
        "--until", type=float, help="leave out what would not end by then, in seconds since 1970"
    )
    parser.addoption("--measure", type=Path, help="append durations to this file")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import modules without a long test for a run of the long ones."""
    if config.getoption("--part") != "long" or collection_path.suffix != ".py":
        return None
    name = f"{collection_path.relative_to(config.rootpath)}"
    is_quick = name.startswith(QUICK_FOLDERS) and collection_path.name.startswith("test_")
    return True if is_quick and not LONG_MARK.search(collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures a test with its set-up: CPU of this process and its ended children, and wall time."""
    out, looks = item.config.getoption("--measure"), item.config.stash[TURN]
    if MOST_CPU_S and next(looks) % TESTS_A_LOOK == 0:
        item.config.stash[SLOWNESS].append(slowness_now())
    cpu_s, wall_s = used_cpu_s(), time.monotonic()
    result = yield
    if out:
        row = [item.nodeid, round(used_cpu_s() - cpu_s, 2), round(time.monotonic() - wall_s, 2)]
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return result


def used_cpu_s() -> float:
    """User and system time of this process and of all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SLOWNESS], config.stash[TURN] = [], itertools.count()
    is_dealt = config.getoption("numprocesses", None) or hasattr(config, "workerinput")
    if config.getoption("--until") is not None and not is_dealt:
        raise pytest.UsageError("--until needs -n: only what deals tests to processes leaves some out")
    os.environ.setdefault(SEED, str(time.time_ns() % 1_000_000))  # of a run's processes, the first one
    if config.getoption("--part") == "quick":  # too few start processes to pay for a stem
        os.environ.setdefault(lots.STARTED, "1")
    if config.getoption("--measure"):
        os.environ.setdefault(lots.STARTED, "0")
    os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/yatt-tests-state-{os.getuid()}"  # `yatt list`


def pytest_report_header(config: pytest.Config) -> list[str]:
    until, told = config.getoption("--until"), [f"lots are drawn by {SEED}={os.environ[SEED]}"]
    if until is not None:
        end = time.strftime("%H:%M:%S", time.localtime(until))
        told.append(f"tests that would not end by {end} are left out, by lots")
    return told


def pytest_sessionstart(session: pytest.Session) -> None:
    """No test pays for the stem if their durations are measured."""
    if session.config.getoption("--measure") and not session.config.getoption("numprocesses", None):
        lots.the_stem()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Says of a failed test what its processes were."""
    report: Any = yield
    if report.failed:
        kind = "started" if lots.is_started(item.nodeid) else "forked"
        told = f"{kind} ({lots.STARTED}, {SEED}={os.environ[SEED]}: see adr/0074)"
        report.sections.append(("how processes of yatt began", told))
    return report


IMPORTED_IN_USE = ("megatron.core", "mlflow", "vllm", "wandb")
"""Packages that take seconds to import. Each process of tests collects all modules, and a few use these."""


def is_quick(item: pytest.Item) -> bool:
    return item.nodeid.startswith(QUICK_FOLDERS) and not any(map(item.get_closest_marker, LONG_MARKS))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the part, and puts the longest tests first."""
    part = config.getoption("--part")
    dear = [name for name in IMPORTED_IN_USE if name in sys.modules]
    if part == "long" and dear:
        raise pytest.UsageError(f"a test module imports {', '.join(dear)}: tests are to (tests/packages.py)")
    quick = {item.nodeid for item in items if is_quick(item)}
    kept = {item.nodeid: item for item in items if part != ("long" if item.nodeid in quick else "quick")}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = by_shared_parameters(kept[name] for name in computing_and_waiting(kept, read_durations()))


def by_shared_parameters(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of a module with the same parameter of a fixture of the module one after the other: an engine
    is then started once a parameter, and not at each change in a random order."""
    places: dict[object, int] = {}
    return sorted(items, key=lambda item: places.setdefault(_shared_parameters(item), len(places)))


def _shared_parameters(item: pytest.Item) -> object:
    spec, info = getattr(item, "callspec", None), getattr(item, "_fixtureinfo", None)
    if spec is None or info is None:
        return item.nodeid
    fixtures = {name: found[-1].scope for name, found in info.name2fixturedefs.items()}
    shared = [(name, spec.indices[name]) for name in spec.params if fixtures.get(name) == "module"]
    return (item.path, *shared) if shared else item.nodeid


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no later garbage collection looks through it again."""
    gc.collect()
    gc.freeze()


def children_of(pid: int) -> set[int]:
    """Living direct children, by the kernel's own list."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # Path.glob raises if a process ends meanwhile
        try:
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != b"Z":
            found.add(int(name))
    return found


def command_line_of(child: int) -> bytes:
    """Empty once it has ended. One that has no memory any more is ending: that is waited for, since its end
    was ordered, and the kernel takes it when it can."""
    until_s = time.monotonic() + HANG_S
    with contextlib.suppress(OSError):
        while child in children_of(os.getpid()):
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            if words or time.monotonic() > until_s:
                return words.replace(b"\0", b" ") or b"a process without memory that does not end"
            time.sleep(0.01)
    return b""


@pytest.fixture(autouse=True)
def no_child_left_behind() -> Iterator[None]:
    before = children_of(os.getpid())
    yield
    commands = {pid: words for pid in children_of(os.getpid()) - before if (words := command_line_of(pid))}
    helpers = (
        b"resource_tracker",
        b"multiprocessing.spawn",
        b"multiprocessing.forkserver",
        b"torch._inductor",
        b"moto.server",
        b"tests.forked.stem",
    )
    assert not [c for c in commands.values() if not any(h in c for h in helpers)], commands


@pytest.fixture(autouse=True)
def seeds_are_told(request: pytest.FixtureRequest) -> None:
    """Those that its module drew when it was imported, before anybody listened."""
    for each in vars(request.module).values():
        if isinstance(each, Seed):
            tell(each)


BUCKET = "checkpoints"
S3_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
"""Credentials of the local S3 server: the environment is where they belong."""


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 API on a free port of this machine, with one bucket."""
    with s3_server(tmp_path_factory.mktemp("s3") / "server.log") as endpoint:
        yield endpoint


@contextlib.contextmanager
def s3_server(log: Path, **settings: str) -> Iterator[str]:
    """Yields the endpoint. In a process of its own: vLLM looks at every module that is imported, and moto's
    break when looked at.

    Args:
        settings: environment variables of the server.
    """
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **settings})
    try:
        wait_for_port(port)
        endpoint = f"http://127.0.0.1:{port}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in S3_KEYS.items():
                patch.setenv(name, value)
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
            yield endpoint
    finally:
        server.terminate()
        server.wait(timeout=HANG_S)


def wait_for_port(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=HANG_S):
            return True
        return False

    wait_for(listens, what=f"somebody to listen on port {port}")
