"""File descriptors: what a controller opens is counted, its limit is raised, and too few are refused."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.runs import RunFile, environment, living, wait_for
from tests.unit.core.test_placement import config as colocated, disaggregated
from yatt.adapters.files.segments import segments_of
from yatt.adapters.machine.descriptors import hard_limit
from yatt.adapters.net.curve import calling_socket, listening_socket, make_keys, roomy_context
from yatt.config.load import load_resolved
from yatt.control.gpus.processes.open_files import check_own_descriptors, descriptors_of
from yatt.control.node import Node
from yatt.core.attempts.descriptors import BASE, PER_PEER, PER_WORKER
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_WILL_CONTINUE, ConfigError, WorkerFailed
from yatt.launch.checks.preflight import check_descriptors as check_before_start
from yatt.obs.story.events import reason_of_end
from yatt.obs.story.history import attempts_of, read_events
from yatt.obs.story.view import RunView
from yatt.paths import RunPaths


def num_open(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limits(pid: int) -> tuple[str, str]:
    """Soft and hard limit of a process's descriptors."""
    line = next(t for t in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in t)
    return line.split()[3], line.split()[4]


def with_hard_limit(count: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", f'ulimit -n {count}; exec "$@"', "bash", sys.executable, "-P", "-m", *arguments],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_pair_of_peers_opens_no_more_than_the_bound_says(tmp_path: Path) -> None:
    """Both ends of each line are in this process: its three descriptors are what one node has for a peer
    that also has a line to it."""
    keys, context, num = make_keys(tmp_path / "keys"), zmq.Context(), 20
    server = listening_socket(context, "tcp://127.0.0.1:*", keys)
    address, before = server.getsockopt_string(zmq.LAST_ENDPOINT), num_open()
    lines = [calling_socket(context, address, f"node{index}", keys) for index in range(num)]
    for line in lines:
        line.send(b"x")
    for _ in range(num):
        server.recv_multipart()
    opened = (num_open() - before) / num
    context.destroy(linger=0)
    assert 2 < opened <= PER_PEER


def test_a_context_has_room_for_more_lines_than_zmq_allows_by_itself(tmp_path: Path) -> None:
    keys, num = make_keys(tmp_path / "keys"), 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * num:
        pytest.skip(f"the hard limit of descriptors is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = roomy_context(num)
    try:
        lines = [calling_socket(context, "tcp://127.0.0.1:9", f"node{i}", keys) for i in range(num)]
        assert len(lines) == num
    finally:
        context.destroy(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_stays_below_its_bound_and_raises_the_soft_limit(tmp_path: Path) -> None:
    run = RunFile(tmp_path, settings={"trainer": {"total_iterations": 100_000}, "launch": {"nodes": 3}})
    run.settings["logging"] = {"events_file_bytes": 4096}
    config_file = run.write()
    command = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "bash"]
    launcher = subprocess.Popen(
        [*command, sys.executable, "-m", "yatt.cli.main", "run", str(config_file)],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        metrics = run.run_dir / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, timeout_s=120, what="rows")
        pids = sorted(pid for pid, module in living(run.run_dir).items() if module == "yatt.control")
        counted = [num_open(pid) for pid in pids]
        soft_and_hard = {limits(pid) for pid in pids}
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=300)
    assert len(pids) == 3 and all(soft == hard for soft, hard in soft_and_hard)
    config = load_resolved(RunPaths(run.run_dir).config)
    node = Node(
        config=config, paths=RunPaths(run.run_dir), placement=placement_of(config), attempt=1, index=0,
        host="127.0.0.1", device="cpu",
    )  # fmt: skip
    assert max(counted) <= descriptors_of(node), f"{counted} are open"
    assert max(counted) <= BASE, "what does not grow with the run is most of it here"
    check_segments(RunPaths(run.run_dir))


def check_segments(paths: RunPaths) -> None:
    """The same run's events were rotated, and are whole for every reader."""
    assert len(segments_of(paths.events)) >= 3
    (attempt,) = attempts_of(read_events(paths.events)[0])
    iterations = [span.iteration for span in attempt.span.phases if span.phase == "train"]
    assert iterations == list(range(1, len(iterations) + 1)) and len(iterations) >= 2
    assert attempt.exit_code == EXIT_WILL_CONTINUE
    assert attempt.reason and reason_of_end(paths.events, 1) == attempt.reason
    view = RunView(paths, 400)
    view.refresh()
    assert (view.story.ended, view.unreadable) == ("stopped", 0)


def node_of(nodes: int, gpus: int, index: int = 0, trainer_nodes: int = 0) -> Node:
    kind = disaggregated(nodes, trainer_nodes, gpus) if trainer_nodes else colocated(nodes, gpus, 0, 0)
    return Node(
        config=kind, paths=RunPaths(Path("/r")), placement=placement_of(kind),
        attempt=1, index=index, host="",
        device="cpu",
    )  # fmt: skip


def test_what_a_node_needs_grows_by_its_peers_and_by_its_workers() -> None:
    assert descriptors_of(node_of(102, 1)) - descriptors_of(node_of(2, 1)) == 100 * PER_PEER
    more_gpus = descriptors_of(node_of(2, 3)) - descriptors_of(node_of(2, 1))
    assert more_gpus == 2 * 2 * PER_WORKER, "an engine and a trainer rank a GPU"


def test_an_engine_node_needs_none_for_other_engine_nodes() -> None:
    few, many = (descriptors_of(node_of(n, 1, index=n - 1, trainer_nodes=2)) for n in (10, 1000))
    assert few == many
    assert descriptors_of(node_of(1000, 1, trainer_nodes=2)) > many + 900 * PER_PEER, "the leader has all"


def test_too_few_are_refused_before_start_and_named_by_a_controller() -> None:
    node = node_of(2, 1, index=1)
    with pytest.raises(ConfigError, match=r"launch\.nodes: with 2 nodes .* needs \d+ .*`ulimit -Hn` is 99"):
        check_before_start(node.config, 99)
    check_before_start(node.config, hard_limit())
    check_own_descriptors(node, descriptors_of(node))
    with pytest.raises(WorkerFailed, match=r"node1 needs \d+ file descriptors \(2 nodes, \d+ worker"):
        check_own_descriptors(node, descriptors_of(node) - 1)


def test_a_run_on_a_machine_that_allows_too_few_is_not_started(tmp_path: Path) -> None:
    run = RunFile(tmp_path)
    ended = with_hard_limit(200, "yatt.cli.main", "run", str(run.write()))
    assert ended.returncode == 2, ended.stderr
    assert "`ulimit -Hn` is 200" in ended.stderr and not run.run_dir.exists()
