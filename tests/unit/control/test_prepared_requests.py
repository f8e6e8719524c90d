"""Pictures of requests: prepared before an engine gets them, once for those that ask at the same time."""

import asyncio
from pathlib import Path

import pytest

from tests.runs import turns
from tests.unit.control.engine_stand_in import Engines, completion
from tests.unit.core.test_placement import config
from yatt.adapters.node_local.media_file import MediaShape, is_held, media_head, release_prepared
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
    """In place of the media process: answers when it is let; other paths are faults.

    Args:
        folder: where it writes files; None: they are there, or evicted at once.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
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
                if self.folder is not None:
                    write_prepared(self.folder, DIGESTS[item.path], b"patches")
            else:
                faults.append(m.MediaFault(number, f"{item.path} is truncated."))
        return m.MediaPrepared(items=tuple(made), faults=tuple(faults))


def test_requests_that_ask_at_the_same_time_share_a_preparation(tmp_path: Path) -> None:
    async def scene() -> None:
        media = Media(tmp_path)
        prepared = PreparedRequests(media.prepare, tmp_path)
        asked = [request(0, "a.png"), request(1, "a.png"), request(2, "b.png", "a.png")]
        tasks = [asyncio.ensure_future(prepared.with_prepared(each, each.request_id)) for each in asked]
        await turns()
        assert media.asked == [m.MediaItem(p, "ff" * 32, GRID) for p in ("a.png", "b.png")]
        tasks[0].cancel()
        media.may_answer.set()
        found = await asyncio.gather(*tasks[1:])
        assert [[each.prepared[0] for each in one.media] for one in found] == [["a"], ["b", "a"]]
        assert tasks[0].cancelled(), "the others still wait for its preparation"
        await prepared.with_prepared(request(3, "a.png"), "3")
        assert len(media.asked) == 3, "asked again: it may have been evicted meanwhile"

    asyncio.run(scene())


@pytest.mark.parametrize(("path", "kind"), [("c.png", MediaUnusable), ("broken", WorkerFailed)])
def test_a_fault_is_every_waiting_requests_own(path: str, kind: type[Exception], tmp_path: Path) -> None:
    async def scene() -> None:
        media = Media(tmp_path)
        media.may_answer.set()
        prepared = PreparedRequests(media.prepare, tmp_path)
        tasks = [prepared.with_prepared(request(number, "a.png", path), str(number)) for number in range(3)]
        assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {kind}
        assert (await prepared.with_prepared(request(5, "a.png"), "5")).media[0].prepared == DIGESTS["a.png"]

    asyncio.run(scene())


def test_an_engine_gets_prepared_pictures_and_never_a_faulty_one(tmp_path: Path) -> None:
    async def scene() -> None:
        media = Media(tmp_path)
        media.may_answer.set()
        engines = Engines(lambda _, sample: completion(sample, [3]))
        local = LocalEngines(engines, config(1, 1, 0, 0))  # type: ignore[arg-type]
        engines.completed = local.completed
        local.prepare_with(PreparedRequests(media.prepare, tmp_path))
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
        drops.begin_iteration(target)
        for number in range(most):
            drops.media_fault(target, [f"row {number}: x{number}.png is truncated."], target)
        drops.media_fault(target + 1, ["row 8: of the next iteration, sampled meanwhile"], target)
        drops.begin_iteration(target + 1)
        with pytest.raises(ConfigError) as found:
            drops.media_fault(target, ["row 9: the last one"], target)
        assert f"{most + 1} of about {target} groups have pictures" in str(found.value)
        assert "\n  row 0: x0.png is truncated." in str(found.value)
        assert str(found.value).count("\n") <= 3 and "row 8" not in str(found.value)
        drops.begin_iteration(target + 2)
        drops.media_fault(target, ["row 9: all before it are forgotten"], target)


def test_a_request_that_is_aborted_while_its_pictures_are_prepared_ends_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        media = Media(tmp_path)
        engines = Engines(lambda _, sample: completion(sample, [3]))
        local = LocalEngines(engines, config(1, 1, 0, 0))  # type: ignore[arg-type]
        engines.completed = local.completed
        local.prepare_with(PreparedRequests(media.prepare, tmp_path))
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


def held(folder: Path) -> int:
    return len([*folder.glob("*.held")])


def test_files_are_held_until_the_engine_has_opened_them_or_the_request_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        media = Media(tmp_path)
        media.may_answer.set()
        engines = Engines(lambda *_: None)  # it completes nothing, and opens nothing
        local = LocalEngines(engines, config(1, 1, 0, 0))  # type: ignore[arg-type]
        local.prepare_with(PreparedRequests(media.prepare, tmp_path))
        await local.add("engine", ROLLOUT, Slab(0, 0, (0,)), 1)
        tasks = [
            asyncio.ensure_future(local.complete(ROLLOUT, request(number, "a.png", "b.png")))
            for number in range(4)
        ]
        await turns()
        sent = [body for _, body, _ in engines.sent if isinstance(body, m.SampleRequest)]
        assert len(sent) == 4 and held(tmp_path) == 8
        assert all(is_held(tmp_path, digest) for digest in DIGESTS.values())
        release_prepared(tmp_path, 2, sent[0].request_id)  # the engine has opened them
        assert held(tmp_path) == 6
        local.completed("engine", completion(sent[1], [3]))
        tasks[2].cancel()
        await turns()
        assert held(tmp_path) == 2, "a request that ended, and one that nobody awaits"
        local.drain("engine")
        local.remove("engine", "sleeps")
        await turns()
        assert held(tmp_path) == 0 and not any(is_held(tmp_path, digest) for digest in DIGESTS.values())
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scene())


def test_files_that_are_evicted_before_they_are_held_are_made_again_together(tmp_path: Path) -> None:
    """A planted mistake: a request that holds a part while it waits for the rest can stop all others."""

    async def scene() -> None:
        media = Media(tmp_path)
        media.may_answer.set()

        async def prepare(items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
            answer = await media.prepare(items)
            if len(items) == 1:  # each order evicts the files of the one before it
                for digest in {*DIGESTS.values()} - {each.digest for each in answer.items}:
                    (tmp_path / digest).unlink(missing_ok=True)
            else:
                assert held(tmp_path) == 0, "it waits without holding any"
            return answer

        prepared = PreparedRequests(prepare, tmp_path)
        await prepared.with_prepared(request(1, "a.png", "b.png"), "1")
        assert held(tmp_path) == 2 and media.orders == 3
        prepared.release(request(1, "a.png", "b.png"), "1")
        evicted = Media()
        evicted.may_answer.set()
        nothing = PreparedRequests(evicted.prepare, tmp_path / "nothing")
        with pytest.raises(WorkerFailed, match=r"vanished 10 times .* raise media\.cache_bytes"):
            await nothing.with_prepared(request(2, "a.png"), "2")

    asyncio.run(scene())
