"""Tests a shared folder with several processes: `tools/check_fs.py`, and the short test of `yatt diagnose`.

On one node it starts the processes itself; started by srun, each task is one of the processes.
"""

import argparse
import os
import secrets
import shutil
import socket
import subprocess
import sys
from datetime import date
from pathlib import Path

from yatt.adapters.files.files import CHECKS
from yatt.adapters.files.shared_folder import Member, Report
from yatt.errors import YattError

PROCESSES = 4
END_S = 120.0
LATE_S = 5.0
"""Longest acceptable delay until a node sees another node's file; more makes starts and ends slow."""


def main() -> int:
    """The command `tools/check_fs.py`."""
    arguments = _parser().parse_args()
    try:
        report = _report(arguments)
    except (YattError, OSError) as error:
        sys.stderr.write(f"check_fs: {error}\n")
        return 1
    if report is None:
        return 0
    sys.stdout.write(f"{filesystem_table(report)}\n\n{site_line(report)}\n")
    return 2 if missing_guarantees(report) else 0


def measure_folder(folder: Path, processes: int = PROCESSES) -> Report:
    """Tests `folder` with processes of this node.

    Raises:
        OSError: the folder cannot be written to.
        DeadlineExceeded: a process did not end in time.
    """
    meeting = folder / f"{CHECKS}{secrets.token_hex(4)}"
    meeting.mkdir()
    argv = [sys.executable, "-P", "-m", "yatt.launch.diagnose.check_fs", str(meeting), "--member"]
    others = [subprocess.Popen([*argv, f"{index}/{processes}"]) for index in range(1, processes)]
    try:
        report = Member(meeting, index=0, count=processes, node=_node()).measure()
        for other in others:
            other.wait(timeout=END_S)
    finally:
        _end(others)
        shutil.rmtree(meeting, ignore_errors=True)
    assert report is not None, "the leader gets the report"
    return report


def missing_guarantees(report: Report) -> list[str]:
    """Returns the guarantees that a run needs and this folder does not provide."""
    found = []
    if report.claim_faults:
        found.append(f"{report.claim_faults} of {report.claim_rounds} claims had not exactly one winner")
    if report.torn:
        found.append(f"{report.torn} of {report.reads} reads saw half of a renamed file")
    return found


def lateness_s(report: Report) -> float:
    """Returns the longest delay until one process sees another's write, bounded by the round trip."""
    return max(report.new_name.longest_s, report.new_content.longest_s)


def filesystem_table(report: Report) -> str:
    """Returns the report as a table."""
    rows = [
        ("processes, nodes", f"{report.members}, {report.nodes}"),
        (
            "exclusive creates with one winner",
            f"{report.claim_rounds - report.claim_faults} of {report.claim_rounds}",
        ),
        ("reads of a complete file", f"{report.reads - report.torn} of {report.reads}"),
        ("reads older than the one before", f"{report.backward}"),
        ("new file, round trip", _times(report.new_name.median_s, report.new_name.longest_s)),
        ("replaced file, round trip", _times(report.new_content.median_s, report.new_content.longest_s)),
        ("durable write of 4 KiB", _times(report.write.median_s, report.write.longest_s)),
    ]
    return "\n".join(f"{name:<32}{value}" for name, value in rows)


def site_line(report: Report) -> str:
    """Returns the result as one comment line for the site file."""
    verdict = "; ".join(missing_guarantees(report)) or "exclusive creates and renames work"
    late = f"{lateness_s(report):.2g} s"
    return (
        f"# check_fs {date.today()}: {verdict}; {report.nodes} node(s) see each other's files within {late}"
    )


def _times(median_s: float, longest_s: float) -> str:
    return f"{median_s * 1e3:.1f} ms, longest {longest_s * 1e3:.1f} ms"


def _report(arguments: argparse.Namespace) -> Report | None:
    if arguments.member:
        index, count = map(int, arguments.member.split("/"))
        return Member(arguments.folder, index=index, count=count, node=_node()).measure()
    count = int(os.environ.get("SLURM_NTASKS", "1"))
    if "SLURM_PROCID" not in os.environ or count == 1:
        return measure_folder(arguments.folder, arguments.processes)
    return _step_report(arguments.folder, index=int(os.environ["SLURM_PROCID"]), count=count)


def _step_report(folder: Path, *, index: int, count: int) -> Report | None:
    """Runs one task of a job step; the ids of job and step name the folder where the tasks meet."""
    ids = (os.environ.get(key, "0") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    meeting = folder / f"{CHECKS}{'-'.join(ids)}"
    report = Member(meeting, index=index, count=count, node=_node()).measure()
    if report is not None:
        shutil.rmtree(meeting, ignore_errors=True)
    return report


def _end(others: list[subprocess.Popen[bytes]]) -> None:
    for other in others:
        if other.poll() is None:
            other.kill()
        other.wait(timeout=END_S)


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="check_fs",
        description="Test a shared folder: exclusive creates, renames, visibility delay.",
        epilog="Between nodes: srun -N2 --ntasks-per-node=1 python tools/check_fs.py FOLDER",
    )
    parser.add_argument("folder", type=Path, help="existing folder on the filesystem to test")
    parser.add_argument(
        "--processes",
        type=int,
        default=PROCESSES,
        help=f"number of processes on one node (default: {PROCESSES})",
    )
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
