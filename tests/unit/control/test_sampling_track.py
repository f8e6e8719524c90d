"""The leader's sampling track around its rules: what waits, what is begun, what becomes of errors."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.runs import HANG_S
from yatt.control.leader.background import Background
from yatt.control.leader.batches import SamplingTrack, TrackWork
from yatt.control.leader.inbox import Inbox
from yatt.core.phases import phases
from yatt.core.phases.sampling_track import TrackRules
from yatt.errors import ConfigError, WorkerFailed


class Bench:
    """A track whose batches and loads end when the test says so."""

    def __init__(self, ahead: int) -> None:
        self.inbox, self.said = Inbox(), list[str]()
        self.ends: dict[str, asyncio.Future[bool]] = {}
        rules = TrackRules(total_iterations=5, ahead=ahead, max_age=ahead)
        work = TrackWork(prepare=self._prepare, sample=self._sample, load=self._load)
        self.is_prepared = asyncio.Event()
        self.is_prepared.set()
        self.track = SamplingTrack(rules, work, Background(self.inbox))

    async def _prepare(self, _: int) -> None:
        await self.is_prepared.wait()

    async def _sample(self, batch: int, version: int) -> bool:
        return await self._until_told(f"sample {batch} by {version}")

    async def _load(self, version: int) -> None:
        await self._until_told(f"load {version}")

    async def _until_told(self, what: str) -> bool:
        self.said.append(what)
        self.ends[what] = asyncio.get_running_loop().create_future()
        return await self.ends[what]

    async def end(self, what: str, is_whole: bool = True) -> None:
        await settled()
        self.ends.pop(what).set_result(is_whole)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def played(scene: Callable[[Bench], Awaitable[None]], ahead: int) -> Bench:
    async def play() -> Bench:
        bench = Bench(ahead)
        await asyncio.wait_for(scene(bench), HANG_S)
        return bench

    return asyncio.run(play())


async def started(bench: Bench) -> "asyncio.Task[bool]":
    bench.track.resumed(0)
    loading = asyncio.ensure_future(bench.track.published(0))
    await bench.end("load 0")
    await loading
    return asyncio.ensure_future(bench.track.batch(1))


def test_a_batch_for_which_engines_are_not_ready_when_the_run_is_stopped_is_not_begun() -> None:
    async def scene(bench: Bench) -> None:
        bench.is_prepared.clear()
        asked = await started(bench)
        await settled()
        bench.track.stop()
        bench.is_prepared.set()
        await settled()
        asked.cancel()

    assert played(scene, 0).said == ["load 0"]


def test_without_credit_the_tracks_take_turns() -> None:
    async def scene(bench: Bench) -> None:
        asked = await started(bench)
        await bench.end("sample 1 by 0", is_whole=False)
        assert await asked, "the batch lacks groups"
        asked = asyncio.ensure_future(bench.track.batch(1))
        await bench.end("sample 1 by 0")
        assert not await asked
        await bench.track.may_publish()
        loading = asyncio.ensure_future(bench.track.published(1))
        await settled()
        assert not loading.done(), "training waits for the engines"
        await bench.end("load 1")
        await loading

    assert played(scene, 0).said == ["load 0", "sample 1 by 0", "sample 1 by 0", "load 1"]


def test_with_credit_the_next_batch_is_begun_and_weights_are_loaded_after_it() -> None:
    async def scene(bench: Bench) -> None:
        asked = await started(bench)
        await bench.end("sample 1 by 0")
        assert not await asked
        await bench.track.may_publish()
        await bench.track.published(1)
        quiet = asyncio.ensure_future(bench.track.quiet())
        await bench.end("sample 2 by 0")
        assert not quiet.done(), "the newest version is to be validated"
        await bench.end("load 1")
        await quiet
        bench.track.quiet_is_over()
        assert not await bench.track.batch(2)
        await settled()

    assert played(scene, 1).said == ["load 0", "sample 1 by 0", "sample 2 by 0", "load 1", "sample 3 by 1"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_to_stop_ends_every_wait(ahead: int) -> None:
    async def scene(bench: Bench) -> None:
        asked = await started(bench)
        await settled()
        assert bench.track.stop(), "a batch is being sampled"
        with pytest.raises(WorkerFailed, match="ends early"):
            await asked
        bench.ends.pop("sample 1 by 0").set_exception(WorkerFailed("was broken off"))
        await settled()
        await bench.track.may_publish()

    bench = played(scene, ahead)
    assert bench.said == ["load 0", "sample 1 by 0"]
    assert not bench.inbox._events, "what was broken off is no failure"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a reward is wrong"), 2), (WorkerFailed("an engine"), 1), (KeyError(3), 1)],
)
def test_an_error_beside_training_ends_the_attempt(error: Exception, code: int) -> None:
    async def scene(bench: Bench) -> None:
        asked = await started(bench)
        await bench.end("sample 1 by 0")
        await asked
        await settled()
        bench.ends.pop("sample 2 by 0").set_exception(error)
        await settled()

    (failure,) = played(scene, 1).inbox._events
    assert isinstance(failure, phases.Failure)
    assert failure.exit_code == code
