"""One trainer rank, alone in its world, by real orders, on whatever device there is."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.cases import CASE_MEMORY
from tests.tiny_models import write_publication
from yatt.records import message as m

GROUP_SIZE = 4


class Rank:
    """A rank that has built its model.

    Args:
        stem: path of the host copy; it then outlives this rank.
        trainer: settings of the trainer's section beside the defaults.
    """

    def __init__(self, model: Path, dtype: str, *, stem: Path | None = None, **trainer: Any) -> None:
        import torch.distributed as dist

        from tests.integration.trainer.program import make_config
        from yatt.checkpoint.store.store import FolderStore
        from yatt.collectives.group import collective_backend
        from yatt.trainer.device import prepare_process
        from yatt.trainer.mcore.model import join_model_parallel
        from yatt.trainer.worker import TrainerRank

        config = make_config(str(model), {"dtype": dtype, **trainer}, {"kl_in": "none"})
        config = replace(config, model=replace(config.model, spec="auto"))
        self.device = prepare_process(config, 0)
        if not dist.is_initialized():
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            dist.init_process_group(collective_backend(self.device.type), store=store, rank=0, world_size=1)
            join_model_parallel(config.trainer, 0)
        self.worker = TrainerRank(config, self.device, FolderStore(model / "none"), tick=_nothing, say=print)
        self.memory = tempfile.TemporaryDirectory(dir=os.environ.get(CASE_MEMORY, "/dev/shm"))
        self.stem = stem or Path(self.memory.name) / "rank-00000"
        self.worker.handle(m.Build(stem=str(self.stem), attempt=1))
        self._iteration = 0

    def publish(self, folder: Path, probe: list[list[int]], version: int = 1) -> list[list[float]]:
        """Publish the weights for engines; gives the probe's log-probs."""
        self.worker._ready.host.changed(version)
        published = self.worker.handle(m.Publish(policy_version=version, probe=tuple(map(m.pack_ids, probe))))
        folder.mkdir(exist_ok=True)
        write_publication(folder, [self.stem], version, published.sums)
        return [m.unpack_floats(raw) for raw in published.probe_logprobs]

    def train(self, lengths: list[int], vocab: int) -> dict[str, float]:
        """One optimizer step over samples of these lengths, in one packed micro-batch; gives its metrics."""
        self._iteration += 1
        return self.worker.handle(train_order(lengths, vocab, self._iteration)).metrics


def train_order(lengths: list[int], vocab: int, iteration: int) -> m.Train:
    """Random samples, an eighth of each its prompt."""
    import numpy as np

    draw = np.random.default_rng(iteration)
    facts, rollouts = [], []
    for number, length in enumerate(lengths):
        prompt = max(1, length // 8)
        ids = draw.integers(3, vocab, length).tolist()
        facts.append(
            m.SampleFact(number, number // GROUP_SIZE, draw.random(), prompt, length - prompt, False)
        )
        rollouts.append(
            m.Rollout(
                sample_id=number,
                turns=(
                    m.Turn(m.pack_ids(ids[:prompt])),
                    m.Turn(
                        m.pack_ids(ids[prompt:]), is_sampled=True,
                        logprobs=m.pack_floats([-float(np.log(vocab))] * (length - prompt)),
                        policy_versions=((0, 0, length - prompt),), finish_reason="stop",
                    ),
                ),
            )
        )  # fmt: skip
    plan = m.MiniBatchPlan(((tuple(range(len(lengths))),),))
    return m.Train(iteration=iteration, facts=tuple(facts), plan=(plan,), rollouts=tuple(rollouts))


def _nothing() -> None:
    pass
