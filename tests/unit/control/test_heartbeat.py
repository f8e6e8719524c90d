"""The leader's heartbeat in the shared folder."""

import asyncio

from tests.runs import HANG_S
from yatt.adapters.files import read_or_none, unsealed
from yatt.control.membership.deadman import write_heartbeat
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
                while (record := unsealed(read_or_none(path), ATTEMPT)) is None:
                    await asyncio.sleep(0.01)
        finally:
            beating.cancel()
        return int(record["counter"])

    assert asyncio.run(beat()) > 1
