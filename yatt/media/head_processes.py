"""Processes that say what videos have, for whoever makes data: a video that ends one, or hangs, ends only
that."""

import contextlib
import subprocess
import sys
import threading

import msgspec

from yatt.adapters.inputs.media import MOST_BYTES
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.core.attempts.exits import describe_exit
from yatt.records.media import VideoFacts

PROGRAM = "yatt.media.video_heads"
LENGTH_BYTES = 8
MEMORY_BYTES = MOST_BYTES + (2 << 30)
"""Of one process beside its libraries: a file, and frames that refer to each other."""

MOST_ANSWER = 1 << 16
LIMIT_S = 300.0
"""Longest time for one video, which is decoded from its beginning to its end."""


class HeadProcesses:
    """Starts a process when no idle one is left. Safe for threads, each of which waits for its answer.

    Args:
        most_pixels: largest frame.
        limit_s: longest time for one video.
    """

    def __init__(self, most_pixels: int, limit_s: float = LIMIT_S) -> None:
        self._arguments = [str(most_pixels), str(MEMORY_BYTES)]
        self._limit_s = limit_s
        self._lock, self._is_closed = threading.Lock(), False
        self._idle: list[subprocess.Popen[bytes]] = []
        self._every: list[subprocess.Popen[bytes]] = []

    def facts(self, content: bytes) -> VideoFacts:
        """Returns what a video has.

        Raises:
            MediaRefused: it cannot be used, or was not decoded in time.
        """
        with self._lock:
            if self._is_closed:
                raise MediaRefused("was not looked at: another row ended the work")
            process = self._idle.pop() if self._idle else self._started()
        late = threading.Event()
        timer = threading.Timer(self._limit_s, _end_late, [process, late])
        timer.start()
        try:
            answer = _answer(process, content)
        finally:
            timer.cancel()
            timer.join()
        if late.is_set() or not answer.endswith(b"\n"):
            process.kill()
            how = describe_exit(process.wait())
            if late.is_set():
                raise MediaRefused(f"was not decoded within {self._limit_s:g} s; cut it into pieces")
            raise MediaRefused(
                f"ended the process that decodes it ({how}); it is damaged, or made to do harm"
            )
        self._idle.append(process)
        found = msgspec.json.decode(answer, type=VideoFacts | str)
        if isinstance(found, str):
            raise MediaRefused(found)
        return found

    def close(self) -> None:
        """Ends all processes; no other begins."""
        with self._lock:
            self._is_closed = True
        for process in self._every:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None, "opened at the start"
                    pipe.close()
            process.wait()

    def _started(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._every.append(process)
        return process


def _end_late(process: "subprocess.Popen[bytes]", late: threading.Event) -> None:
    late.set()
    process.kill()


def _answer(process: "subprocess.Popen[bytes]", content: bytes) -> bytes:
    """The line that a process writes; not whole if it has ended."""
    assert process.stdin is not None and process.stdout is not None, "opened at the start"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(len(content).to_bytes(LENGTH_BYTES, "little"))
        process.stdin.write(content)
        process.stdin.flush()
    return process.stdout.readline(MOST_ANSWER)
