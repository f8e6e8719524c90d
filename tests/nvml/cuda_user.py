"""A process that really holds CUDA memory: as many bytes as ``orders/PID`` says, until it is ended."""

import os
import time
from pathlib import Path

import torch


def main() -> None:
    order = Path(os.environ["NVML_STANDIN"]) / "orders" / str(os.getpid())
    held, kept = "", []
    while True:
        wanted = order.read_text() if order.exists() else ""
        if wanted != held:
            held = wanted
            kept.clear()
            torch.cuda.empty_cache()
            if int(held):
                kept.append(torch.ones(int(held), dtype=torch.uint8, device="cuda"))
                torch.cuda.synchronize()
            order.with_suffix(".done").write_text(held)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
