"""A real uploader process: orders that overlap, a host copy that changes, a store that fails, its end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.conftest import BUCKET
from tests.host_copies import BYTES, FILES, PIECES, Trainer, versions_in
from tests.runs import until
from tests.store_proxy import Fault, StoreProxy
from tests.worker_process import ATTEMPT, WorkerServer, worker_with_server, write_run
from yatt.adapters.node_local.host_segment import AREAS
from yatt.checkpoint.commit.pieces import checksum
from yatt.checkpoint.local.local_tier import LocalTier
from yatt.checkpoint.store.store import FolderStore, open_store
from yatt.records import message as m

SLOW = {"checkpoint": {"max_bytes_per_s": BYTES}}
"""Each save takes five seconds."""


def play(run: Path, scene: Callable[[WorkerServer], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with worker_with_server(run, "yatt.uploader") as server:
            await scene(server)

    asyncio.run(whole())


def upload(trainer: Trainer, prefix: str, iteration: int = 1) -> m.Upload:
    return m.Upload(iteration=iteration, url=prefix, stems=(str(trainer.stem),))


async def begun(run: Path) -> None:
    """Returns once a file of a save is being written."""
    store = run / "checkpoints"
    await until(lambda: any(path.is_file() for path in store.rglob("*")), "an upload")


def test_a_save_is_uploaded_though_the_host_copy_changes_in_the_middle(tmp_path: Path) -> None:
    run, trainer = write_run(tmp_path, SLOW), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene(server: WorkerServer) -> None:
        uploading = asyncio.ensure_future(server.order(upload(trainer, "p/one")))
        await begun(run)
        copied = await server.order(m.Detach(areas=AREAS))
        assert isinstance(copied, m.Detached) and 0 < copied.size_bytes <= FILES * PIECES * BYTES
        trainer.becomes(2)
        uploaded = await uploading
        assert isinstance(uploaded, m.Uploaded), uploaded
        assert versions_in(FolderStore(run / "checkpoints"), uploaded.files) == {1}
        assert await server.order(m.Detach(areas=AREAS)) == m.Detached(size_bytes=0), (
            "nothing is uploaded now"
        )
        stale = await server.order(upload(trainer, "p/two"))
        assert isinstance(stale, m.Failed) and "version 1 of attempt 3 was asked for" in stale.error
        assert await server.order(m.Stop()) == m.Done()
        assert await server.ended() == 0

    play(run, scene)


def test_a_node_keeps_to_its_share_of_the_runs_limit(tmp_path: Path) -> None:
    limits = {"launch": {"nodes": 2}, "checkpoint": {"max_run_bytes_per_s": 6 * BYTES}}
    run, trainer = write_run(tmp_path, limits), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene(server: WorkerServer) -> None:
        began_s = time.monotonic()
        assert isinstance(await server.order(upload(trainer, "p/one")), m.Uploaded)
        assert time.monotonic() - began_s > 1.5, "six pieces at three per second, the first one at once"

    play(run, scene)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_new_upload_ends_the_one_that_nobody_waits_for(tmp_path: Path, is_local: bool) -> None:
    run = write_run(tmp_path, with_local_tier(tmp_path, **SLOW["checkpoint"]))
    trainer, prefix = Trainer(tmp_path, attempt=ATTEMPT), "global_step_1/000003-bbbbbbbb"

    async def scene(server: WorkerServer) -> None:
        first = asyncio.ensure_future(server.order(upload(trainer, "global_step_1/000003-aaaaaaaa")))
        await begun(run)
        order = m.Upload(iteration=1, url=prefix, stems=(str(trainer.stem),), is_local=is_local)
        second = await server.order(order)
        assert isinstance(second, m.Uploaded), second
        assert {file.path.rpartition("/")[0] for file in second.files} == {prefix}
        ended = await first
        assert isinstance(ended, m.Failed) and "cancelled" in ended.error

    play(run, scene)


def with_local_tier(folder: Path, **checkpoint: object) -> dict[str, object]:
    (folder / "disk").mkdir()
    return {"run": {"id": "r1"}, "checkpoint": {"local_dir": str(folder / "disk"), **checkpoint}}


def test_a_save_to_the_local_disk_does_not_wait_for_the_upload_before_it(
    tmp_path: Path, s3_endpoint: str
) -> None:
    prefix = "global_step_1/000003-bbbbbbbb"
    writes = "Create.*|PutObject|UploadPart"
    with StoreProxy(s3_endpoint, faults=[Fault("hang", writes, times=10**6)]) as proxy:
        url = f"s3://{BUCKET}/{tmp_path.name}"
        options = {"endpoint_url": proxy.endpoint}
        run = write_run(tmp_path, with_local_tier(tmp_path, url=url, storage_options=options))
        trainer = Trainer(tmp_path, attempt=ATTEMPT)

        async def scene(server: WorkerServer) -> None:
            slow = asyncio.ensure_future(server.order(upload(trainer, "global_step_1/000003-aaaaaaaa")))
            await until(lambda: proxy.count(writes, "hang"), "a request that the store does not answer")
            order = m.Upload(iteration=1, url=prefix, stems=(str(trainer.stem),), is_local=True)
            kept = await server.order(order)
            assert isinstance(kept, m.Uploaded) and not slow.done(), kept
            tier = LocalTier(next((tmp_path / "disk").glob("yatt-ckpt-*/r1")))
            for file in kept.files:
                data = (tier.root / file.path).read_bytes()
                assert (len(data), checksum(data)) == (file.size_bytes, file.checksum)
            assert {file.path.rpartition("/")[0] for file in kept.files} == {prefix}
            assert not open_store(url, {"endpoint_url": s3_endpoint}).names(prefix), "only on the disk"

        play(run, scene)


def test_the_newest_committed_save_stays_on_the_disk_and_older_ones_go(tmp_path: Path) -> None:
    run, trainer = write_run(tmp_path, with_local_tier(tmp_path)), Trainer(tmp_path, attempt=ATTEMPT)
    disk = tmp_path / "disk"

    async def scene(server: WorkerServer) -> None:
        committed = ""
        for number in range(1, 5):
            trainer.becomes(number)
            url = f"global_step_{number}/000003-aaaaaaaa"
            order = m.Upload(iteration=number, url=url, stems=(str(trainer.stem),), committed=committed)
            uploaded = await server.order(order)
            assert isinstance(uploaded, m.Uploaded) and not uploaded.local_fault, uploaded
            there = {path.parent.name for path in disk.glob("yatt-ckpt-*/r1/global_step_*/*")}
            assert there == {f"global_step_{n}" for n in (number - 1, number) if n}
            committed = url

    play(run, scene)


def test_orders_that_are_none_and_a_store_that_refuses_cost_their_answer_only(tmp_path: Path) -> None:
    run, trainer = write_run(tmp_path, {}), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene(server: WorkerServer) -> None:
        assert "is no order for an uploader" in (await server.order(m.Wake())).error
        (run / "checkpoints").write_text("a file where the folder should be")
        failed = await server.order(upload(trainer, "p/one"))
        assert isinstance(failed, m.Failed) and "checkpoints" in failed.error
        (run / "checkpoints").unlink()
        assert isinstance(await server.order(upload(trainer, "p/one")), m.Uploaded)

    play(run, scene)
