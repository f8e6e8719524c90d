"""A real uploader process: orders that overlap, a host copy that changes, a store that fails, its end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.host_copies import BYTES, FILES, PIECES, Trainer, versions_in
from tests.worker_process import ATTEMPT, WorkerServer, worker_with_server, write_run
from yatt.adapters.host_segment import AREAS
from yatt.checkpoint.store import FolderStore
from yatt.records import message as m

SLOW = {"checkpoint": {"max_bytes_per_s": 3 * BYTES}}
"""Each save takes two seconds."""


def play(run: Path, scene: Callable[[WorkerServer], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with worker_with_server(run, "yatt.uploader") as server:
            await scene(server)

    asyncio.run(whole())


def upload(trainer: Trainer, prefix: str, iteration: int = 1) -> m.Upload:
    return m.Upload(iteration=iteration, url=prefix, stems=(str(trainer.stem),))


def test_a_save_is_uploaded_though_the_host_copy_changes_in_the_middle(tmp_path: Path) -> None:
    run, trainer = write_run(tmp_path, SLOW), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene(server: WorkerServer) -> None:
        uploading = asyncio.ensure_future(server.order(upload(trainer, "p/one")))
        await asyncio.sleep(0.5)
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


def test_a_new_upload_ends_the_one_that_nobody_waits_for(tmp_path: Path) -> None:
    run, trainer = write_run(tmp_path, SLOW), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene(server: WorkerServer) -> None:
        first = asyncio.ensure_future(server.order(upload(trainer, "p/one")))
        await asyncio.sleep(0.3)
        second = await server.order(upload(trainer, "p/two"))
        assert isinstance(second, m.Uploaded), second
        assert {file.path.rpartition("/")[0] for file in second.files} == {"p/two"}
        ended = await first
        assert isinstance(ended, m.Failed) and "cancelled" in ended.error

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
