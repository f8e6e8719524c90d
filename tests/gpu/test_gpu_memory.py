"""The proof over a real GPU and its real driver; what the stand-in stands for."""

import asyncio

import pytest

from tests.nvml.bench import MIB, Bench, hold, stranger
from yatt.adapters.machine.nvml import sees_host_pids
from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.errors import WorkerFailed

pytestmark = pytest.mark.gpu

USER = "tests.nvml.cuda_user"
PATIENCE = {"release_s": 60.0, "kill_s": 20.0, "memory_check_s": 4.0, "slack_bytes": 512 * MIB}


@pytest.fixture
def orders(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("NVML_STANDIN", str(tmp_path))
    (tmp_path / "orders").mkdir()
    return tmp_path / "orders"


def test_a_real_gpu_is_handed_over_and_a_sleeper_that_keeps_memory_is_killed_first(tmp_path, orders):
    async def scenario():
        async with Bench(tmp_path, orders, user=USER, awake=8000 * MIB, **PATIENCE).running() as bench:
            for role in (TRAINER, ROLLOUT, TRAINER):
                await bench.give(role, 120)
            assert not bench.told("lease.not_free") and not bench.told("worker.end")
            bench.asleep[TRAINER] = 4000 * MIB
            await bench.give(ROLLOUT, 120)
            assert [end["how"] for end in bench.told("worker.end")] == ["killed by SIGKILL"]
            if sees_host_pids():
                assert "trainer-n0r0 (pid" in bench.told("lease.not_free")[0]["cause"]

    asyncio.run(scenario())


def test_a_stranger_on_a_real_gpu_is_named_and_left_alone(tmp_path, orders):
    if not sees_host_pids():
        pytest.skip("inside a container the driver's pids are not ours")

    async def scenario():
        with stranger(USER) as process:
            await hold(orders, process.pid, 3000 * MIB)
            async with Bench(tmp_path, orders, user=USER, **PATIENCE).running() as bench:
                with pytest.raises(WorkerFailed, match=f"process {process.pid} .*is not of this run"):
                    await bench.give(TRAINER, 120)
                assert process.poll() is None and not bench.told("lease.grant")

    asyncio.run(scenario())
