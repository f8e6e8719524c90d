"""What the nursery of these tests imports, with the faults that a test names in PLANTED."""

import os
import threading
import time

from yatt.adapters.processes import nursery_link


def preload(_kind: str, _device: str, _threads: int) -> None:
    import numpy.random  # noqa: F401 - has a generator of its own, and threads with OMP_NUM_THREADS above 1

    os.environ["SET_BY_AN_IMPORT"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "9"
    os.environ.pop("REMOVED_BY_AN_IMPORT", None)
    planted = os.environ.get("PLANTED", "")
    if planted == "a thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif planted == "a GPU":
        nursery_link.DEVICES = os.environ["PLANTED_DEVICE"]
        os.open(nursery_link.DEVICES + "0", os.O_RDONLY)
    elif planted == "torch":
        import torch  # noqa: F401
    elif planted == "an end":
        raise RuntimeError("this library cannot be imported")
    elif planted == "standstill":
        time.sleep(600)
    elif planted == "a long import":
        until_s = time.monotonic() + 600
        while time.monotonic() < until_s:
            pass
