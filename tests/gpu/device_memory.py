"""The device's memory during a measurement, as NVML sees it; no CUDA context."""

import json
import threading
import time
from pathlib import Path

PERIOD_S = 0.25


class MemoryRecorder:
    """Writes lines of [seconds, MiB in use, {pid: MiB}] until its `with` block ends; nothing on CPU."""

    def __init__(self, file: Path, *, is_cuda: bool) -> None:
        self._file, self._ends = file, threading.Event()
        self._thread = threading.Thread(target=self._record) if is_cuda else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _record(self) -> None:
        from yatt.adapters.machine.nvml import Nvml

        device, began_s = Nvml(("0",)), time.monotonic()
        with self._file.open("w") as lines:
            while not self._ends.wait(PERIOD_S):
                seen = device.occupancy((0,))
                held = {pid: used >> 20 for pid, used in seen.processes.items()}
                now_s = round(time.monotonic() - began_s, 2)
                lines.write(json.dumps([now_s, seen.used_bytes >> 20, held]) + "\n")
                lines.flush()
