"""What a node has to pass before an attempt, on this machine. GPUs: tests/integration/test_memory_check."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from yatt.config.site import SiteConfig, load_site
from yatt.errors import ConfigError
from yatt.launch.node.device import device_of
from yatt.launch.node.node_check import NodeCheck, Unfit

SITE = "interface: lo\n"


def check(tmp_path: Path, text: str = "", folder: Path | None = None, **env: str) -> Unfit | None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE + text)
    where = folder or tmp_path
    found = NodeCheck(load_site(file), (where, where), "cpu", 1, {**os.environ, **env}).run()
    assert not list(tmp_path.glob("yatt-check-*")), "nothing is left"
    return found


def says(lines: str, code: int) -> str:
    return f"node_check: {{command: [sh, -c, {lines!r}]}}\n".replace("{{", "{").replace(
        "exit", f"exit {code}"
    )


def test_a_node_like_this_is_fit(tmp_path: Path) -> None:
    assert check(tmp_path) is None
    assert check(tmp_path, says("echo all is well; exit", 0)) is None


def test_the_sites_own_check_says_why_in_its_last_line(tmp_path: Path, capsys) -> None:
    text = says("echo looking; echo ib0 is down >&2; exit", 3)
    assert check(tmp_path, text) == Unfit("sh, exit code 3: ib0 is down", 1)
    assert (
        capsys.readouterr().err
        == "yatt: node_check.command: looking\nyatt: node_check.command: ib0 is down\n"
    )


def test_what_it_prints_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    file = tmp_path / "own.sh"
    file.write_text("printf '\\033[31mred \\377'; exit 1")
    unfit = check(tmp_path, f"node_check: {{command: [sh, {file}]}}\n")
    assert "\\x1b[31mred" in unfit.why
    assert "\x1b" not in unfit.why


def test_a_check_that_stands_still_costs_its_limit(tmp_path: Path) -> None:
    unfit = check(tmp_path, "node_check: {limit_s: 1, command: [sleep, '600']}\n")
    assert unfit == Unfit("the check of node_check.command was not done within 1 s", 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("node_check: {command: [/nowhere/check]}\n", "/nowhere/check cannot be started"),
        ("interface: ib7\n", "'ib7' has no address"),
    ],
)
def test_what_the_user_wrote_is_told_from_what_broke(tmp_path: Path, text: str, why: str) -> None:
    unfit = check(tmp_path, text) if "interface" not in text else None
    if unfit is None:
        site = SiteConfig(interface="ib7")
        unfit = NodeCheck(site, (tmp_path, tmp_path), "cpu", 1, os.environ).run()
    assert why in unfit.why
    assert unfit.exit_code == 2


def test_folders_that_are_not_there_and_disks_that_are_full(tmp_path: Path) -> None:
    assert check(tmp_path, folder=tmp_path / "no").exit_code == 2
    free_gb = shutil.disk_usage(tmp_path).free >> 30
    assert check(tmp_path, f"node_check: {{free_gb: {max(1, free_gb // 2)}}}\n") is None
    unfit = check(tmp_path, f"node_check: {{free_gb: {free_gb + 1000}}}\n")
    assert f"node_check.free_gb requires {free_gb + 1000}" in unfit.why
    assert unfit.exit_code == 1


def test_a_folder_that_takes_no_more_bytes(tmp_path: Path) -> None:
    """The kernel refuses a file as large as the check's: EFBIG, like EDQUOT or ENOSPC."""
    program = f"""
import resource, signal, os, pathlib
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from yatt.config.site import SiteConfig
from yatt.launch.node.node_check import NodeCheck
path = pathlib.Path({str(tmp_path)!r})
unfit = NodeCheck(SiteConfig(interface="lo"), (path, path), "cpu", 1, os.environ).run()
print(unfit.exit_code, unfit.why, list(path.glob("yatt-check-*")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {tmp_path} cannot be written to (File too large) []\n"


def test_memory_that_others_have_left_full(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("yatt.launch.node.node_check.FREE_S", 0.0)
    lines = Path("/proc/meminfo").read_text().splitlines()
    total_mib = int(next(line.split()[1] for line in lines if line.startswith("MemTotal:"))) >> 10
    assert check(tmp_path, SLURM_MEM_PER_NODE="64") is None
    unfit = check(tmp_path, SLURM_MEM_PER_NODE=str(total_mib * 3))
    assert f"MiB of memory are free; the job was granted {total_mib * 3} MiB" in unfit.why
    assert unfit.exit_code == 1
    assert check(tmp_path, SLURM_MEM_PER_NODE="all") is None, "what is no number is not compared"


def test_a_look_with_a_defect_of_its_own_costs_no_node(tmp_path: Path, monkeypatch, capsys) -> None:
    def broken(_env: object, _address: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("yatt.launch.node.node_check.own_address", broken)
    assert check(tmp_path) is None
    assert "the check of its network failed: ZeroDivisionError" in capsys.readouterr().err


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = says("echo no; exit", 1) + "\n"
    unfit = check(tmp_path, text, folder=tmp_path / "no")
    assert "no cannot be written to" in unfit.why
    assert unfit.why.endswith("; sh, exit code 1: no")
    assert unfit.exit_code == 1, "one of them is the node's"


def test_a_driver_that_does_not_answer_ends_no_controller_in_silence(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("yatt.launch.node.device.ANSWER_S", 0.2)
    site = SiteConfig(interface="lo")
    unfit = NodeCheck(site, (tmp_path, tmp_path), "auto", 1, os.environ).run()
    assert "nvidia-smi did not answer within 0.2 s" in unfit.why
    with pytest.raises(Exception, match="did not answer"):
        device_of("auto")


@pytest.mark.parametrize(
    "text", ["node_check: {limit_s: 0}", "node_check: {command: sh}", "node_check: {comand: [sh]}"]
)
def test_wrong_keys_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="node_check"):
        load_site(file)
