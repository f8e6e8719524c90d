"""Pictures of requests: prepared before an engine gets them, once for those that ask at the same time."""

import asyncio
from pathlib import Path

import pytest

from tests.runs import turns
from tests.unit.control.engine_stand_in import Engines, completion
from tests.unit.core.test_placement import config
from yatt.adapters.node_local.media_file import MediaShape, media_head
from yatt.control.gpus import prepared_requests
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.prepared_requests import MediaUnusable, PreparedRequests
from yatt.control.rollouts.groups.drops import Drops
from yatt.core.gpus.placement import ROLLOUT, Slab
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m

GRID = (1, 4, 4)
DIGESTS = {"a.png": "a" * 64, "b.png": "b" * 64}


def picture(path: str) -> m.PlacedMedia:
    return m.PlacedMedia(m.MediaRef(path, "ff" * 32, 64, 64), 1, 4, GRID)


def request(number: int, *paths: str) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=f"node0/{number}/0", prompt_ids=m.pack_ids([1, 2]), seed=number, temperature=1.0,
        top_p=1.0, top_k=-1, max_tokens=3, media=tuple(map(picture, paths)),
    )  # fmt: skip


class Media:
    """In place of the media process: answers when it is let; other paths are faults."""

    def __init__(self) -> None:
        self.asked: list[m.MediaItem] = []
        self.orders = 0
        self.may_answer = asyncio.Event()

    async def prepare(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        self.asked += items
        self.orders += 1
        await self.may_answer.wait()
        if "broken" in {item.path for item in items}:
            raise WorkerFailed("media-n0 cannot start")
        made, faults = [], []
        for number, item in reversed([*enumerate(items)]):
            if item.path in DIGESTS:
                made.append(m.PreparedItem(number, DIGESTS[item.path], GRID))
            else:
                faults.append(m.MediaFault(number, f"{item.path} is truncated."))
        return m.MediaPrepared(items=tuple(made), faults=tuple(faults))


def test_requests_that_ask_at_the_same_time_share_a_preparation() -> None:
    async def scene() -> None:
        media = Media()
        prepared = PreparedRequests(media.prepare, Path())
        asked = [request(0, "a.png"), request(1, "a.png"), request(2, "b.png", "a.png")]
        tasks = [asyncio.ensure_future(prepared.with_prepared(each)) for each in asked]
        await turns()
        assert media.asked == [m.MediaItem(p, "ff" * 32, GRID) for p in ("a.png", "b.png")]
        tasks[0].cancel()
        media.may_answer.set()
        found = await asyncio.gather(*tasks[1:])
        assert [[each.prepared[0] for each in one.media] for one in found] == [["a"], ["b", "a"]]
        assert tasks[0].cancelled(), "the others still wait for its preparation"
        await prepared.with_prepared(request(3, "a.png"))
        assert len(media.asked) == 3, "asked again: it may have been evicted meanwhile"

    asyncio.run(scene())


@pytest.mark.parametrize(("path", "kind"), [("c.png", MediaUnusable), ("broken", WorkerFailed)])
def test_a_fault_is_every_waiting_requests_own(path: str, kind: type[Exception]) -> None:
    async def scene() -> None:
        media = Media()
        media.may_answer.set()
        prepared = PreparedRequests(media.prepare, Path())
        tasks = [prepared.with_prepared(request(number, "a.png", path)) for number in range(3)]
        assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {kind}
        assert (await prepared.with_prepared(request(5, "a.png"))).media[0].prepared == DIGESTS["a.png"]

    asyncio.run(scene())


def test_an_engine_gets_prepared_pictures_and_never_a_faulty_one() -> None:
    async def scene() -> None:
        media = Media()
        media.may_answer.set()
        engines = Engines(lambda _, sample: completion(sample, [3]))
        local = LocalEngines(engines, config(1, 1, 0, 0))  # type: ignore[arg-type]
        engines.completed = local.completed
        local.prepare_with(PreparedRequests(media.prepare, Path()))
        await local.add("engine", ROLLOUT, Slab(0, 0, (0,)), 1)
        assert (await local.complete(ROLLOUT, request(0, "a.png"))).finish_reason == "stop"
        refused = await local.complete(ROLLOUT, request(1, "c.png"))
        assert (refused.finish_reason, refused.error) == (m.MEDIA_FAULT, "c.png is truncated.")
        await local.complete(ROLLOUT, request(2))
        assert len(media.asked) == 2, "text asks nobody"
        sent = [body.media for _, body, _ in engines.sent if isinstance(body, m.SampleRequest)]
        assert [[each.prepared for each in one] for one in sent] == [[DIGESTS["a.png"]], []]

    asyncio.run(scene())


def test_more_faulty_pictures_than_a_twentieth_of_the_groups_end_the_run_with_the_first_places() -> None:
    drops = Drops()
    for target, most in ((8, 1), (100, 5)):
        drops.begin_iteration()
        for number in range(most):
            drops.reason = f"row {number}: x{number}.png is truncated."
            drops.media_fault(target)
        drops.reason = "row 9: the last one"
        with pytest.raises(ConfigError) as found:
            drops.media_fault(target)
        assert f"{most + 1} of about {target} groups have pictures" in str(found.value)
        assert "\n  row 0: x0.png is truncated." in str(found.value)
        assert str(found.value).count("\n") <= 3


def test_a_request_that_is_aborted_while_its_pictures_are_prepared_ends_at_once() -> None:
    async def scene() -> None:
        media = Media()
        engines = Engines(lambda _, sample: completion(sample, [3]))
        local = LocalEngines(engines, config(1, 1, 0, 0))  # type: ignore[arg-type]
        engines.completed = local.completed
        local.prepare_with(PreparedRequests(media.prepare, Path()))
        await local.add("engine", ROLLOUT, Slab(0, 0, (0,)), 1)
        waiting = asyncio.ensure_future(local.complete(ROLLOUT, request(0, "broken")))
        await turns()
        await local.abort(ROLLOUT, "node0")
        assert (await waiting).finish_reason == "abort"
        media.may_answer.set()
        await turns()
        assert not [body for _, body, _ in engines.sent if isinstance(body, m.SampleRequest)]
        assert (await local.complete(ROLLOUT, request(1, "a.png"))).finish_reason == "stop"

    asyncio.run(scene())


def write_prepared(folder: Path, digest: str, data: bytes) -> None:
    head = media_head(digest, MediaShape((1, 1, len(data)), 1))
    (folder / digest).write_bytes(head + data)


def test_a_file_that_is_evicted_before_it_is_opened_is_made_again(tmp_path: Path) -> None:
    refs = [m.MediaRef(path, "ff" * 32, 64, 64) for path in ("a.png", "b.png")]

    async def scene() -> None:
        media = Media()
        media.may_answer.set()
        prepared = PreparedRequests(media.prepare, tmp_path)
        write_prepared(tmp_path, DIGESTS["b.png"], b"second")
        (tmp_path / DIGESTS["a.png"]).write_bytes(b"torn")

        async def prepare(items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
            if len(media.asked) > 3:
                write_prepared(tmp_path, DIGESTS["a.png"], b"first one")
            return await media.prepare(items)

        prepared._prepare = prepare
        files = await prepared.opened_files(refs, "judge")
        for digest in DIGESTS.values():
            (tmp_path / digest).unlink()
        assert [bytes(file) for file in files] == [b"first one", b"second"], "mapped, so they can be read"
        assert set(media.asked) == {m.MediaItem(ref.path, ref.sha256, (0, 0, 0), "judge") for ref in refs}
        with pytest.raises(
            WorkerFailed, match=r"pictures for GenRM 'judge' cannot be read \(10 tries\).*media.cache_bytes"
        ):
            await PreparedRequests(media.prepare, tmp_path).opened_files(refs, "judge")
        with pytest.raises(MediaUnusable, match=r"c\.png is truncated"):
            await prepared.opened_files([m.MediaRef("c.png", "ff" * 32, 8, 8)], "judge")

    asyncio.run(scene())


def test_pictures_of_a_question_are_asked_for_once_each_and_in_orders_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake: one order with all of them is refused, or ends the controller, if they are many."""
    monkeypatch.setattr(prepared_requests, "MOST_ITEMS", 1)
    refs = [m.MediaRef(path, "ff" * 32, 64, 64) for path in ("a.png", "b.png", "a.png", "a.png")]
    for path, digest in DIGESTS.items():
        write_prepared(tmp_path, digest, path.encode())

    async def scene() -> None:
        media = Media()
        media.may_answer.set()
        files = await PreparedRequests(media.prepare, tmp_path).opened_files(refs, "judge")
        assert [bytes(file) for file in files] == [ref.path.encode() for ref in refs]
        assert [item.path for item in media.asked] == ["a.png", "b.png"] and media.orders == 2

    asyncio.run(scene())
