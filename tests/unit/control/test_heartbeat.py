"""The leader's heartbeat in the shared folder."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs import HANG_S
from yatt.adapters.files import files
from yatt.adapters.files.files import read_or_none, record_in
from yatt.control.membership import deadman
from yatt.control.membership.deadman import QUIET_S, write_heartbeat
from yatt.paths import RunPaths

ATTEMPT = 3


def test_the_heartbeat_outlives_a_folder_that_cannot_be_written_for_a_while(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    path = paths.heartbeat(ATTEMPT)
    path.mkdir(parents=True)  # nothing can be renamed onto a folder

    async def beat() -> int:
        beating = asyncio.create_task(write_heartbeat(paths, ATTEMPT, period_s=0.01))
        try:
            async with asyncio.timeout(HANG_S):
                while "cannot be written" not in caplog.text:
                    await asyncio.sleep(0.01)
                path.rmdir()
                while (record := record_in(read_or_none(path), ATTEMPT)) is None:
                    await asyncio.sleep(0.01)
        finally:
            beating.cancel()
        return int(record["counter"])

    assert asyncio.run(beat()) > 1


def test_the_heartbeat_is_read_only_while_the_leaders_connection_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 controllers look each second, and most of the time the leader has just been heard of."""
    paths, number, read = RunPaths(tmp_path), [0], list[int]()
    silences = [0.0, 1.0, 2.9, QUIET_S, 19.0, 0.5, 4.0]

    def silence_s() -> float:
        number[0] += 1
        if number[0] > len(silences):
            raise asyncio.CancelledError
        return silences[number[0] - 1]

    def counted(path: Path) -> bytes | None:
        read.extend([number[0] - 1] if path == paths.heartbeat(1) else [])
        return files.read_or_none(path)

    monkeypatch.setattr(deadman, "LOOK_S", 0.0)
    monkeypatch.setattr(deadman, "read_or_none", counted)
    node = SimpleNamespace(paths=paths, attempt=1, name="node1")
    watch = deadman.DeadMan(node, None, None, silence_s)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert read == [3, 4, 6]
