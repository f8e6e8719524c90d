"""A line of progress on a terminal; nothing elsewhere."""

import sys
import threading

from yatt import clock

SHOWN_S = 0.2


class ByteProgress:
    """Counts bytes in any thread, and shows them.

    Args:
        what: begins the line.
        total_bytes: what will be read.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._count = what, total_bytes, 0
        self._began_s = self._shown_s = clock.monotonic_s()
        self._is_shown, self._width = sys.stderr.isatty(), 0
        self._lock = threading.Lock()

    def tick(self, num_bytes: int) -> None:
        """Adds bytes."""
        with self._lock:
            self._count += num_bytes
            now_s = clock.monotonic_s()
            if self._is_shown and now_s - self._shown_s >= SHOWN_S:
                self._shown_s = now_s
                self._show(now_s - self._began_s)

    def clear(self) -> None:
        """Removes the line."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()

    def _show(self, seconds: float) -> None:
        percent = min(100, 100 * self._count // max(1, self._total))
        speed = bytes_in_words(self._count / max(seconds, 1e-9))
        count, total = bytes_in_words(self._count), bytes_in_words(self._total)
        line = f"{self._what}: {count} of {total} ({percent} %), {speed}/s"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)


def bytes_in_words(num_bytes: float) -> str:
    """Returns bytes with a unit, decimal, as disks and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
