"""A whole run with credentials in its environment: they are in no file, output or command line of it."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import BUCKET
from tests.runs import RunFile, command, environment, popen, yatt

PLANTED = "YATTPLANTEDSECRET"
"""moto accepts any credentials, so this is a key that works."""

HOOK = "http://127.0.0.1:9/hook?token=YATTPLANTEDHOOK"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, s3_endpoint: str) -> str:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, PLANTED)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{PLANTED}")
    return s3_endpoint


def command_lines() -> bytes:
    found = b""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += entry.read_bytes()
        except OSError:
            continue
    return found


def files_with(folder: Path, secret: bytes) -> list[Path]:
    files = (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return [path for path in files if secret in path.read_bytes() or secret in os.fsencode(path.name)]


def test_a_credential_in_the_environment_is_nowhere_in_a_run(tmp_path: Path, planted: str) -> None:
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1},
        "checkpoint": {"url": f"s3://{BUCKET}/{tmp_path.name}", "storage_options": {"endpoint_url": planted}},
    })  # fmt: skip
    file, lines = str(run.write()), b""
    with (tmp_path / "out").open("wb") as output:
        process = popen(command("run", file), env=environment(), stdout=output, stderr=output)
        while process.poll() is None:
            lines += command_lines()
            time.sleep(0.5)
    said = (tmp_path / "out").read_text()
    assert process.returncode == 0, said
    assert b"yatt.uploader" in lines and PLANTED.encode() not in lines
    inspected = [yatt(word, str(run.run_dir)) for word in ("status", "report")]
    said += "".join(done.stdout + done.stderr for done in inspected)
    assert PLANTED not in said
    assert not files_with(run.run_dir, PLANTED.encode())
    assert files_with(run.run_dir, b"endpoint_url"), "the search finds what is there"


@pytest.mark.parametrize("how", ["file", "argument", "url", "key"])
def test_a_credential_in_a_config_is_refused_before_a_folder_is_made(
    tmp_path: Path, planted: str, how: str
) -> None:
    options, more, url = {"endpoint_url": planted}, [], f"s3://{BUCKET}/{tmp_path.name}"
    match how:
        case "file":
            options["secret"] = PLANTED
        case "argument":
            more = [f"checkpoint.storage_options.secret={PLANTED}"]
        case "url":
            url = f"s3://AKIA:{PLANTED}@{BUCKET}/x"
        case "key":  # an access key that the server could repeat
            options["key"] = f"AKIA{PLANTED}"
    run = RunFile(tmp_path, {"checkpoint": {"url": url, "storage_options": options}})
    done = yatt("run", str(run.write()), *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert PLANTED not in done.stdout + done.stderr
    assert "come from the environment" in done.stderr and "AWS_ACCESS_KEY_ID" in done.stderr
    assert not run.run_dir.exists()


def test_the_webhooks_url_is_in_no_command_line(tmp_path: Path) -> None:
    """A family of the user's is tried in a process of its own, which gets the config as an argument."""
    family = tmp_path / "family.py"
    family.write_text("import time\ntime.sleep(3)\nraise SystemExit('seen')\n")
    settings = {"model": {"family": str(family)}, "logging": {"webhook_url": HOOK}}
    run = RunFile(tmp_path, settings)
    process = popen(
        command("run", str(run.write())), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = b""
    while process.poll() is None:
        lines += command_lines()
        time.sleep(0.2)
    said = process.communicate()[0]
    assert process.returncode == 2, said
    assert b"yatt.launch.checks.policy_check" in lines, "the trial was seen"
    assert b"YATTPLANTEDHOOK" not in lines + said
