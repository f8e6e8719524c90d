"""A trainer rank that meets the others by real orders and notes each pickle it reads.

python -P -m tests.integration.trainer.meeting_rank FOLDER MODEL RANK WORLD_SIZE
"""

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.integration.trainer.program import make_config
from tests.runs import wait_for
from yatt.checkpoint.store.store import FolderStore
from yatt.records import message as m
from yatt.trainer.device import prepare_process
from yatt.trainer.worker import TrainerRank

read: list[str] = []
loads = pickle.loads


class Counting(pickle.Unpickler):
    """Notes that torch unpickles."""

    def load(self) -> Any:
        read.append("Unpickler")
        return super().load()


def counted_loads(*given: Any, **named: Any) -> Any:
    read.append("loads")
    return loads(*given, **named)


def main() -> None:
    folder, model, rank, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    c10d._unpickler, pickle.loads = Counting, counted_loads
    layout = {"tensor_model_parallel_size": 2} if size > 2 else {"pipeline_model_parallel_size": 2}
    config = make_config(model, layout)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    store = FolderStore(folder / "unused")
    trainer = TrainerRank(config, prepare_process(config, 0), store, tick=lambda: None, say=print)
    place = folder / "port"
    if rank == 0:
        port = trainer.handle(m.OpenStore(host="127.0.0.1")).port
        place.with_suffix(".new").write_text(str(port))
        place.with_suffix(".new").rename(place)
    wait_for(place.exists, what="the first rank's port")
    trainer.handle(m.Join(host="127.0.0.1", port=int(place.read_text()), global_rank=rank, world_size=size))
    trainer.handle(m.Build(stem=str(folder / f"host-{rank}"), attempt=1))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer._policy.optimizer.param_groups]
    dist.barrier()
    trainer.leave()
    (folder / f"rank-{rank}.json").write_text(json.dumps({"read": read, "groups": groups}))


if __name__ == "__main__":
    main()
