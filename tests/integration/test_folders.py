"""A whole run in a hostile place: planted links and modules, SIGKILL, and what is left is swept."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from tests.runs import RunFile, environment, living, rows, wait_for, yatt
from yatt.adapters.node_local.local_folder import new_name
from yatt.errors import EXIT_WILL_CONTINUE
from yatt.paths import RunPaths

TRAP = "open({path!r}, 'a').write(f'{{__name__}} was executed\\n')\nraise SystemExit('a trap')\n"


def test_a_run_leaves_strangers_alone_and_its_own_remains_are_swept(tmp_path: Path) -> None:
    file = RunFile(
        tmp_path / "files",
        settings={
            "launch": {"nodes": 1},
            "trainer": {"total_iterations": 100_000},
            "checkpoint": {"save_every": 1, "export_final": False},
        },
    )
    run_file, paths = file.write(), RunPaths(file.run_dir)
    here, victim, sprung = tmp_path / "here", tmp_path / "victim", tmp_path / "sprung"
    here.mkdir()
    for module in ("random.py", "yaml.py", "torch.py", "zmq.py", "msgspec.py", "logging.py"):
        (here / module).write_text(TRAP.format(path=str(sprung)))
    (victim / "v1").mkdir(parents=True)
    (victim / "v1" / "thesis").touch()
    planted = [file.scratch / new_name(), file.shm / new_name()]
    for link in planted:
        link.symlink_to(victim)

    def started() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "yatt.cli.main", "run", str(run_file)]
        return subprocess.Popen(
            ["sh", "-c", 'umask 022; exec "$@"', "sh", *command],
            cwd=here, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    first = started()
    wait_for(lambda: len(rows(paths.metrics)) >= 1, timeout_s=90, what="an iteration")
    assert not sprung.exists(), sprung.read_text()
    mode = {
        p.name: stat.S_IMODE(p.stat().st_mode) for p in (paths.root, paths.events, paths.metrics, paths.keys)
    }
    assert mode == {"run": 0o700, "events.jsonl": 0o644, "metrics.jsonl": 0o644, "keys": 0o700}
    own = [name for name in file.leftovers() if name not in {link.name for link in planted}]
    assert (
        len(own) == 2
        and yatt("clean", str(file.scratch), str(file.shm)).stdout == "nothing was left behind\n"
    )

    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    wait_for(lambda: not living(file.run_dir), what="the end of every child")
    dry = yatt("clean", "--dry-run", str(file.scratch), str(file.shm)).stdout
    assert all(f"/{name} (" in dry for name in own) and dry.count("would remove") == 2

    second = started()
    wait_for(lambda: not set(own) & set(file.leftovers()), timeout_s=60, what="the sweep")
    wait_for(lambda: paths.heartbeat(2).exists(), timeout_s=60, what="the second attempt")
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=300) == EXIT_WILL_CONTINUE
    assert sorted(file.leftovers()) == sorted(link.name for link in planted)
    assert (victim / "v1" / "thesis").exists() and stat.S_IMODE(victim.stat().st_mode) == 0o755
    assert not sprung.exists()
    for link in planted:
        link.unlink()
