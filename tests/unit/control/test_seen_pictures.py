"""Pictures of an update: shown in windows, again where a file vanished, and who needs one that is bad."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from yatt.control.gpus.processes.worker_plan import TRAINER, Worker
from yatt.control.gpus.seen_pictures import PATCH_BYTES, TRIES, SeenPictures, pictures_of, windows_of
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.media import VideoFacts

GRID = (1, 4, 4)


def placed(name: str) -> m.PlacedMedia:
    return m.PlacedMedia(m.MediaRef(name, name, 64, 64), 0, 4, GRID)


def sample(number: int, *names: str) -> m.Rollout:
    media = tuple(map(placed, names))
    return m.Rollout(
        sample_id=number, turns=(m.Turn(m.pack_ids([0] * 9), media=media[:1]), m.Turn(b"", media=media[1:]))
    )


class Scene:
    """In place of a media process and a rank: files vanish as `lost` says, before they are read."""

    def __init__(self, lost: Callable[[str, int], bool] = lambda _name, _time: False) -> None:
        self.lost, self.times, self.asked = lost, Counter[str](), list[list[str]]()
        self.seen = list[str]()

    async def prepare(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        self.asked.append([item.path for item in items])
        found = [(i, item) for i, item in enumerate(items) if not item.path.startswith("bad")]
        faults = tuple(
            m.MediaFault(i, f"{item.path} is truncated.", waits=item.path == "bad later")
            for i, item in enumerate(items) if item.path.startswith("bad")
        )  # fmt: skip
        return m.MediaPrepared(
            items=tuple(m.PreparedItem(i, f"of {item.sha256}", GRID) for i, item in reversed(found)),
            faults=faults,
        )

    async def order(self, _: Worker, order: m.SeePictures) -> m.PicturesSeen:
        assert (order.iteration, order.folder) == (3, "folder")
        missing = []
        for index, each in enumerate(order.pictures):
            assert each.digest == f"of {each.sha256}"
            self.times[each.sha256] += 1
            if self.lost(each.sha256, self.times[each.sha256]):
                missing.append(index)
            else:
                self.seen.append(each.sha256)
        return m.PicturesSeen(missing=tuple(missing))

    def show(self, *rollouts: m.Rollout, cache_bytes: int = 0) -> dict[int, str]:
        async def scene() -> dict[int, str]:
            pictures = SeenPictures(self.prepare, self.order, "folder", cache_bytes)
            return await pictures.show(Worker("rank", TRAINER, None, (), ()), 3, rollouts)

        return asyncio.run(scene())


def test_each_picture_is_shown_once_in_windows_that_fit() -> None:
    scene = Scene()
    room = 4 * 2 * 16 * PATCH_BYTES  # a quarter of it: two pictures
    scene.show(sample(0, "a", "b"), sample(1), sample(2, "b", "c", "a"), cache_bytes=room)
    assert scene.asked == [["a", "b"], ["c"]]
    assert sorted(scene.seen) == ["a", "b", "c"]
    assert [*windows_of(pictures_of([sample(0, "a", "b")]), 1)] == [
        *windows_of(pictures_of([sample(0, "a"), sample(1, "b")]), 1)
    ]
    Scene().show(sample(0))


def test_a_file_that_vanished_is_prepared_again() -> None:
    scene = Scene(lambda name, time: name == "b" and time < TRIES)
    assert scene.show(sample(0, "a", "b", "c")) == {}
    assert scene.asked == [["a", "b", "c"], *[["b"]] * (TRIES - 1)]
    assert sorted(scene.seen) == ["a", "b", "c"]
    slow = Scene(lambda name, time: time <= int(name))  # one more is read each time: no end of tries
    assert slow.show(sample(0, *map(str, range(2 * TRIES)))) == {}
    assert [len(asked) for asked in slow.asked] == [*range(2 * TRIES, 0, -1)]
    with pytest.raises(WorkerFailed, match=f"1 pictures vanished {TRIES} times"):
        Scene(lambda name, _: name == "b").show(sample(0, "a", "b"))


def test_a_picture_that_cannot_be_used_any_more_costs_the_samples_that_need_it() -> None:
    scene, says = Scene(lambda name, time: name == "b" and time == 1), "bad is truncated."
    samples = (
        sample(4, "a", "bad"),
        sample(5, "b"),
        sample(6),
        sample(7, "bad", "bad too"),
        sample(8, "bad too"),
    )
    assert scene.show(*samples) == {4: says, 7: says, 8: "bad too is truncated."}
    assert sorted(scene.seen) == ["a", "b"], "the others are seen, also those that vanished meanwhile"
    alone = Scene()
    assert alone.show(sample(3, "bad")) == {3: says}
    assert alone.seen == []


def test_a_picture_that_cannot_be_read_now_costs_no_sample() -> None:
    with pytest.raises(WorkerFailed, match="that are to be trained on: bad later is truncated"):
        Scene().show(sample(0, "a", "bad later"))


def test_a_video_is_prepared_once_as_long_as_all_its_pairs() -> None:
    film = m.MediaRef("film", "film", 64, 64, 40, 8.0)
    pairs = tuple(m.PlacedMedia(film, 9 * part, 4, GRID, part=part, num_parts=3) for part in range(3))
    rollout = m.Rollout(sample_id=0, turns=(m.Turn(m.pack_ids([0] * 30), media=(placed("a"), *pairs)),))
    picture, video = pictures_of([rollout, rollout])
    assert (picture.grid, picture.is_video) == (GRID, False)
    assert (video.grid, video.video) == ((3, 4, 4), VideoFacts(40, 8.0, 64, 64))
    assert [len(window) for window in windows_of([picture, video], 64)] == [2]
    assert [len(window) for window in windows_of([picture, video], 63)] == [1, 1]
