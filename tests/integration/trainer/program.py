"""What one rank of a test world does: a list of jobs, each in a layout of its own, through real orders.

    python program.py FOLDER RANK WORLD_SIZE

FOLDER/jobs.json lists the jobs; a job trains, saves, publishes and sleeps as it says and leaves its
results in FOLDER/<name>/. Jobs share the process, because importing megatron costs most of the time.
"""

import functools
import gc
import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from yatt.checkpoint.manifest import Checkpoints, Manifest
from yatt.checkpoint.store import FolderStore
from yatt.config.schema import (
    AlgorithmSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from yatt.records import cluster as c, message as m

NUM_SAMPLES, N, VOCAB = 16, 4, 62
"""Four prompt groups; the vocabulary is not a multiple of four, so that its padding is tested."""

NOT_OF_TRAINER = ("dtype", "bucket_size")


def make_config(model: str, layout: dict, algorithm: dict | None = None, **optimizer) -> RunConfig:
    steps = {"total_iterations": 8, "train_batch_size": 4, "mini_batch_size": 2}
    return RunConfig(
        run=RunSection(dir="unused"),
        data=DataSection(train_files=("unused",)),
        model=ModelSection(path=model, dtype=layout.get("dtype", "float32"), spec="torch"),
        optimizer=OptimizerSection(**{"lr": 1e-3, "adam_eps": 1e-4, "lr_warmup_steps": 2, **optimizer}),
        trainer=TrainerSection(**{**steps, **{k: v for k, v in layout.items() if k not in NOT_OF_TRAINER}}),
        rollout=RolloutSection(n=N, max_response_tokens=9, temperature=0.8),
        algorithm=AlgorithmSection(**(algorithm or {"kl_in": "loss", "entropy_coeff": 0.01})),
    )


def samples(iteration: int, masked: tuple[int, ...] = ()):
    """Facts and rollouts, the same in every world."""
    generator = torch.Generator().manual_seed(iteration)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    facts, rollouts = [], []
    for number in range(NUM_SAMPLES):
        prompt, completion = draw(0, VOCAB, draw(2, 7)[0]), draw(0, VOCAB, draw(1, 10)[0])
        logprobs = (-4.2 + 0.1 * torch.randn(len(completion), generator=generator)).tolist()
        reward = torch.rand(1, generator=generator).item()
        facts.append(
            m.SampleFact(number, number // N, reward, len(prompt), len(completion), number in masked)
        )
        rollouts.append(
            m.Rollout(
                sample_id=number,
                prompt_ids=m.pack_ids(prompt),
                completion_ids=m.pack_ids(completion),
                sampler_logprobs=m.pack_floats(logprobs),
                policy_versions=((0, 0, len(completion)),),
                finish_reason="stop",
            )
        )
    return tuple(facts), tuple(rollouts)


def plans(dp_size: int, num_steps: int = 2, micro_size: int = 3):
    """Mini-batches dealt round robin, in micro-batches of three, the last ones short or empty."""
    out = []
    size = NUM_SAMPLES // num_steps
    for first in range(0, NUM_SAMPLES, size):
        numbers = list(range(first, first + size))
        hands = [numbers[rank::dp_size] for rank in range(dp_size)]
        count = -(-max(map(len, hands)) // micro_size) + 1
        out.append(
            m.MiniBatchPlan(
                tuple(
                    tuple(tuple(hand[i * micro_size : (i + 1) * micro_size]) for i in range(count))
                    for hand in hands
                )
            )
        )
    return tuple(out)


def train_order(iteration: int, num_steps: int, masked: tuple[int, ...] = ()) -> m.Train:
    """This rank's order: rollouts go to the first rank of each model copy only."""
    from megatron.core import parallel_state as mpu

    facts, rollouts = samples(iteration, masked)
    plan = plans(mpu.get_data_parallel_world_size(), num_steps)
    mine = {
        number
        for mini in plan
        for micro in mini.micro_batches[mpu.get_data_parallel_rank()]
        for number in micro
    }
    is_first = mpu.get_pipeline_model_parallel_rank() == 0 and mpu.get_tensor_and_context_parallel_rank() == 0
    held = tuple(rollout for rollout in rollouts if rollout.sample_id in mine) if is_first else ()
    return m.Train(iteration=iteration, facts=facts, plan=plan, rollouts=held)


def with_transfers(worker, order: m.Train) -> m.Train:
    """Parcels of a third each, one twice and one of another iteration; gives the order with the rest."""
    third = len(order.rollouts) // 3
    first, second = order.rollouts[:third], order.rollouts[third : 2 * third]
    for iteration, rollouts in (
        (7, order.rollouts),
        *((order.iteration, part) for part in (first, second, first)),
    ):
        assert worker.handle(c.SampleTransfer(iteration=iteration, rollouts=rollouts)) == m.Done()
    return msgspec.structs.replace(order, rollouts=order.rollouts[2 * third :])


def run_job(job: dict, folder: Path, rank: int, *, keeps_groups: bool) -> None:
    from yatt.trainer import cpu_matmul, logprobs, model
    from yatt.trainer.device import prepare_process
    from yatt.trainer.worker import TrainerRank

    config = make_config(job["model"], job.get("layout", {}), job.get("algorithm"))
    device = prepare_process(config, 0)
    cpu_matmul.MIN_ROWS = job.get("min_rows", 64)
    if dist.get_world_size() > 1:  # many chunks here against one chunk there
        logprobs.MIN_CHUNK = logprobs.MAX_CHUNK = 5
    bucket_size = job.get("layout", {}).get("bucket_size")
    model.DistributedDataParallelConfig = functools.partial(ddp_config(), bucket_size=bucket_size)
    join_groups(config, keeps_groups=keeps_groups)
    ticks: list[int] = []
    store = FolderStore(Path(job.get("store", str(folder / "unused"))))
    worker = TrainerRank(config, device, store, local_rank=rank, tick=lambda: ticks.append(1), say=print)
    (place := folder / job["name"]).mkdir(exist_ok=True)
    worker.handle(m.Build())
    if "restore" in job:
        assert worker.handle(m.Restore(checkpoint=job["restore"])) == m.Restored()
    notes: dict = {"metrics": [], "left_bytes": [], "ticks_of": {"build": len(ticks)}}
    for action, argument in job["actions"]:
        before = len(ticks)
        at = Place(config, worker, store, place, rank, tuple(job.get("masked", ())), "parcels" in job)
        act(at, action, argument, notes)
        notes["ticks_of"][action] = len(ticks) - before
    notes["ticks"] = len(ticks)
    (place / f"rank-{rank}.json").write_text(json.dumps(notes))


class Place(NamedTuple):
    """What an action works with; `folder` takes its results."""

    config: RunConfig
    worker: Any
    store: FolderStore
    folder: Path
    rank: int
    masked: tuple[int, ...]
    has_parcels: bool
    """Most samples come before the order to train."""


def act(at: Place, action: str, argument: Any, notes: dict) -> None:
    from tests.integration.trainer.gradients import write_first_gradient, write_state

    worker, num_steps = at.worker, 4 // at.config.trainer.mini_batch_size

    def train() -> None:
        order = train_order(argument, num_steps, at.masked)
        if at.has_parcels:
            order = with_transfers(worker, order)
        notes["metrics"].append(worker.handle(order).metrics)

    def gradient() -> None:
        order = train_order(1, num_steps)
        target = at.folder / f"{argument}.safetensors"
        write_first_gradient(worker._policy, functools.partial(worker.handle, order), target)

    actions = {
        "train": train,
        "gradient": gradient,
        "publish": lambda: notes.update(probe=publish(worker, at.folder / argument)),
        "save": lambda: notes.update(
            saved_bytes=save(worker, at.store, argument, at.rank, dist.get_world_size())
        ),
        "state": lambda: write_state(worker._policy, at.folder / f"{argument}.safetensors"),
        "nap": lambda: nap(worker, notes),
        "export": lambda: worker.handle(m.ExportHF(folder=str(at.folder / argument))),
    }
    actions[action]()


def ddp_config() -> type:
    """megatron-core's; a partial of it may stand in its place in `yatt.trainer.model`."""
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig


def join_groups(config: RunConfig, *, keeps_groups: bool) -> None:
    from megatron.core import parallel_state as mpu

    from yatt.trainer.model import join_model_parallel

    if not keeps_groups:
        mpu.destroy_model_parallel()
        join_model_parallel(config.trainer, config.run.seed)


def publish(worker, folder: Path) -> list:
    """Publish the weights; gives the log-probs of the probe."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (7, 2, 12)]
    probe = tuple(m.pack_ids(row) for row in ids)
    answer = worker.handle(m.Publish(policy_version=1, folder=str(folder), probe=probe))
    return [m.unpack_floats(raw) for raw in answer.probe_logprobs]


def nap(worker, notes: dict) -> None:
    """Sleep, note what is left on the device, wake."""
    swap = worker._ready.swap
    worker.handle(m.Sleep())
    notes["left_bytes"].append(swap.device_bytes)
    notes["live_bytes"] = live_bytes(swap)
    worker.handle(m.Wake())
    notes["held_bytes"] = swap.device_bytes


def live_bytes(swap) -> int:
    """Storage of every tensor Python knows of, but for the host copies."""
    hosts = {held.host.untyped_storage()._cdata for held in swap._held.values() if held.host is not None}
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [leaf for leaf in gc.get_objects() if isinstance(leaf, torch.Tensor)]
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().size() for leaf in found}
    return sum(size for key, size in storages.items() if key not in hosts)


def save(worker, store, iteration: int, rank: int, world_size: int) -> int:
    """Shards by every rank, reported through the store, and the commit by rank 0: as controllers do.

    Gives the bytes of this rank's files.
    """
    prefix = f"global_step_{iteration}/1-test"
    saved = worker.handle(m.SaveShards(iteration=iteration, url=prefix))
    store.write(f"reports/{rank}", msgspec.msgpack.encode(saved))
    dist.barrier()
    if rank == 0:
        names = [f"reports/{other}" for other in range(world_size)]
        reports = [msgspec.msgpack.decode(store.read(name), type=m.ShardsSaved) for name in names]
        manifest = Manifest(
            iteration=iteration,
            attempt=1,
            config_hash="test",
            files=tuple(file for report in reports for file in report.files),
            common=msgspec.Raw(reports[0].common),
            nodes=(),
        )
        Checkpoints(store, 1).commit(manifest)
    dist.barrier()
    return sum(file.size_bytes for file in saved.files)


def layout_of(job: dict) -> str:
    return json.dumps(job.get("layout", {}), sort_keys=True)


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    jobs = json.loads((folder / "jobs.json").read_text())
    layouts = [layout_of(job) for job in jobs]
    jobs.sort(key=lambda job: layouts.index(layout_of(job)))  # groups take longest to make: share them
    for before, job in itertools.pairwise([None, *jobs]):
        keeps_groups = before is not None and layout_of(before) == layout_of(job)
        run_job(job, folder, rank, keeps_groups=keeps_groups)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
