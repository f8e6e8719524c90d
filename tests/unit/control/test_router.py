"""Which engine gets which request; what an engine's sleep or death costs. Real router and engines' table."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.runs import HANG_S
from tests.unit.control.engine_stand_in import Engines, completion
from tests.unit.core.test_placement import config as colocated, disaggregated, widths
from yatt.control.gpus.engines import Bounced, LocalEngines, engine_room
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.errors import WorkerFailed
from yatt.paths import RunPaths
from yatt.records import message as m


class Bench:
    def __init__(self, *, retries: int = 1) -> None:
        config = colocated(1, 2, 0, 0)
        config = replace(config, rollout=replace(config.rollout, max_retries=retries, max_num_seqs=8))
        self.node = Node(
            config=config, paths=RunPaths(Path("/r")), placement=placement_of(config),
            attempt=1, index=0, host="",
            device="cpu",
        )  # fmt: skip
        self.engines = Engines(lambda _, __: None)
        self.local = LocalEngines(self.engines, config)  # type: ignore[arg-type]
        self.engines.completed = self.local.completed
        self.router = Router(self.node, self.local, Peers(), Progress(int))

    async def wake(self, *names: str) -> None:
        for name in names:
            await self.local.add(name, ROLLOUT, self.node.slabs[0], 1)

    async def take_away(self, name: str) -> None:
        """Wakes an engine and puts it to sleep at once."""
        await self.wake(name)
        self.local.drain(name)
        self.local.remove(name, "was put to sleep")

    def ask(self, name: str, group: str = "") -> "asyncio.Task[m.Completed]":
        return asyncio.ensure_future(self.router.complete(ROLLOUT, request(name, group)))

    def where(self) -> dict[str, str]:
        """The engine that each request was sent to last, by its name."""
        sent = [(to, body) for to, body, _ in self.engines.sent if isinstance(body, m.SampleRequest)]
        return {body.request_id.partition("#")[0].removeprefix("node0/"): to for to, body in sent}


def request(name: str, group: str) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=name, prompt_ids=m.pack_ids([1]), seed=1, temperature=1.0, top_p=1.0, top_k=-1,
        max_tokens=4, group=group,
    )  # fmt: skip


async def begun(bench: Bench) -> tuple["asyncio.Task[m.Completed]", str]:
    """Asks for `one` with two engines awake; gives the engine that runs it too."""
    await bench.wake("a", "b")
    task = bench.ask("one")
    await settle()
    return task, bench.where()["one"]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def finish(bench: Bench) -> None:
    bench.engines.answer = lambda _, sample: completion(sample, [5])


@pytest.mark.parametrize("rows", [b"", m.pack_floats([-1.0] * 3), m.pack_floats([-1.0] * 6)])
def test_an_answer_without_the_log_probs_that_were_asked_for_is_refused(rows: bytes) -> None:
    """Of two watched tokens at each of two tokens: four."""

    async def scene() -> list[m.Completed]:
        bench = Bench()
        await bench.wake("a")
        bench.engines.answer = lambda _, sample: msgspec.structs.replace(
            completion(sample, [5, 6]), watched=given.pop()
        )
        asked = msgspec.structs.replace(request("one", ""), watched=(3, 4))
        return [await bench.router.complete(ROLLOUT, asked) for _ in range(2)]

    given = [m.pack_floats([-1.0] * 4), rows]
    refused, whole = asyncio.run(scene())
    assert refused.error == "a has not given the log-probs of 2 watched tokens at each of its own"
    assert (refused.finish_reason, refused.token_ids) == ("error", b"")
    assert whole.finish_reason == "stop" and m.unpack_floats(whole.watched) == [-1.0] * 4


def test_requests_of_a_group_share_an_engine_and_groups_are_spread() -> None:
    async def scene() -> dict[str, str]:
        bench = Bench()
        await bench.wake("a", "b")
        tasks = [bench.ask(f"{group}/{i}", group) for group in ("x", "y") for i in range(4)]
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return bench.where()

    where = asyncio.run(scene())
    by_group = {group: {to for name, to in where.items() if name.startswith(group)} for group in "xy"}
    assert len(where) == 8
    assert [len(engines) for engines in by_group.values()] == [1, 1]
    assert by_group["x"] != by_group["y"]


def test_a_request_of_an_engine_that_is_put_to_sleep_is_sent_elsewhere_without_counting() -> None:
    async def scene() -> None:
        bench = Bench(retries=0)
        task, first = await begun(bench)
        finish(bench)
        bench.local.remove(first, "was put to sleep")
        completed = await asyncio.wait_for(task, HANG_S)
        assert completed.finish_reason == "stop"
        assert bench.where()["one"] != first

    asyncio.run(scene())


def test_another_engine_of_the_node_does_not_begin_what_one_that_falls_asleep_still_runs() -> None:
    async def scene() -> None:
        bench = Bench(retries=0)
        task, first = await begun(bench)
        bench.local.drain(first)
        other = bench.ask("two")
        await settle()
        assert bench.where() == {"one": first, "two": "ab".replace(first, "")}
        finish(bench)
        bench.local.remove(first, "was put to sleep")
        assert (await asyncio.wait_for(task, HANG_S)).finish_reason == "stop"
        other.cancel()

    asyncio.run(scene())


def test_a_request_on_its_way_to_an_engine_that_is_taken_away_waits_for_any_other() -> None:
    """Not at the node without engines: it might get none for long, and others have room."""

    async def scene() -> tuple[int, int]:
        bench = Bench(retries=0)
        await bench.take_away("first")  # the router knows that there is no room
        task = bench.ask("one")
        await settle()
        await bench.take_away("a")  # the request was assigned to this node, but is not there yet
        await settle()
        assert not bench.where()
        waiting = bench.router.num_waiting(ROLLOUT), bench.local.num_waiting(ROLLOUT)
        finish(bench)
        await bench.wake("b")
        assert (await asyncio.wait_for(task, HANG_S)).finish_reason == "stop"
        return waiting

    assert asyncio.run(scene()) == (1, 0)


def test_a_request_of_another_node_that_comes_too_late_is_returned_at_once() -> None:
    async def scene() -> None:
        bench = Bench()
        with pytest.raises(Bounced, match="no engine of rollout is left here"):
            await asyncio.wait_for(bench.local.complete(ROLLOUT, request("node7/one", "")), HANG_S)

    asyncio.run(scene())


def test_a_request_that_outlives_no_engine_fails_after_its_retries() -> None:
    async def scene() -> int:
        bench = Bench(retries=2)
        task, deaths = bench.ask("poison"), 0
        while not task.done():
            await bench.wake("a")
            await settle()
            if "poison" in bench.where() and not task.done():
                deaths += 1
                bench.local.remove("a", "ended: killed", is_blamed=True)
                await settle()
        with pytest.raises(WorkerFailed, match="a ended: killed"):
            await task
        return deaths

    assert asyncio.run(scene()) == 3, "the first try and two more"


def test_an_abort_gives_back_what_was_sampled_and_what_was_not_begun() -> None:
    async def scene() -> list[m.Completed]:
        bench = Bench()
        waiting = bench.ask("waiting")
        await settle()
        await bench.router.abort(ROLLOUT)
        nothing = await asyncio.wait_for(waiting, HANG_S)
        await bench.wake("a")
        running = bench.ask("running")
        await settle()
        await bench.router.abort(ROLLOUT)
        return [nothing, await asyncio.wait_for(running, HANG_S)]

    nothing, partial = asyncio.run(scene())
    assert (nothing.finish_reason, nothing.token_ids) == ("abort", b"")
    assert (partial.finish_reason, m.unpack_ids(partial.token_ids)) == ("abort", [7, 8])


@pytest.mark.parametrize("is_blamed", [False, True], ids=["its engine fell asleep", "its engine ended"])
@pytest.mark.parametrize("retries", [0, 1])
def test_a_request_that_is_aborted_on_its_way_back_is_not_sent_again(retries: int, is_blamed: bool) -> None:
    """Nor does it fail: nobody wants it any more."""

    async def scene() -> tuple[m.Completed, int]:
        bench = Bench(retries=retries)
        task, first = await begun(bench)
        bench.local.remove(first, "is gone", is_blamed=is_blamed)
        await bench.router.abort(ROLLOUT)  # before the router has heard that the request came back
        return await asyncio.wait_for(task, HANG_S), len(bench.engines.asked())

    completed, num_sent = asyncio.run(scene())
    assert (completed.finish_reason, completed.token_ids, num_sent) == ("abort", b"", 1)


def test_an_abort_in_the_turn_in_which_a_request_is_assigned_keeps_it_from_being_sent() -> None:
    """The node would hear of the abort first, and run the request to its end."""

    async def scene() -> tuple[str, dict[str, str]]:
        bench = Bench()
        await bench.take_away("first")
        task = bench.ask("one")
        await settle()
        await bench.wake("a")  # the request is assigned, and goes on in the next turn
        await bench.router.abort(ROLLOUT)
        return (await asyncio.wait_for(task, HANG_S)).finish_reason, bench.where()

    assert asyncio.run(scene()) == ("abort", {})


def test_a_request_that_nobody_waits_for_any_more_is_aborted_in_its_engine() -> None:
    async def scene() -> list[m.Message]:
        bench = Bench()
        await bench.wake("a")
        task = bench.ask("one")
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle()
        return [body for _, body, _ in bench.engines.sent if isinstance(body, m.Abort)]

    (abort,) = asyncio.run(scene())
    assert len(abort.request_ids) == 1


def test_before_a_node_has_reported_its_room_each_of_its_engines_counts() -> None:
    """Of two slabs of two GPUs, one has two rollout engines of one GPU."""
    config = widths(disaggregated(2, 1, 1, engine_gpus=4, genrms=1, slabs=1), 1, 2)
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=8))
    node = Node(
        config=config, paths=RunPaths(Path("/r")), placement=placement_of(config), attempt=1, index=0,
        host="", device="cpu",
    )  # fmt: skip
    local = LocalEngines(Engines(lambda _, __: None), config)  # type: ignore[arg-type]
    router = Router(node, local, Peers(), Progress(int))
    for number in range(100):
        router._dispatch.submit(str(number), ROLLOUT)
    assert len(router._dispatch.assign()) == 2 * engine_room(config, ROLLOUT) == 20
