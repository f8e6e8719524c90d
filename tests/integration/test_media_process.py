"""A real media process over its real socket: hostile folders, limits, kept files, its end."""

import asyncio
import hashlib
import io
import os
import re
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.forked.lots import STARTED
from tests.pictures import encoded, good_files, hostile_files, picture, pixels
from tests.tiny_processors import write_processor
from tests.worker_process import ATTEMPT, WorkerServer, worker_with_server, write_run
from yatt.adapters.node_local.prepared_media import open_prepared
from yatt.adapters.run_folder.staged import note_copies
from yatt.config.site import StageSection
from yatt.errors import EXIT_USER_MISTAKE
from yatt.launch.node.staging import Staging
from yatt.paths import RunPaths
from yatt.records import message as m

MOST_MIB = 600


class Scene:
    """A run with a folder of pictures and one of prepared files."""

    def __init__(self, folder: Path, genrms: list[dict[str, object]] | None = None, **media: object) -> None:
        self.pictures, self.kept, self.folder = folder / "pictures", folder / "kept", folder
        self.pictures.mkdir()
        write_processor(folder)
        self.run = write_run(
            folder,
            {
                "data": {"media_root": str(self.pictures), "media_store": str(folder / "store")},
                "media": media,
                **({"genrms": genrms} if genrms else {}),
            },
        )

    def add(self, name: str, data: bytes) -> m.MediaItem:
        (self.pictures / name).write_bytes(data)
        return m.MediaItem(name, hashlib.sha256(data).hexdigest())

    def play(self, scene: Callable[[WorkerServer], Awaitable[None]]) -> str:
        """Plays a scene with the process; returns its log."""

        async def whole() -> None:
            async with worker_with_server(self.run, "yatt.media", "--media", str(self.kept)) as server:
                await scene(server)

        asyncio.run(whole())
        return (self.run / "worker.1.log").read_text()


async def prepared(server: WorkerServer, *items: m.MediaItem) -> m.MediaPrepared:
    answer = await server.order(m.PrepareMedia(items=items))
    assert isinstance(answer, m.MediaPrepared), answer
    assert sorted([*(e.index for e in answer.items), *(e.index for e in answer.faults)]) == [
        *range(len(items))
    ]
    return answer


def peak_mib(server: WorkerServer) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def plant_strange(scene: Scene) -> dict[str, str]:
    """Things that are no regular files below the root; their names, and words of the refusal."""
    (scene.folder / "secret.png").write_bytes(encoded(picture(8, 8), "PNG"))
    (scene.pictures / "out.png").symlink_to(scene.folder / "secret.png")
    (scene.pictures / "folder.png").mkdir()
    os.mkfifo(scene.pictures / "pipe.png")
    return {
        "out.png": "leads out of data.media_root", "folder.png": "is not a regular file",
        "pipe.png": "is not a regular file", "../secret.png": "is not a path below",
        str(scene.folder / "secret.png"): "is not a path below", "missing.png": "No such file",
        "https://10.0.0.1/x.png": "is not a path below", "s3://bucket/x.png": "is not a path below",
        "file:///etc/passwd": "is not a path below", "x" * 5000: "File name too long",
        "lines\n\x1b[2J.png": "No such file", "nul\0.png": "is not a path below",
    }  # fmt: skip


