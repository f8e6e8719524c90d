"""The early word that a controller counts no more."""

import asyncio

import pytest

from tests.runs import HANG_S
from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.control.membership import newer_attempt
from yatt.control.membership.newer_attempt import watch_newer_attempt
from yatt.errors import StaleAttempt, WorkerFailed
from yatt.paths import RunPaths

PERIOD_S = 0.01


async def watched(paths: RunPaths, attempt: int, then) -> None:
    """Watch; after a first look do `then`, and wait for the word."""
    watching = asyncio.create_task(watch_newer_attempt(paths, attempt, 1, period_s=PERIOD_S))
    await asyncio.sleep(5 * PERIOD_S)
    assert not watching.done()
    await then(watching)
    async with asyncio.timeout(HANG_S):
        await watching


def test_a_ghost_hears_of_its_heir(tmp_path):
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)

    async def heir(_watching):
        claim_attempt(paths)

    with pytest.raises(StaleAttempt, match="attempt 2 was claimed"):
        asyncio.run(watched(paths, mine, heir))


def test_a_node_declared_lost_hears_of_it(tmp_path):
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)

    async def lost(_watching):
        paths.lost(mine, 1).parent.mkdir(parents=True)
        write_atomically(
            paths.lost(mine, 1), sealed_record({"why": "was not heard of for 10 s", "life": 1}, mine)
        )

    with pytest.raises(WorkerFailed, match="continues without this node: it was not heard of"):
        asyncio.run(watched(paths, mine, lost))


def test_the_loss_of_a_former_life_is_not_one_of_the_next(tmp_path):
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)
    paths.lost(mine, 1).parent.mkdir(parents=True)

    async def watched_as(life):
        async with asyncio.timeout(20 * PERIOD_S):
            await watch_newer_attempt(paths, mine, 1, life, PERIOD_S)

    write_atomically(
        paths.lost(mine, 1), sealed_record({"why": "was started again", "life": 1, "joined": 2}, mine)
    )
    with pytest.raises(TimeoutError):
        asyncio.run(watched_as(2))
    with pytest.raises(WorkerFailed, match="continues without this node"):
        asyncio.run(watched_as(1))


def test_a_folder_that_cannot_be_read_for_a_while_ends_nobody(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)

    async def stale(watching):
        """The mark of a loss is a folder: reading it fails with EISDIR."""
        paths.lost(mine, 1).mkdir(parents=True)
        async with asyncio.timeout(HANG_S):
            while "cannot be read" not in caplog.text:
                await asyncio.sleep(PERIOD_S)
        assert not watching.done()
        paths.lost(mine, 1).rmdir()
        claim_attempt(paths)

    with pytest.raises(StaleAttempt):
        asyncio.run(watched(paths, mine, stale))


def test_a_look_at_the_folder_that_fails_ends_nobody(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    looks = []

    def stale(path):
        looks.append(path)
        raise OSError(116, "Stale file handle")

    async def play():
        monkeypatch.setattr("pathlib.Path.is_dir", stale)
        watch = asyncio.ensure_future(watch_newer_attempt(paths, attempt, 0, period_s=0.01))
        async with asyncio.timeout(HANG_S):
            while len(looks) <= 5:
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()

    asyncio.run(play())


def test_while_the_leader_is_heard_of_a_node_of_a_large_run_looks_seldom(tmp_path, monkeypatch):
    """And at once when it is not."""
    monkeypatch.setattr(newer_attempt, "STEADY_S", HANG_S)
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)
    looks, steady = [], [True]
    monkeypatch.setattr(newer_attempt, "check_newest", lambda *_: looks.append(1))

    async def watch() -> None:
        watching = asyncio.create_task(
            watch_newer_attempt(paths, mine, 1, period_s=PERIOD_S, is_steady=lambda: steady[0])
        )
        await asyncio.sleep(20 * PERIOD_S)
        assert len(looks) == 1
        steady[0] = False
        async with asyncio.timeout(HANG_S):
            while len(looks) < 3:
                await asyncio.sleep(PERIOD_S)
        watching.cancel()

    asyncio.run(watch())


@pytest.mark.parametrize(
    ("node", "num_nodes", "silence_s", "may"),
    [(5, 512, 1.0, True), (5, 512, 4.0, False), (5, 8, 1.0, False), (0, 512, 0.0, False)],
)
def test_a_check_may_wait_on_nodes_of_a_large_run_that_hear_of_the_leader(node, num_nodes, silence_s, may):
    assert newer_attempt.may_wait(node, num_nodes, lambda: silence_s) is may
