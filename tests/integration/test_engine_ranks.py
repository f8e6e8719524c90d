"""An engine of two processes, each with a controller of its own: orders in any sequence, ranks that end."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_engine import WATCHED, reference_rows, transformers_logprobs, watched_rows
from tests.integration.test_engine_worker import PROMPT, sample
from tests.runs import kill, until
from tests.tiny_models import make_qwen3, make_scripted_model, publish
from tests.worker_process import WorkerServer, worker_with_server, write_run
from yatt.adapters.net.curve import make_keys
from yatt.engine.script import scripted_logprobs
from yatt.errors import EXIT_FAILED
from yatt.records import message as m

PROBE = (m.pack_ids([7, 8, 9]), m.pack_ids(PROMPT))
Scene = Callable[[list[WorkerServer]], Awaitable[None]]
NUM_RANKS = 2


def rank(run: Path, index: int, start: int = 1) -> Any:
    place = ("--engine", "rollout-n0", "--rank", str(index), "--num-ranks", str(NUM_RANKS))
    name = f"rollout-n{index}s0r{index}.{start}"
    return worker_with_server(run, "yatt.rollout", *place, "--host", "127.0.0.1", worker=name)


@contextlib.asynccontextmanager
async def ranks_of(run: Path) -> AsyncIterator[list[WorkerServer]]:
    make_keys(run / "keys")
    async with contextlib.AsyncExitStack() as stack:
        yield list(await asyncio.gather(*(stack.enter_async_context(rank(run, i)) for i in range(NUM_RANKS))))


def scripted(folder: Path, **script: Any) -> tuple[Path, str]:
    model = make_scripted_model(folder / "model", **script)
    rollout = {"engine": "scripted", "max_response_tokens": 4000, "tp_size": NUM_RANKS}
    return write_run(folder, {"launch": {"nodes": 2}, "model": {"path": model}, "rollout": rollout}), model


def play(run: Path, scene: Scene, limit_s: float = 300.0) -> None:
    async def work() -> None:
        async with ranks_of(run) as servers, asyncio.timeout(limit_s):
            await scene(servers)

    asyncio.run(work())


async def both(servers: list[WorkerServer], body: m.Order, late: float = 0.0) -> list[m.Message]:
    """Orders both ranks, the second one `late` seconds after the first, or the first one if below 0."""

    async def order(server: WorkerServer, wait_s: float) -> m.Message:
        await asyncio.sleep(max(0.0, wait_s))
        return await server.order(body, limit_s=200.0)

    return list(await asyncio.gather(order(servers[0], -late), order(servers[1], late)))


@pytest.mark.parametrize("seed", range(4))
def test_orders_come_in_any_sequence_and_both_ranks_carry_them_out(tmp_path: Path, seed: int) -> None:
    run, model = scripted(tmp_path)
    draw = random.Random(seed)
    folders = {
        version: publish(tmp_path / f"v{version}", model=model, policy_version=version)
        for version in (1, 2, 3)
    }

    async def scene(servers: list[WorkerServer]) -> None:
        awake, version, number = False, 0, 0
        for _ in range(14):
            late = draw.choice([-0.3, -0.05, 0.0, 0.05, 0.3])
            what = draw.choice(["sample", "sample", "load", "sleep"]) if awake else "wake"
            if what == "wake":
                assert await both(servers, m.Wake(), late) == [m.Done(), m.Done()]
                awake = True
            elif what == "sleep":
                assert await both(servers, m.Sleep(), late) == [m.Done(), m.Done()]
                awake = False
            elif what == "load":
                version = min(version + 1, 3)
                order = m.LoadWeights(policy_version=version, folder=folders[version], probe=PROBE)
                for answer in await both(servers, order, late):
                    assert isinstance(answer, m.WeightsLoaded), answer
                    scores = m.unpack_floats(answer.probe_logprobs[0])
                    assert scores == pytest.approx(scripted_logprobs(version, [7, 8, 9]))
            else:
                number += 1
                await servers[0].tell(sample(f"r{number}", watched=WATCHED))
                completed = await servers[0].next_told()
                assert len(completed.watched) == len(WATCHED) * len(completed.token_ids) > 0
                assert completed.finish_reason in ("stop", "length") and completed.policy_version == version
        assert servers[1].told.empty(), "requests are answered by rank 0 only"

    play(run, scene)


def test_a_node_that_is_ahead_keeps_its_order_until_rank_0_is_too(tmp_path: Path) -> None:
    run, model = scripted(tmp_path)
    one, two = (publish(tmp_path / f"v{n}", model=model, policy_version=n) for n in (1, 2))

    async def scene(servers: list[WorkerServer]) -> None:
        await both(servers, m.Wake())
        ahead = asyncio.ensure_future(
            servers[1].order(m.LoadWeights(policy_version=2, folder=two, probe=PROBE))
        )
        refused = await servers[0].order(m.LoadWeights(policy_version=1, folder=one, probe=PROBE))
        assert isinstance(refused, m.Failed) and "another rank" in refused.error
        loaded = await servers[0].order(m.LoadWeights(policy_version=2, folder=two, probe=PROBE))
        assert [loaded.policy_version, (await ahead).policy_version] == [2, 2]

        behind = asyncio.ensure_future(
            servers[0].order(m.LoadWeights(policy_version=2, folder=two, probe=PROBE))
        )
        old = await servers[1].order(m.LoadWeights(policy_version=1, folder=one, probe=PROBE))
        assert isinstance(old, m.Failed) and "loads policy version 2 already" in old.error
        assert (
            await servers[1].order(m.LoadWeights(policy_version=2, folder=two, probe=PROBE))
        ).policy_version == 2
        assert (await behind).policy_version == 2

    play(run, scene)


def test_a_load_that_fails_on_one_rank_fails_on_both_and_can_be_repeated(tmp_path: Path) -> None:
    run, model = scripted(tmp_path)
    folder = publish(tmp_path / "v1", model=model, policy_version=1)

    async def scene(servers: list[WorkerServer]) -> None:
        await both(servers, m.Wake())
        wrong = m.LoadWeights(policy_version=1, folder=str(tmp_path / "nothing"), probe=PROBE)
        right = m.LoadWeights(policy_version=1, folder=folder, probe=PROBE)
        answers = await asyncio.gather(servers[0].order(right), servers[1].order(wrong))
        assert all(isinstance(answer, m.Failed) for answer in answers), answers
        assert [a.policy_version for a in await both(servers, right)] == [1, 1]

    play(run, scene)


def test_only_rank_0_takes_requests(tmp_path: Path) -> None:
    run, _ = scripted(tmp_path)

    async def scene(servers: list[WorkerServer]) -> None:
        await both(servers, m.Wake())
        await servers[1].tell(sample("one"))
        refused = await servers[1].next_told()
        assert refused.finish_reason == m.LOST and "only rank 0" in refused.error
        await servers[0].tell(sample("two", max_tokens=0, prompt_ids=b""))  # refused by both ranks alike
        assert (await servers[0].next_told()).finish_reason == "error"
        await servers[0].tell(sample("three"))
        assert (await servers[0].next_told()).finish_reason == "stop"

    play(run, scene)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_rank_ends_the_other_ends_too_and_later_starts_meet(tmp_path: Path, victim: int) -> None:
    run, _ = scripted(tmp_path, mean_tokens=4000, seconds_per_step=0.01)

    async def scene(servers: list[WorkerServer]) -> None:
        await both(servers, m.Wake())
        await servers[0].tell(sample("long", max_tokens=4000))
        await until(lambda: servers[0].beats and servers[0].beats[-1].steps.steps, "a token")
        kill(servers[victim].process.pid, signal.SIGKILL)
        if victim:
            lost = await servers[0].next_told()
            assert (lost.request_id, lost.finish_reason) == ("long", m.LOST)
        assert await servers[1 - victim].ended() == EXIT_FAILED
        async with rank(run, 1, 2) as second:  # it finds the file of the former rank 0 first
            waking = asyncio.ensure_future(second.order(m.Wake()))
            await asyncio.sleep(1.0)
            assert not waking.done()
            async with rank(run, 0, 2) as first:
                assert await asyncio.gather(first.order(m.Wake()), waking) == [m.Done(), m.Done()]
                await first.tell(sample("short", max_tokens=5))
                assert (await first.next_told()).finish_reason == "length"

    play(run, scene)


def test_a_process_that_waits_for_its_rank_0_shows_progress(tmp_path: Path) -> None:
    run, _ = scripted(tmp_path)
    make_keys(run / "keys")

    async def work() -> None:
        async with rank(run, 1) as alone:
            waking = asyncio.ensure_future(alone.order(m.Wake()))
            async with asyncio.timeout(300):
                while len({beat.work for beat in alone.beats}) < 4:
                    await asyncio.sleep(0.1)
            assert not waking.done()
            waking.cancel()

    asyncio.run(work())


def test_a_meeting_to_which_nobody_comes_fails_and_names_who_is_missing(tmp_path: Path) -> None:
    model = make_scripted_model(tmp_path / "model")
    rollout = {"engine": "scripted", "tp_size": NUM_RANKS}
    launch = {"nodes": 2, "start_timeout_s": 3}
    run = write_run(tmp_path, {"launch": launch, "model": {"path": model}, "rollout": rollout})
    make_keys(run / "keys")

    async def work() -> None:
        for index, other in ((0, 1), (1, 0)):
            async with rank(run, index) as alone:
                refused = await alone.order(m.Wake(), limit_s=60.0)
                assert isinstance(refused, m.Failed)
                assert f"waits for rank {other} of rollout-n0, and nobody has come for 3 s" in refused.error

    asyncio.run(work())


RECORDER = """
import pickle, sys, traceback
def recording(original):
    def read(*a, **k):
        files = [frame.filename for frame in traceback.extract_stack()]
        names = "distributed_c10d", "shm_broadcast", "parallel_state"
        if any(name in file for file in files for name in names):
            open({path!r}, "a").write("\\n".join(files[-6:]) + "\\n")
        return original(*a, **k)
    return read