def test_a_folder_of_hostile_files_costs_each_file_one_sentence_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is real, and started: what files do to its memory is the subject. A whole run would show
    the same later."""
    monkeypatch.setenv(STARTED, "1")
    scene = Scene(tmp_path)
    strange = plant_strange(scene)
    hostile = [scene.add(name, data) for name, data in hostile_files().items()]
    (scene.folder / "store" / "00").mkdir(parents=True)
    good = [scene.add(name, data) for name, (data, _) in good_files().items()]
    odd = [m.MediaItem(path, "") for path in strange]
    wrong = [
        m.MediaItem(good[0].path, "0" * 64),
        m.MediaItem(good[0].path, "not hex"),
        m.MediaItem("", "1" * 64),
    ]

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, *hostile, *odd, *wrong, *good)
        faults = {fault.index: fault for fault in answer.faults}
        bad = [*hostile, *odd, *wrong]
        assert len(bad) >= 30 and sorted(faults) == [*range(len(bad))]
        for index, item in enumerate(bad):
            fault = faults[index]
            name = fault.error.split(" ")[0]
            assert item.path[:20].isprintable() is False or name.startswith(item.path[:20]), fault.error
            assert fault.error.isprintable() and len(fault.error) < 400 and not fault.waits, fault
        for item, fault in zip(odd, list(faults.values())[len(hostile) :], strict=False):
            assert strange[item.path] in fault.error
        for found, (_, (width, height)) in zip(answer.items, good_files().values(), strict=True):
            media = open_prepared(scene.kept, found.digest)
            assert media.grid == found.grid and (media.grid[1] > media.grid[2]) == (height > width)
        assert peak_mib(server) <= MOST_MIB
        assert isinstance(await server.order(m.Stop()), m.Done) and await server.ended() == 0

    log = scene.play(play)
    assert "Traceback" not in log and "\x1b" not in log


def test_pictures_come_from_the_copy_on_the_nodes_disk_if_it_has_exactly_them(tmp_path: Path) -> None:
    """What a copy lacks, or a disk has changed, comes from its original place; no link leads out by it."""
    scene, said = Scene(tmp_path), list[str]()
    names = ("gone.png", ".hidden.png", "changed.png", "later.png")
    items = {name: scene.add(name, encoded(picture(96, 64, seed), "PNG")) for seed, name in enumerate(names)}
    (scene.pictures / "inside.png").symlink_to("changed.png")
    items["inside.png"] = m.MediaItem("inside.png", items["changed.png"].sha256)
    strange = plant_strange(scene)
    secret = hashlib.sha256((tmp_path / "secret.png").read_bytes()).hexdigest()
    (scene.pictures / "above").symlink_to("..")
    (scene.pictures / "later.png").rename(tmp_path / "later.png")
    stage = StageSection(folder=str(tmp_path / "disk"), what=("media",))
    (tmp_path / "disk").mkdir()
    staging = Staging(stage, {}, said.append, lambda: False)
    copies = staging.run((), [str(scene.pictures)])
    copy = Path(copies[str(scene.pictures)])
    assert said == []
    assert {path.name for path in copy.iterdir()} == {"gone.png", ".hidden.png", "changed.png"}
    damaged = bytearray((copy / "changed.png").read_bytes())
    damaged[-20] ^= 1
    (copy / "changed.png").write_bytes(damaged)
    (copy / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "later.png").rename(scene.pictures / "later.png")
    for name in ("gone.png", ".hidden.png"):
        (scene.pictures / name).unlink()
    note_copies(RunPaths(scene.run), ATTEMPT, 0, copies)
    bad = [m.MediaItem(name, secret) for name in strange if name.startswith("out")]
    bad += [m.MediaItem("above/secret.png", secret), m.MediaItem("gone.png"), m.MediaItem("gone.png", secret)]

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, *items.values(), *bad)
        faults = [fault.error for fault in answer.faults]
        assert [item.index for item in answer.items] == [*range(len(items))], faults
        assert all("leads out of data.media_root" in says for says in faults[:2]), faults
        assert all("gone.png cannot be read: No such file" in says for says in faults[2:]), faults

    scene.play(play)
    staging.close()


def test_pictures_are_prepared_once_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    data = encoded(picture(96, 64), "PNG")
    item = scene.add("one.png", data)
    unnamed, grid = m.MediaItem("one.png"), m.MediaItem("one.png", item.sha256, (1, 4, 6))
    other = m.MediaItem("one.png", item.sha256, (1, 4, 4))

    async def first(server: WorkerServer) -> None:
        answer = await prepared(server, item, item, unnamed, grid, other)
        assert len({each.digest for each in answer.items}) == 1 and {e.grid for e in answer.items} == {
            (1, 4, 6)
        }
        (fault,) = answer.faults
        assert fault.index == 4 and "1 x 4 x 6 patches, but its prompt was made for 1 x 4 x 4" in fault.error
        assert len(list(scene.kept.iterdir())) == 1
        patches = open_prepared(scene.kept, answer.items[0].digest).patches
        pixel = pixels(96, 64)  # 64 x 96 is a multiple of 32, so nothing is resized
        assert np.array_equal(patches[0].reshape(3, 16, 16), pixel[:16, :16].transpose(2, 0, 1))
        (scene.pictures / "one.png").unlink()
        lost = m.MediaItem("lost.png", "1" * 64), m.MediaItem("", "1" * 64)
        for fault in (await prepared(server, *lost)).faults:
            assert fault.waits and "is empty or missing; mount its filesystem" in fault.error
        (scene.pictures / "another.png").touch()
        (gone,) = (await prepared(server, lost[0])).faults
        assert not gone.waits and "lost.png cannot be read: No such file" in gone.error
        server.process.kill()

    async def second(server: WorkerServer) -> None:
        assert (await prepared(server, item)).items, "its file is kept, so the picture is not read"

    scene.play(first)
    scene.play(second)


def test_a_picture_is_encoded_for_a_judge_behind_a_url_beside_the_models_patches(tmp_path: Path) -> None:
    sizes = {"most_pixels": 48 * 32, "most_bytes": 2048}
    far = {"name": "far", "model": "m", "sees": "prompt", "api": {"url": "http://127.0.0.1:9/v1", **sizes},
           "template": "{completion}", "verdict": {"pattern": "([0-9])"}}  # fmt: skip
    scene = Scene(tmp_path, [far])
    item = scene.add("one.png", encoded(picture(96, 64), "PNG"))
    shown = msgspec.structs.replace(item, genrm="far")
    broken = msgspec.structs.replace(scene.add("cut.png", hostile_files()["cut.png"]), genrm="far")

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, item, shown, broken, shown)
        (fault,) = answer.faults
        assert fault.index == 2 and "damaged or truncated" in fault.error
        patches, file, again = answer.items
        assert file.digest == again.digest != patches.digest
        media = open_prepared(scene.kept, file.digest)
        assert media.grid == file.grid == (1, 1, len(media.patches)) and len(media.patches) <= 2048
        found = Image.open(io.BytesIO(media.patches.tobytes()))
        assert (found.format, found.size) == ("JPEG", (48, 32))
        assert np.abs(np.asarray(found).astype(int) - pixels(48, 32)).mean() < 4

    scene.play(play)


def test_a_file_that_the_run_has_made_is_read_from_its_folder(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    data = encoded(picture(64, 64), "PNG")
    digest = hashlib.sha256(data).hexdigest()
    for name in (digest, "2" * 64):
        (tmp_path / "store" / name[:2]).mkdir(parents=True)
    (tmp_path / "store" / digest[:2] / digest).write_bytes(data)
    (tmp_path / "store" / "22" / ("2" * 64)).symlink_to("/etc/passwd")

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, m.MediaItem("", digest), m.MediaItem("", "2" * 64), m.MediaItem(""))
        assert [each.index for each in answer.items] == [0]
        assert (
            "leads out" in answer.faults[0].error and "neither a path nor a digest" in answer.faults[1].error
        )

    scene.play(play)


def test_a_full_memory_filesystem_lowers_the_limit_and_is_then_a_fault(tmp_path: Path) -> None:
    scene = Scene(tmp_path, cache_bytes=1 << 30)
    scene.kept.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", scene.kept], check=True)
    items = [scene.add(f"{n}.png", encoded(picture(256, 256, n), "PNG")) for n in range(9)]  # 192 KiB each

    async def play(server: WorkerServer) -> None:
        for item in items[:7]:
            answer = await prepared(server, item)
            assert answer.items, answer.faults
        assert answer.cache_bytes < 1 << 20, "lowered"
        assert 3 <= len(list(scene.kept.iterdir())) <= 5
        answer = await prepared(server, *items)
        assert answer.items and answer.faults
        for fault in answer.faults:
            assert fault.waits or re.search("memory filesystem of .* is full", fault.error)
        answer = await prepared(server, items[8])
        assert answer.items, "the next order is served"

    try:
        scene.play(play)
    finally:
        subprocess.run(["umount", "-l", scene.kept], check=True)


def test_a_picture_over_its_time_is_given_up_and_a_process_with_many_of_them_ends(tmp_path: Path) -> None:
    """The time is so short that no picture can be made in it: what is given up goes on in its thread."""
    scene = Scene(tmp_path, timeout_s=0.001)
    items = [scene.add(f"{n}.png", encoded(picture(1200, 1200, n), "PNG")) for n in range(6)]

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, *items)
        assert len(answer.faults) == 6 and all(
            "within 0.001 s (media.timeout_s)" in f.error for f in answer.faults
        )
        assert await server.ended() == 1

    assert "Traceback" not in scene.play(play)


def test_a_model_without_a_processor_is_the_users_mistake(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()

    async def play(_: WorkerServer) -> None:
        raise AssertionError("it says no Hello")

    with pytest.raises(AssertionError, match="has no picture processor that can be used") as found:
        scene.play(play)
    assert f"exit_code={EXIT_USER_MISTAKE}" in str(found.value)
