"""The proof over GPUs: real arbiter, supervisor, nvidia-ml-py and processes; a stand-in for the driver."""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.nvml.bench import JUDGE, MIB, Bench, hold, stranger
from tests.runs import HANG_S, until
from yatt.adapters.machine.nvml import Nvml, cpus_by_device, visible_devices
from yatt.config.site import SiteConfig
from yatt.control.gpus.arbiter import Holding
from yatt.control.gpus.memory_check import GpuMemoryCheck
from yatt.core.gpus.lease import Stage
from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.errors import ConfigError, WorkerFailed
from yatt.launch.node.node_check import NodeCheck

pytest.importorskip("pynvml")

AWAKE, ASLEEP, BASE = 4096 * MIB, 300 * MIB, 100 * MIB


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Path:
    """The stand-in, loaded under the name by which nvidia-ml-py will ask for it."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).parent.parent / "nvml" / "standin.c"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=HANG_S)
    ctypes.CDLL(str(library))
    return library


@pytest.fixture
def gpus(driver, tmp_path, monkeypatch) -> Path:
    root = tmp_path / "devices"
    for name in ("gpu0", "gpu1", "orders"):
        (root / name).mkdir(parents=True)
    for name in ("gpu0", "gpu1"):
        (root / name / "base").write_text(str(BASE))
    monkeypatch.setenv("NVML_STANDIN", str(root))
    monkeypatch.setattr("yatt.control.gpus.memory_check.sees_host_pids", lambda: True)
    return root


@pytest.fixture
def make(tmp_path, gpus):
    """A bench over the stand-in."""
    return partial(Bench, tmp_path, gpus / "orders", awake=AWAKE, asleep=ASLEEP)


def test_a_slab_goes_from_trainer_to_rollout_and_back_while_the_sleeper_keeps_its_residue(make, gpus):
    async def scenario():
        async with make().running() as bench:
            for role in (TRAINER, ROLLOUT, TRAINER, ROLLOUT):
                await bench.give(role)
            assert [grant["token"] for grant in bench.told("lease.grant")] == [1, 2, 3, 4]
            assert len(bench.told("worker.start")) == 2
            assert not bench.told("worker.end") and not bench.told("lease.not_free")

    asyncio.run(scenario())


def test_memory_that_does_not_come_back_costs_the_sleeper_its_process_before_anybody_is_granted(make):
    async def scenario():
        async with make().running() as bench:
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            await bench.give(TRAINER)
            bench.asleep[TRAINER] = 3000 * MIB
            pid = bench.pid(TRAINER)
            await bench.give(ROLLOUT)
            kinds = [e["kind"] for e in map(json.loads, bench.lines)]
            last = kinds[len(kinds) - 1 - kinds[::-1].index("lease.not_free") :]
            assert "worker.end" in last and last.index("worker.end") < last.index("lease.grant")
            assert f"trainer-n0r0 (pid {pid}) keeps 3000 MiB of memory, 364 MiB are allowed to it asleep" in [
                e["cause"] for e in bench.told("lease.not_free")
            ]
            assert not bench.quarantined

    asyncio.run(scenario())


def test_what_comes_with_the_first_work_is_no_leak_and_what_comes_later_is(make):
    """Communicators of the data-parallel group are made at the first update, after the first sleep."""

    async def scenario():
        async with make(computes=False).running() as bench:
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            bench.computes, bench.asleep[TRAINER] = True, ASLEEP + 900 * MIB
            for role in (TRAINER, ROLLOUT, TRAINER):
                await bench.give(role)
            assert not bench.told("worker.end") and not bench.told("lease.not_free")
            bench.asleep[TRAINER] += 900 * MIB
            await bench.give(ROLLOUT)
            assert (
                "keeps 2100 MiB of memory, 1264 MiB are allowed" in bench.told("lease.not_free")[0]["cause"]
            )
            assert len(bench.told("worker.end")) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("hidden", ["", "pids"])
def test_a_holder_with_much_memory_has_more_time_to_fall_asleep(make, monkeypatch, hidden):
    """It has 4 GiB to move, and one second for each beside `release_s`."""
    if hidden:
        monkeypatch.setattr("yatt.control.gpus.memory_check.sees_host_pids", lambda: False)

    async def scenario():
        async with make(release_s=0.2).running() as bench:
            await bench.give(TRAINER)
            limits, fall_asleep = [], bench._sleep

            async def sleep(slab, role, token, release_s):
                limits.append(release_s)
                await asyncio.sleep(1.0)  # five times as long as a holder without memory may take
                await fall_asleep(slab, role, token, release_s)

            bench.arbiter._holding = Holding(
                wake=bench._wake, sleep=sleep, restart=bench._restart, take_back=lambda _: None
            )
            await bench.give(ROLLOUT)
            assert limits == [4.2]
            assert not bench.told("lease.expire") and not bench.told("worker.end")

    asyncio.run(scenario())


def test_gpus_are_emptied_side_by_side_so_the_fullest_one_sets_the_time(make):
    async def scenario():
        async with make(device="0,1", wide=True).running() as bench:
            await bench.give(ROLLOUT)  # an engine with 4 GiB on each of two GPUs
            await hold(
                bench.orders, bench.supervisor.of(ROLLOUT, bench.slab)[1].process.child.pid, 1024 * MIB
            )
            workers = bench.supervisor.of(ROLLOUT, bench.slab)
            check = bench.arbiter._processes._memory_check
            assert check.movable_bytes(bench.slab, workers) == AWAKE
            check._sees_pids = False
            assert check.movable_bytes(bench.slab, workers) == AWAKE

    asyncio.run(scenario())


def test_a_first_sleep_that_frees_nothing_is_not_believed(make, gpus):
    async def scenario():
        async with make(max_sleeping_bytes=1024 * MIB).running() as bench:
            bench.asleep[TRAINER] = AWAKE
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            assert (
                "keeps 4096 MiB of memory, 1088 MiB are allowed" in bench.told("lease.not_free")[0]["cause"]
            )
            assert len(bench.told("worker.end")) == 1

    asyncio.run(scenario())


def test_memory_nobody_gives_back_ends_in_quarantine_that_says_how_much(make, gpus):
    async def scenario():
        async with make().running() as bench:
            await bench.give(TRAINER)
            (gpus / "gpu0" / "leak").write_text(str(2000 * MIB))
            with pytest.raises(WorkerFailed, match="GPU set n0s0 is quarantined: memory did not come back"):
                await bench.give(ROLLOUT)
            assert (
                "2100 MiB are in use on GPU set n0s0, where all that sleeps may keep 164 MiB"
                in bench.quarantined[0]
            )
            assert len(bench.told("lease.grant")) == 1
            (gpus / "gpu0" / "leak").unlink()
            bench.arbiter.want(bench.slab, ROLLOUT)
            await asyncio.sleep(0.3)
            assert bench.arbiter.lease(bench.slab).stage is Stage.QUARANTINED

    asyncio.run(scenario())


def test_a_strangers_process_is_named_and_never_killed_and_no_grant_is_given_beside_it(make, gpus):
    async def scenario():
        with stranger() as process:
            await hold(gpus / "orders", process.pid, 700 * MIB)
            async with make().running() as bench:
                with pytest.raises(WorkerFailed, match="quarantined"):
                    await bench.give(TRAINER)
                assert f"process {process.pid} (python" in bench.quarantined[0]
                assert "with 700 MiB; it is not of this run" in bench.quarantined[0]
                assert process.poll() is None
                assert not bench.told("lease.grant")

    asyncio.run(scenario())


def test_a_stranger_that_leaves_in_time_is_waited_for(make, gpus):
    async def scenario():
        with stranger() as process:
            await hold(gpus / "orders", process.pid, 700 * MIB)
            async with make(memory_check_s=HANG_S).running() as bench:
                bench.arbiter.want(bench.slab, TRAINER)
                await until(lambda: bench.arbiter.lease(bench.slab).stage is Stage.CHECKING, "the check")
                await asyncio.sleep(0.3)
                assert bench.arbiter.lease(bench.slab).stage is Stage.CHECKING
                process.kill()
                process.wait(HANG_S)
                await bench.give(TRAINER)

    asyncio.run(scenario())


def test_the_pid_of_a_dead_worker_owns_no_memory_even_if_it_is_reused(make, gpus):
    async def scenario():
        async with make().running() as bench:
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            pid = bench.pid(TRAINER)
            bench.supervisor.end(bench.supervisor.of(TRAINER, bench.slab)[0])
            while bench.supervisor.of(TRAINER, bench.slab)[0].is_running:
                await asyncio.sleep(0.01)
            (gpus / "gpu0" / f"stuck-{pid}").write_text(str(ASLEEP))
            with pytest.raises(WorkerFailed, match=f"process {pid} "):
                await bench.give(TRAINER)
            assert len(bench.told("lease.grant")) == 2

    asyncio.run(scenario())


def test_a_lost_gpu_proves_nothing(make, gpus):
    async def scenario():
        async with make().running() as bench:
            await bench.give(TRAINER)
            (gpus / "gpu0" / "lost").touch()
            with pytest.raises(WorkerFailed, match=r"NVML cannot measure GPUs \[0\]: .*[Ll]ost"):
                await bench.give(ROLLOUT)

    asyncio.run(scenario())


def test_the_jobs_own_device_is_measured_and_given_to_the_worker(make, gpus):
    async def scenario():
        async with make(device="1").running() as bench:
            (gpus / "gpu0" / "leak").write_text(str(9000 * MIB))  # another job's
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            environment = Path(f"/proc/{bench.pid(ROLLOUT)}/environ").read_bytes().split(b"\0")
            assert b"CUDA_VISIBLE_DEVICES=1" in environment

    asyncio.run(scenario())


@pytest.mark.parametrize("hidden", ["pids", "bytes"])
def test_where_pids_or_their_bytes_cannot_be_read_the_sum_decides(make, gpus, monkeypatch, hidden):
    if hidden == "pids":
        monkeypatch.setattr("yatt.control.gpus.memory_check.sees_host_pids", lambda: False)
    else:
        (gpus / "silent").touch()

    async def scenario():
        async with make().running() as bench:
            for role in (TRAINER, ROLLOUT, TRAINER):
                await bench.give(role)
            bench.asleep[TRAINER] = 3000 * MIB
            await bench.give(ROLLOUT)
            assert bench.told("lease.not_free")[0]["cause"].startswith("3400 MiB are in use on GPU set n0s0")
            assert len(bench.told("worker.end")) == 1

    asyncio.run(scenario())


def test_the_baseline_sinks_when_a_former_attempts_process_goes(make, gpus):
    (gpus / "gpu0" / "leak").write_text(str(5000 * MIB))
    bench = make()
    memory_check = GpuMemoryCheck(bench.node, bench.supervisor, Nvml(("0",)), sees_pids=True)
    assert memory_check.check(bench.slab, TRAINER, bench.slab.gpus).clean
    (gpus / "gpu0" / "leak").unlink()
    assert memory_check.check(bench.slab, TRAINER, bench.slab.gpus).clean
    (gpus / "gpu0" / "leak").write_text(str(5000 * MIB))
    assert not memory_check.check(bench.slab, TRAINER, bench.slab.gpus).clean


@pytest.mark.parametrize("hidden", ["", "pids"])
def test_engines_of_one_gpu_and_of_two_take_turns_on_the_same_slab(make, gpus, monkeypatch, hidden):
    if hidden:
        monkeypatch.setattr("yatt.control.gpus.memory_check.sees_host_pids", lambda: False)

    async def scenario():
        async with make(device="0,1", wide=True, memory_check_s=HANG_S).running() as bench:
            for role in (TRAINER, JUDGE, ROLLOUT, TRAINER, ROLLOUT, JUDGE):
                await bench.give(role)
            started = {event["worker"] for event in bench.told("worker.start")}
            engines = {"rollout-n0s0e0.1", "rollout-n0s0e1.1", "genrm-judge-n0s0.1"}
            assert started == {"trainer-n0r0.1", "trainer-n0r1.1", *engines}
            assert not bench.told("worker.end") and not bench.told("lease.not_free")

    asyncio.run(scenario())


async def with_memory_that_stays(bench, gpus, engine):
    """Kills one of two engines; its device memory is not free yet."""
    for role in (TRAINER, ROLLOUT):
        await bench.give(role)
    stuck = gpus / "gpu1" / f"stuck-{engine.process.child.pid}"
    stuck.write_text(str(AWAKE))
    bench.supervisor.end(engine)
    while engine.process.child is not None:
        await asyncio.sleep(0.01)
    return stuck


def test_an_engine_of_two_is_started_again_only_once_its_gpu_is_free(make, gpus):
    async def scenario():
        async with make(device="0,1", wide=True, memory_check_s=20.0).running() as bench:
            neighbour, engine = bench.supervisor.of(ROLLOUT, bench.slab)
            stuck = await with_memory_that_stays(bench, gpus, engine)
            pid = neighbour.process.child.pid
            await asyncio.sleep(0.5)
            assert engine.starts == 1 and not engine.is_running
            stuck.unlink()
            while engine.process.child is None:
                await asyncio.sleep(0.01)
            assert (neighbour.process.child.pid, neighbour.starts, engine.starts) == (pid, 1, 2)
            assert (bench.arbiter.lease(bench.slab).stage, len(bench.told("lease.grant"))) == (Stage.HELD, 2)

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


def test_an_engine_whose_gpu_stays_in_use_ends_its_role_on_the_slab_and_then_the_slab(make, gpus):
    async def scenario():
        async with make(device="0,1", wide=True).running() as bench:
            _, engine = bench.supervisor.of(ROLLOUT, bench.slab)
            await with_memory_that_stays(bench, gpus, engine)
            while not bench.quarantined:
                await asyncio.sleep(0.01)
            (expired,) = bench.told("lease.expire")
            assert expired["cause"].startswith(
                "engine 1 has ended, and its GPUs are not free: on GPU set n0s0"
            )
            assert bench.quarantined[0].startswith(
                "memory did not come back: on GPU set n0s0 there is process"
            )
            assert engine.starts == 1
            assert bench.taken_back == [bench.slab] * 2, (
                "from the trainer, and when the holder was terminated"
            )
            told = [event["cause"] for event in bench.told("lease.not_free")]
            assert told and all(cause.startswith("on GPU set n0s0 there is process") for cause in told)

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


def test_engines_that_ended_before_a_grant_are_started_once_under_it(make):
    """The ends of both are handled after each other, and the first one already gives the slab again."""

    async def scenario():
        async with make(device="0,1", wide=True).running() as bench:
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            started = []

            async def restart(worker, token):
                started.append((worker.name, token))
                await restart_one(worker, token)

            restart_one, bench._restart = bench._restart, restart
            bench.arbiter._holding = Holding(
                wake=bench._wake,
                sleep=lambda *_: asyncio.sleep(600),
                restart=restart,
                take_back=lambda _: None,
            )
            exits = []
            bench.supervisor.exits.put_nowait = exits.append
            bench.arbiter.want(bench.slab, "")
            bench.arbiter.want(bench.slab, ROLLOUT)
            engines = bench.supervisor.of(ROLLOUT, bench.slab)
            for engine in engines:
                bench.supervisor.end(engine)
            while len(exits) < 2:
                await asyncio.sleep(0.01)
            for engine, _ in exits:
                bench.arbiter.died(engine)
            await bench.arbiter.settled(bench.slab, ROLLOUT, HANG_S)
            assert started == [(engine.name, 3) for engine in engines]

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


def test_an_engine_that_does_not_fall_asleep_is_ended_alone_when_the_slab_is_taken_back(make):
    async def scenario():
        async with make(device="0,1", wide=True, awake=512 * MIB, release_s=2.0).running() as bench:
            await bench.give(TRAINER)
            await bench.give(ROLLOUT)
            neighbour, engine = bench.supervisor.of(ROLLOUT, bench.slab)
            fall_asleep = bench.arbiter._holding.sleep

            async def sleep(slab, role, token, release_s):
                if role != ROLLOUT:
                    return await fall_asleep(slab, role, token, release_s)
                await hold(bench.orders, neighbour.process.child.pid, bench.asleep[role])
                neighbour.process.is_asleep = True
                await asyncio.sleep(600)

            bench.arbiter._holding = Holding(
                wake=bench._wake, sleep=sleep, restart=bench._restart, take_back=lambda _: None
            )
            await bench.give(JUDGE)
            assert [event["worker"] for event in bench.told("worker.end")] == [engine.name + ".1"]
            assert bench.told("lease.expire")[0]["cause"] == "rollout did not release within 2.5 s"
            assert not bench.told("lease.not_free"), "what the neighbour keeps asleep is known"
            await bench.give(ROLLOUT)
            assert (neighbour.starts, engine.starts) == (1, 2)

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


def test_devices_are_found_by_index_and_uuid_and_missing_ones_are_the_users_mistake(gpus):
    nvml = Nvml(("GPU-1", "0"))
    (gpus / "gpu1" / "leak").write_text("5")
    assert [nvml.occupancy([place]).used_bytes for place in (0, 1)] == [BASE + 5, BASE]
    assert nvml.occupancy([0, 1]).used_bytes == 2 * BASE + 5
    nvml.close()
    with pytest.raises(ConfigError, match="NVML finds no GPU '7'"):
        Nvml(("7",))


def test_without_a_driver_the_message_says_what_to_do():
    code = (
        "from yatt.adapters.machine.nvml import Nvml\nfrom yatt.errors import ConfigError\n"
        "try:\n    Nvml(('0',))\nexcept ConfigError as error:\n    print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    if answer.stdout:  # nothing is printed where there is a driver
        assert "write launch.device: cpu" in answer.stdout


@pytest.mark.parametrize(
    ("inherited", "count", "devices"),
    [
        (None, 2, ("0", "1")),
        ("3,5", 2, ("3", "5")),
        ("2, 3,4", 1, ("2",)),
        ("GPU-a,GPU-b", 2, ("GPU-a", "GPU-b")),
    ],
)
def test_devices_are_those_the_job_was_given(inherited, count, devices):
    assert visible_devices(inherited, count) == devices


def test_too_few_devices_name_the_keys():
    with pytest.raises(ConfigError, match=r"2 GPUs are needed .*CUDA_VISIBLE_DEVICES is '3'"):
        visible_devices("3", 2)


def test_workers_run_on_the_cpus_near_their_gpu(make, gpus, tmp_path):
    own = sorted(os.sched_getaffinity(0))
    for bus, cpus in (("01", f"{own[-1]}"), ("02", "4000-4095")):
        device = tmp_path / "sys/bus/pci/devices" / f"0000:{bus}:00.0"
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cpus}\n")
    near = cpus_by_device(("0", "1"), tmp_path / "sys")
    assert near == ({own[-1]}, frozenset(own)), "none of the CPUs near the second are this process's"
    assert cpus_by_device(("0",), tmp_path / "nowhere") == (frozenset(own),)
    (gpus / "gpu1" / "lost").touch()
    assert cpus_by_device(("0", "1"), tmp_path / "sys") == (frozenset(own),) * 2

    async def scenario():
        async with make(cpus=near).running() as bench:
            await bench.give(TRAINER)
            assert os.sched_getaffinity(bench.pid(TRAINER)) == {own[-1]}
            assert bench.told("worker.start")[0]["cpus"] == f"{own[-1]}"

    asyncio.run(scenario())


def check_of(tmp_path: Path, device: str = "cuda", **site: object) -> NodeCheck:
    own = SiteConfig(interface="lo", **site)
    return NodeCheck(own, (tmp_path, tmp_path), device, 2, dict(os.environ))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("lost", "", "GPU 1 does not answer: GPU is lost"),
        ("pending", "", "GPU 1 has memory errors and waits for a reset"),
        ("failed", "", "GPU 1 has memory that could not be repaired (row remapping failed)"),
        ("slow", "64", "GPU 1 is slowed down by its board: too hot"),
        ("leak", str(10000 * MIB), "GPU 1 has 10100 of 81920 MiB in use already, by no visible process"),
        ("PID", str(10000 * MIB), "by PID ("),
    ],
)
def test_a_gpu_that_is_not_fit_for_work(gpus, tmp_path, monkeypatch, file, content, says):
    monkeypatch.setattr("yatt.launch.node.node_check.FREE_S", 0.2)
    monkeypatch.setattr("yatt.launch.node.node_check.LOOK_S", 0.05)
    file, says = (text.replace("PID", str(os.getpid())) for text in (file, says))
    assert check_of(tmp_path).run() is None
    (gpus / "gpu1" / file).write_text(content)
    unfit = check_of(tmp_path).run()
    assert says in unfit.why
    assert unfit.exit_code == 1, "never the user's mistake"
    assert "GPU 0" not in unfit.why


def test_what_an_old_driver_cannot_say_is_asked_in_the_old_way(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("yatt.launch.node.node_check.FREE_S", 0.0)
    (gpus / "old").touch()
    assert check_of(tmp_path).run() is None
    (gpus / "gpu0" / "pending").touch()
    assert check_of(tmp_path).run().why == "GPU 0 has memory errors and waits for a reset"


def test_a_gpu_may_take_a_while_to_be_free_of_the_attempt_before(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("yatt.launch.node.node_check.LOOK_S", 0.05)
    last = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    (gpus / "gpu0" / str(last.pid)).write_text(str(10000 * MIB))
    threading.Thread(target=last.wait, daemon=True).start()  # or it would stay as a zombie, which counts
    assert check_of(tmp_path).run() is None
    assert last.wait() == 0, "it was waited for"


def test_a_device_that_is_not_there_is_the_nodes_fault(gpus, tmp_path, monkeypatch):
    (gpus / "gpu1" / "base").unlink()
    (gpus / "gpu1").rmdir()
    unfit = check_of(tmp_path).run()
    assert "NVML finds no GPU '1'" in unfit.why
    assert unfit.exit_code == 1
    assert check_of(tmp_path, device="cpu").run() is None
