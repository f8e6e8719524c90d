"""The environment of real children: trainer ranks on GPUs get variables, unless the user has set them."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.core.test_placement import config
from yatt.adapters.node_local.compiler_cache import FOLDERS, unused_caches
from yatt.control import __main__ as controller
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.node import Node
from yatt.core.attempts.trainer_environment import CONNECTIONS
from yatt.core.gpus.placement import ROLLOUT, TRAINER, placement_of
from yatt.errors import ConfigError
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

CACHE = f"yatt-cache-{os.getuid()}"
SLEEPS = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")


def node_of(folder: Path, device: str) -> Node:
    plain = config(1, 2, 0, 0)
    run = replace(
        plain,
        run=replace(plain.run, deterministic=True),
        trainer=replace(plain.trainer, tensor_model_parallel_size=2),
        launch=replace(plain.launch, scratch_dir=str(folder), nurseries=False),
    )
    paths = RunPaths(folder)
    paths.log(1, "x").parent.mkdir(parents=True, exist_ok=True)
    return Node(
        config=run, paths=paths, placement=placement_of(run),
        attempt=1, index=0, host="127.0.0.1", device=device,
        devices=("0", "1") if device == "cuda" else (),
    )  # fmt: skip


async def environments(node: Node) -> dict[str, dict[str, str]]:
    """Variables of a real child of each role."""
    supervisor = Supervisor(node, EventLog(attempt=1, node=0, role="controller", sink=lambda _: None))
    found = {}
    for role in (TRAINER, ROLLOUT):
        worker = next(each for each in supervisor.workers.values() if each.role == role)
        worker.argv = SLEEPS
        await supervisor.start(worker)
        assert worker.process.child is not None
        pairs = Path(f"/proc/{worker.process.child.pid}/environ").read_bytes().decode().split("\0")
        found[role] = dict(pair.split("=", 1) for pair in pairs if pair)
    await supervisor.close(1.0)
    return found


@pytest.mark.parametrize("own", ["", "8"])
def test_only_trainer_ranks_get_them_and_the_users_value_wins(tmp_path: Path, monkeypatch, own: str) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if own:
        monkeypatch.setenv(CONNECTIONS, own)
    found = asyncio.run(environments(node_of(tmp_path, "cuda")))
    assert found[TRAINER][CONNECTIONS] == (own or "1")
    assert found[TRAINER]["NCCL_ALGO"] == "^NVLS"
    assert found[ROLLOUT].get(CONNECTIONS, "") == own and "NCCL_ALGO" not in found[ROLLOUT]


def test_without_gpus_nothing_is_set(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    found = asyncio.run(environments(node_of(tmp_path, "cpu")))
    assert CONNECTIONS not in found[TRAINER]
    assert not (tmp_path / CACHE).exists()


def test_workers_on_gpus_share_one_cache_of_compiled_code_unless_the_user_has_set_another(
    tmp_path: Path, monkeypatch
) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    for _ in range(2):  # the second is a later attempt
        found = asyncio.run(environments(node_of(tmp_path, "cuda")))
        for role in (TRAINER, ROLLOUT):
            assert found[role]["VLLM_CACHE_ROOT"] == str(tmp_path / CACHE / "vllm")
            assert found[role]["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / CACHE / "inductor")
            assert found[role]["TRITON_CACHE_DIR"] == "/mine"
    with unused_caches([tmp_path]) as unused:
        assert unused == [tmp_path / CACHE], "a closed supervisor allows its removal"


def test_without_a_private_folder_the_cache_is_of_the_attempt(tmp_path: Path, monkeypatch, caplog) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / CACHE).mkdir(mode=0o755)
    node = node_of(tmp_path, "cuda")
    found = asyncio.run(environments(node))
    assert found[ROLLOUT]["VLLM_CACHE_ROOT"] == str(node.scratch / "vllm")
    assert f"no private folder in launch.scratch_dir ({tmp_path})" in caplog.text


def test_no_compiled_code_is_kept_where_it_could_not_be_loaded(tmp_path: Path, monkeypatch, caplog) -> None:
    """Many clusters mount /tmp without the right to execute, so no shared library there can be loaded."""
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr("yatt.adapters.node_local.compiler_cache.os.statvfs", lambda _: flags)
    found = asyncio.run(environments(node_of(tmp_path, "cuda")))
    assert not found[ROLLOUT].keys() & FOLDERS.keys(), "the libraries' own folders"
    assert not (tmp_path / CACHE).exists()
    assert "is mounted noexec" in caplog.text and "launch.scratch_dir" in caplog.text


def test_a_controller_refuses_a_variable_that_breaks_determinism(tmp_path: Path, monkeypatch, caplog) -> None:
    run = node_of(tmp_path, "cuda").config
    monkeypatch.setenv(CONNECTIONS, "8")
    controller._check_variables(run)
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 8" in caplog.text
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(ConfigError, match="the environment variable NCCL_ALGO is NVLS, with which"):
        controller._check_variables(run)
    assert os.environ["NCCL_ALGO"] == "NVLS", "nothing is changed here"