pickle.loads = recording(pickle.loads)
open({path!r} + "-watched", "a").close()
"""


@pytest.mark.slow
def test_vllm_over_two_processes_is_the_model_and_reads_no_pickle_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_qwen3(tmp_path / "model", tied=False)
    other = make_qwen3(tmp_path / "other", tied=False, seed=1)
    rollout = {"engine": "vllm", "max_response_tokens": 64, "tp_size": NUM_RANKS, "kv_cache_bytes": 32 << 20}
    policy = {"path": model, "dtype": "float32"}
    run = write_run(tmp_path, {"launch": {"nodes": 2}, "model": policy, "rollout": rollout})
    hooks, seen = tmp_path / "hooks", tmp_path / "pickles"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(RECORDER.format(path=str(seen)))
    monkeypatch.setenv("PYTHONPATH", f"{hooks}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder = publish(tmp_path / "v1", model=other, policy_version=1)

    async def greedy(servers: list[WorkerServer], name: str, folder: str) -> None:
        await servers[0].tell(sample(name, temperature=0.0, max_tokens=8, watched=WATCHED))
        completed = await servers[0].next_told(120.0)
        ids = m.unpack_ids(completed.token_ids)
        expected = transformers_logprobs(folder, [*PROMPT, *ids])[len(PROMPT) - 1 :]
        assert m.unpack_floats(completed.logprobs) == pytest.approx(expected, abs=1e-4)
        rows = reference_rows(folder, [*PROMPT, *ids], WATCHED, 0.0)[len(PROMPT) - 1 :]
        assert watched_rows(completed, len(WATCHED)) == [pytest.approx(row, abs=1e-4) for row in rows]

    async def scene(servers: list[WorkerServer]) -> None:
        assert await both(servers, m.Wake()) == [m.Done(), m.Done()]
        await greedy(servers, "one", model)
        answers = await both(servers, m.LoadWeights(policy_version=1, folder=folder, probe=PROBE))
        for answer in answers:
            assert isinstance(answer, m.WeightsLoaded), answer
            expected = transformers_logprobs(other, [7, 8, 9])
            assert m.unpack_floats(answer.probe_logprobs[0]) == pytest.approx(expected, abs=1e-4)
        await greedy(servers, "two", other)
        assert await both(servers, m.Sleep()) == [m.Done(), m.Done()]
        assert await both(servers, m.Wake()) == [m.Done(), m.Done()]
        await greedy(servers, "three", other)
        for server in servers:
            addresses = listening(server.process.pid)
            assert addresses and set(addresses) == {"127.0.0.1"}, "no port is open to other networks"
        assert Path(f"{seen}-watched").exists(), "the processes have the recorder"
        assert not seen.exists(), seen.read_text()

    play(run, scene, limit_s=500)


@pytest.mark.slow
def test_slices_of_a_small_vocabulary_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    """vLLM pads 30 rows to 64, so that each of two ranks has 32: more than the whole."""
    import transformers

    folders = [
        make_qwen3(tmp_path / name, tied=False, seed=seed) for seed, name in enumerate(("first", "next"))
    ]
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(30)
        model.save_pretrained(folder)
    rollout = {"engine": "vllm", "max_response_tokens": 64, "tp_size": NUM_RANKS, "kv_cache_bytes": 32 << 20}
    policy = {"path": folders[0], "dtype": "float32"}
    run = write_run(tmp_path, {"launch": {"nodes": 2}, "model": policy, "rollout": rollout})
    order = m.LoadWeights(
        policy_version=1, folder=publish(tmp_path / "v1", model=folders[1], policy_version=1),
        probe=(m.pack_ids([7, 8, 9]),),
    )  # fmt: skip

    async def scene(servers: list[WorkerServer]) -> None:
        assert await both(servers, m.Wake()) == [m.Done(), m.Done()]
        for answer in await both(servers, order):
            assert isinstance(answer, m.WeightsLoaded) and answer.differing == (), answer
            expected = transformers_logprobs(folders[1], [7, 8, 9])
            assert m.unpack_floats(answer.probe_logprobs[0]) == pytest.approx(expected, abs=1e-4)

    play(run, scene, limit_s=500)


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens for TCP."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                number = local.partition(":")[0]
                short = ".".join(str(int(number[i : i + 2], 16)) for i in (6, 4, 2, 0))
                found.append(short if len(number) == 8 else number)
    return found
