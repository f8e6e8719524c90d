"""A process that 'uses' stand-in GPUs: it holds as many bytes as ``orders/PID`` says, until it is ended."""

import os
import time
from pathlib import Path


def main() -> None:
    root = Path(os.environ["NVML_STANDIN"])
    devices = [root / f"gpu{name}" for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    order = root / "orders" / str(os.getpid())
    held = ""
    while True:
        wanted = order.read_text() if order.exists() else ""
        if wanted != held:
            held = wanted
            for device in devices:
                (device / f".{os.getpid()}").write_text(held)
                os.replace(device / f".{os.getpid()}", device / str(os.getpid()))
            order.with_suffix(".done").write_text(held)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
