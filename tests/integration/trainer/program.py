"""What one rank of a test world does: a list of jobs, each in a layout of its own, through real orders.

    python program.py FOLDER RANK WORLD_SIZE

FOLDER/jobs.json lists the jobs; a job trains, saves, publishes and sleeps as it says and leaves its
results in FOLDER/<name>/. Jobs share the process, because importing megatron costs most of the time.
"""

import functools
import gc
import itertools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.integration.trainer.pictured import pictures_in, see_pictures, with_pictures
from tests.integration.trainer.taught import with_teachers
from tests.integration.trainer.traps import planted
from tests.sliced_weights import packed_copy
from tests.tiny_vision import probe_rows
from yatt.adapters.machine.collector import collect_rarely
from yatt.adapters.node_local.host_segment import HEADER_BYTES, Stamp, segment_path
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.store.store import FolderStore
from yatt.config.schema import (
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    DataSection,
    GenRMSection,
    ModelSection,
    OptimizerSection,
    PreferenceSection,
    RejectionSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
    VisionSection,
)
from yatt.config.sections.given import FORMS, GROUP_SIZES
from yatt.control.gpus.weights.publications import sum_of_boxes, sum_of_parts
from yatt.errors import ConfigError
from yatt.forecast.memory.fetching import slice_sizes
from yatt.models.cuts import engine_cuts
from yatt.models.model import Model
from yatt.records import cluster as c, message as m
from yatt.uploader.upload import Throttle, UploadJob
from yatt.weights.published import PublishedWeights

NUM_SAMPLES, N, VOCAB = 16, 4, 62
"""Four prompt groups; the vocabulary is not a multiple of four, so that its padding is tested."""

PROBE_LENGTHS = (7, 2, 12)

NUM_PARTS = 2
"""Nodes of an engine, each with one GPU: what is published is read whole, and as each node has it."""

NOT_OF_TRAINER = ("dtype", "bucket_size", "top_k")


def make_config(
    model: str,
    layout: dict,
    algorithm: dict | None = None,
    *,
    family: str = "",
    vision: dict | None = None,
    pictures: str = "",
    critic: dict | None = None,
    run_kind: str = "rl",
    preference: dict | None = None,
    is_taught: bool = False,
    **optimizer,
) -> RunConfig:
    steps = {"total_iterations": 8, "train_batch_size": 4, "mini_batch_size": 2}
    return RunConfig(
        run=RunSection(dir="unused", kind=run_kind),
        data=DataSection(train_files=("unused",), media_store=pictures),
        model=ModelSection(path=model, family=family, dtype=layout.get("dtype", "float32"), spec="torch"),
        optimizer=optimizer_of(optimizer),
        trainer=TrainerSection(**{**steps, **{k: v for k, v in layout.items() if k not in NOT_OF_TRAINER}}),
        rollout=RolloutSection(
            n=GROUP_SIZES.get(FORMS[run_kind][0], N),
            max_response_tokens=9,
            temperature=0.8,
            tp_size=NUM_PARTS,
        ),
        vision=VisionSection(**(vision or {})),
        algorithm=section_of(algorithm or {"kl_in": "loss", "entropy_coeff": 0.01}),
        critic=critic_of(critic or {}),
        preference=PreferenceSection(**(preference or {})),
        genrms=(GenRMSection(name="teacher", model="unused", kind="teacher", top_k=9),) if is_taught else (),
    )


def critic_of(settings: dict) -> CriticSection:
    if not settings:
        return CriticSection()
    optimizer = optimizer_of(settings.get("optimizer", {}))
    return CriticSection(**{**settings, "optimizer": optimizer})


def optimizer_of(settings: dict) -> OptimizerSection:
    is_adam = settings.get("kind", "adam") == "adam"
    return OptimizerSection(**{
        "lr": 1e-3, "lr_warmup_steps": 2, **({"adam_eps": 1e-4} if is_adam else {}), **settings
    })  # fmt: skip


def section_of(algorithm: dict) -> AlgorithmSection:
    inner = {"correction": CorrectionSection, "rejection": RejectionSection}
    return AlgorithmSection(**{
        key: inner[key](**value) if key in inner else value for key, value in algorithm.items()
    })  # fmt: skip


def with_observation(fact: m.SampleFact, rollout: m.Rollout) -> tuple[m.SampleFact, m.Rollout]:
    """Two turns of the policy and an observation between them; the policy's tokens are kept."""
    prompt, said = rollout.turns
    ids, logprobs = m.unpack_ids(said.token_ids), m.unpack_floats(said.logprobs)
    cut, observed = len(ids) // 2, [(7 * len(ids) + place) % VOCAB for place in range(1 + fact.sample_id % 4)]
    parts = [
        m.Turn(m.pack_ids(i), is_sampled=True, logprobs=m.pack_floats(p), finish_reason="stop")
        for i, p in ((ids[:cut], logprobs[:cut]), (ids[cut:], logprobs[cut:]))
    ]
    turns = (prompt, parts[0], m.Turn(m.pack_ids(observed)), parts[1])
    fact = msgspec.structs.replace(fact, num_observation_tokens=len(observed), num_turns=2)
    return fact, msgspec.structs.replace(rollout, turns=turns)


def samples(iteration: int, masked: tuple[int, ...] = (), *, has_observations: bool = False):
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
                turns=(
                    m.Turn(m.pack_ids(prompt)),
                    m.Turn(
                        m.pack_ids(completion),
                        is_sampled=True,
                        logprobs=m.pack_floats(logprobs),
                        policy_versions=((0, 0, len(completion)),),
                        finish_reason="stop",
                    ),
                ),
            )
        )
    if has_observations:
        pairs = [with_observation(*pair) for pair in zip(facts, rollouts, strict=True)]
        return tuple(fact for fact, _ in pairs), tuple(rollout for _, rollout in pairs)
    return tuple(facts), tuple(rollouts)


def plans(dp_size: int, num_steps: int = 2, *, has_empty: bool = True):
    """Mini-batches dealt round robin, in two micro-batches, the last one short; one has an empty one too."""
    size = NUM_SAMPLES // num_steps
    out, micro_size = [], size // dp_size // 2 + 1
    for first in range(0, NUM_SAMPLES, size):
        numbers = list(range(first, first + size))
        hands = [numbers[rank::dp_size] for rank in range(dp_size)]
        count = -(-max(map(len, hands)) // micro_size) + (has_empty and first == 0)
        out.append(
            m.MiniBatchPlan(
                tuple(
                    tuple(tuple(hand[i * micro_size : (i + 1) * micro_size]) for i in range(count))
                    for hand in hands
                )
            )
        )
    return tuple(out)


def train_order(
    iteration: int, num_steps: int, masked: tuple[int, ...] = (), *, has_observations: bool = False,
    pictures: str = "", teachers: str = "",
) -> m.Train:  # fmt: skip
    """This rank's order: rollouts go to the first rank of each model copy only. The first iteration has an
    empty micro-batch."""
    from megatron.core import parallel_state as mpu

    facts, rollouts = samples(iteration, masked, has_observations=has_observations)
    if pictures:
        facts, rollouts = with_pictures(facts, rollouts, pictures_in(Path(pictures)))
    if teachers:
        facts, rollouts = with_teachers(facts, rollouts, has_rewards=teachers == "beside")
    plan = plans(mpu.get_data_parallel_world_size(), num_steps, has_empty=iteration == 1)
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
    from tests.integration.trainer import grouped, varlen_kernel
    from yatt.trainer import probe
    from yatt.trainer.device import prepare_process
    from yatt.trainer.forward import logprobs
    from yatt.trainer.mcore import cpu_matmul, model
    from yatt.trainer.worker import TrainerRank

    family = job.get("family", "")
    settings = job.get("optimizer", {})
    config = make_config(
        job["model"], job.get("layout", {}), job.get("algorithm"), family=family, vision=job.get("vision"),
        pictures=job.get("pictures", ""), critic=job.get("critic"), is_taught="teachers" in job,
        run_kind=job.get("kind", "rl"), preference=job.get("preference"), **settings,
    )  # fmt: skip
    if job.get("is_fork"):
        origin = replace(config.run.from_checkpoint, url="another run")
        config = replace(config, run=replace(config.run, from_checkpoint=origin))
    device = prepare_process(config, 0)
    cpu_matmul.MIN_ROWS = job.get("min_rows", 64)
    probe.ROUNDINGS = 1  # each takes as many passes as the probe itself
    grouped.use(is_used=job.get("grouped", False))
    varlen_kernel.use(is_used=job.get("varlen", False), is_there=rank not in job.get("without_kernel", ()))
    if dist.get_world_size() > 1:  # many chunks here against one chunk there
        logprobs.MIN_CHUNK = logprobs.MAX_CHUNK = 5
    bucket_size = job.get("layout", {}).get("bucket_size")
    model.DistributedDataParallelConfig = functools.partial(ddp_config(), bucket_size=bucket_size)
    join_groups(config, keeps_groups=keeps_groups)
    ticks: list[int] = []
    store = FolderStore(Path(job.get("store", str(folder / "unused"))))
    worker = TrainerRank(config, device, store, tick=lambda: ticks.append(1), say=print)
    (place := folder / job["name"]).mkdir(exist_ok=True)
    worker.handle(m.Build(stem=str(place / f"host-{rank:05d}"), attempt=1))
    divide_steps(job, worker._policy.optimizer)
    notes: dict = {"metrics": [], "left_bytes": [], "ticks_of": {"build": len(ticks)}}
    if "restore" in job:
        before = len(ticks)
        restore(worker, job, notes)
        notes["ticks_of"]["restore"] = len(ticks) - before
    notes["num_layers"] = sum(len(model.decoder.layers) for model in worker._policy.models)
    for action, argument in job["actions"]:
        before = len(ticks)
        at = Place(
            config,
            worker,
            store,
            place,
            rank,
            tuple(job.get("masked", ())),
            "parcels" in job,
            "turns" in job,
            lambda: ticks.append(1),
            job.get("pictures", ""),
            job.get("teachers", ""),
        )
        act(at, action, argument, notes)
        notes["ticks_of"][action] = len(ticks) - before
    notes["ticks"] = len(ticks)
    (place / f"rank-{rank}.json").write_text(json.dumps(notes))


def divide_steps(job: dict, optimizer: Any) -> None:
    """Parts of the job's size; or megatron-core's own steps, which need the whole state."""
    from yatt.trainer.mcore import parted_step

    parted_step.PART_BYTES = job.get("part_bytes", 512 << 20)
    if not job.get("has_whole_steps"):
        return
    del optimizer.get_grad_norm
    for inner in optimizer.chained_optimizers:
        del inner.step_with_ready_grads


def run_trapped(job: dict, folder: Path, rank: int, *, keeps_groups: bool) -> None:
    """Runs a job with a mistake; notes the error that it raises."""
    with planted(job["trap"]):
        try:
            run_job(job, folder, rank, keeps_groups=keeps_groups)
        except RuntimeError as error:
            (folder / job["name"] / f"rank-{rank}.json").write_text(json.dumps({"raised": str(error)}))


def restore(worker: Any, job: dict, notes: dict) -> None:
    """Restore the job's checkpoint, or note why it is refused."""
    order = m.Restore(checkpoint=job["restore"], weights_only=job.get("weights_only", False))
    if not job.get("is_refused"):
        assert worker.handle(order) == m.Restored()
        return
    try:
        worker.handle(order)
    except ConfigError as error:
        notes["fault"] = str(error)


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

    has_observations: bool

    tick: Callable[[], None]
    """Progress, of the trainer and of the upload."""

    pictures: str = ""
    """Folder of prepared pictures, for samples that have some."""

    teachers: str = ""
    """Samples have teachers, `beside` rewards or alone."""


def order_at(at: Place, iteration: int) -> m.Train:
    """The order to train on an iteration's samples; their pictures are seen."""
    if at.config.is_given:
        from tests.integration.trainer.given import given_order

        return given_order(at.config.run.kind, iteration, keeps_groups=at.config.has_pairs)
    num_steps = 4 // at.config.trainer.mini_batch_size
    order = train_order(
        iteration, num_steps, at.masked, has_observations=at.has_observations, pictures=at.pictures,
        teachers=at.teachers,
    )  # fmt: skip
    if at.pictures:
        see_pictures(at.worker, order, Path(at.pictures))
    return order


def held_out_order(at: Place, iteration: int) -> m.Train:
    """The order to measure an iteration's samples, all at once."""
    from tests.integration.trainer.given import given_order

    kind, has_pairs = at.config.run.kind, at.config.has_pairs
    return given_order(kind, iteration, keeps_groups=has_pairs, num_steps=1, is_held_out=True)


def act(at: Place, action: str, argument: Any, notes: dict) -> None:
    from tests.integration.trainer.gradients import write_first_gradient, write_state
    from tests.integration.trainer.grouped import calls as products, together
    from tests.integration.trainer.kept import device_bytes, kept_bytes
    from tests.integration.trainer.sampled import sampled_logprobs, sampled_values
    from tests.integration.trainer.varlen_kernel import calls

    worker, order_of = at.worker, functools.partial(order_at, at)

    def train() -> None:
        order = order_of(argument)
        if at.has_parcels:
            order = with_transfers(worker, order)
        notes["metrics"].append(worker.handle(order).metrics)

    def gradient(*, goes_on: bool = True, model: Any = None) -> None:
        order = order_of(1)
        target = at.folder / f"{argument}.safetensors"
        work = functools.partial(worker.handle, order)
        if answer := write_first_gradient(model or worker._policy, work, target, goes_on=goes_on):
            notes["metrics"].append(answer.metrics)

    def critic() -> Any:
        return worker._ready.learner.critic

    def kept() -> None:
        notes.update(kept_bytes=kept_bytes(worker._policy, gradient))

    def state() -> None:
        write_state(worker._policy, at.folder / f"{argument}.safetensors", worker._ready.host.view)

    actions = {
        "train": train,
        "held_out": lambda: notes.update(held_out=worker.handle(held_out_order(at, argument)).metrics),
        "streams": lambda: notes.update(streams=len(calls)),
        "products": lambda: notes.update(products=len(products)),
        "together": lambda: notes.update(together=together(worker._policy)),
        "measured": lambda: notes.update(device_bytes=device_bytes(worker, train)),
        "kept": kept,
        "gradient": gradient,
        "only_gradient": lambda: gradient(goes_on=False),
        "probe": lambda: notes.update(probe=publish(worker, at.folder / argument, PROBE_LENGTHS)),
        "publish": lambda: publish(worker, at.folder / argument),
        "save": lambda: notes.update(saved_bytes=save(at, argument, dist.get_world_size())),
        "seen": lambda: notes.update(seen=sampled_logprobs(worker, order_of(argument))),
        "seen_last": lambda: notes.update(seen_last=sampled_logprobs(worker, order_of(argument))),
        "values": lambda: notes.update(values=sampled_values(worker, order_of(argument))),
        "critic_gradient": lambda: gradient(model=critic()),
        "critic_state": lambda: critic_state(at, argument),
        "moved": lambda: with_moved_routers(gradient),
        "state": state,
        "nap": lambda: nap(worker, notes),
        "export": lambda: worker.handle(m.ExportHF(folder=str(at.folder / argument))),
    }
    actions[action]()


def critic_state(at: Place, name: str) -> None:
    """Write the critic's state, which needs its gradients' memory."""
    from tests.integration.trainer.gradients import write_state

    host, learner = at.worker._ready.host, at.worker._ready.learner
    host.swap_in()
    write_state(learner.critic, at.folder / f"{name}.safetensors", host.view)
    host.swap_out()
    if at.config.critic.swap:
        host.changed(host.version)


def with_moved_routers(train: Callable[[], None]) -> None:
    """Trains with routers that move between the pass of the old policy and the first update."""
    from megatron.core.transformer.moe.router import TopKRouter

    from yatt.trainer.update import update

    step = update.optimizer_step

    def move_then_step(policy, *given):
        for module in (module for model in policy.models for module in model.modules()):
            if isinstance(module, TopKRouter):
                module.weight.data += router_noise(module.layer_number - 1, module.weight.shape)
        update.optimizer_step = step
        return step(policy, *given)

    update.optimizer_step = move_then_step
    train()


def router_noise(layer: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + layer)
    return 0.02 * torch.randn(shape, generator=generator)


def ddp_config() -> type:
    """megatron-core's; a partial of it may stand in its place in `yatt.trainer.mcore.model`."""
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig


def join_groups(config: RunConfig, *, keeps_groups: bool) -> None:
    from megatron.core import parallel_state as mpu

    from yatt.trainer.mcore.model import join_model_parallel

    if not keeps_groups:
        mpu.destroy_model_parallel()
        join_model_parallel(config.trainer, config.run.seed)


def publish(worker, folder: Path, lengths: tuple[int, ...] = ()) -> dict:
    """Publish the weights; gives the log-probs of a probe of sequences of these lengths, and its rounding."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    if lengths and worker._config.data.media_store:
        ids = probe_rows(worker._config.model.path)
    probe = tuple(m.pack_ids(row) for row in ids)
    version = worker._ready.host.version
    answer = worker.handle(m.Publish(policy_version=version, probe=probe))
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (answer.sums, answer.part_sums))
    if dist.get_rank() == 0:
        keep_published(folder, Stamp(1, version), len(every), sum_of_boxes(sums for sums, _ in every))
        check_slices(worker, folder, Stamp(1, version), sum_of_parts(parts for _, parts in every))
    dist.barrier()
    logprobs = [m.unpack_floats(raw) for raw in answer.probe_logprobs]
    return {"logprobs": logprobs, "rounding": answer.rounding}


def keep_published(folder: Path, stamp: Stamp, world_size: int, sums: dict[str, int]) -> None:
    """Reads what an engine would read, of all ranks, before it changes again."""
    stems = [folder.parent / f"host-{rank:05d}" for rank in range(world_size)]
    published = PublishedWeights(stems, stamp)
    assert sums and published.damaged(sums) == []
    flipped = {name: total ^ 1 for name, total in sums.items()}
    assert published.damaged(flipped) == list(flipped)
    save_file({name: tensor.clone() for name, tensor in published}, folder.with_suffix(".published"))
    published.check()


def check_slices(worker, folder: Path, stamp: Stamp, sums: dict[str, tuple[int, ...]]) -> None:
    """Reads what each node of an engine would fetch: all of its slices, with the checksums and the bytes that
    were counted without a trainer."""
    config, policy = worker._config, worker._ready.learner.policy
    model, section = Model(shape=policy.shape, rows=policy.rows), config.trainer
    cuts, sizes = engine_cuts(config, model.rows, model.shape), slice_sizes(config, model)
    assert sizes is not None and sums.keys() <= cuts.cuts.keys()
    assert bool(cuts.cuts) is not bool(config.model.family), "of a family of the user's no cut is known"
    each = dist.get_world_size() // section.pipeline_model_parallel_size
    for part in range(NUM_PARTS):
        stems, found = [], Counter()
        for rank in range(dist.get_world_size()):
            if (place := rank % each) >= section.whole_stage:
                continue  # another copy of the same
            stems.append(folder.with_suffix(f".part-{part}-{rank}"))
            packed_copy(folder.parent / f"host-{rank:05d}", stems[-1], part, stamp)
            at = rank // each, place, part
            size_bytes = segment_path(stems[-1], "weights").stat().st_size - HEADER_BYTES
            is_planted = bool(config.model.family)  # its file may change the ranks' own cut
            assert is_planted or size_bytes == sizes.total[at], (at, size_bytes, sizes.total[at])
            found[at] = size_bytes
        here = {name: totals[part] for name, totals in sums.items()}
        weights = PublishedWeights(stems, stamp, part=part)
        assert weights.damaged(here) == [] and found.total() > 0
        assert weights.damaged({name: total ^ 1 for name, total in here.items()}) == list(here)
        for stem in stems:
            segment_path(stem, "weights").unlink()


def nap(worker, notes: dict) -> None:
    """Sleep, note what is left on the device, wake."""
    host = worker._ready.host
    worker.handle(m.Sleep())
    notes["left_bytes"].append(host.device_bytes)
    notes["live_bytes"] = live_bytes(host)
    worker.handle(m.Wake())
    notes["held_bytes"] = host.device_bytes


def live_bytes(host) -> int:
    """Storage of every tensor Python knows of, but for the host copies."""
    hosts = {held.host.untyped_storage()._cdata for held in host._held.values() if held.host is not None}
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [leaf for leaf in gc.get_objects() if isinstance(leaf, torch.Tensor)]
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().size() for leaf in found}
    return sum(size for key, size in storages.items() if key not in hosts)


def save(at: Place, iteration: int, world_size: int) -> int:
    """A snapshot and its upload by every rank, reported through the store, and the commit by rank 0.

    Gives the bytes of this rank's pieces.
    """
    prefix, store, rank = f"global_step_{iteration}/000001-7e577e57", at.store, at.rank
    taken = at.worker.handle(m.TakeSnapshot(iteration=iteration))
    stem, stamp = at.folder / f"host-{rank:05d}", Stamp(1, iteration)
    job = UploadJob(store, prefix, [stem], stamp, throttle=Throttle(0), tick=at.tick)
    files = job.run()
    job.close()
    assert taken.size_bytes == sum(piece.size_bytes for file in files for piece in file.tensors)
    store.write(f"reports/{rank}", msgspec.msgpack.encode((files, taken.common)))
    dist.barrier()
    if rank == 0:
        names = [f"reports/{other}" for other in range(world_size)]
        kind = tuple[tuple[m.ShardFile, ...], bytes]
        reports = [msgspec.msgpack.decode(store.read(name), type=kind) for name in names]
        manifest = Manifest(
            iteration=iteration,
            attempt=1,
            config_hash="test",
            files=tuple(file for report, _ in reports for file in report),
            common=msgspec.Raw(reports[0][1]),
            nodes=(),
        )
        Checkpoints(store, 1).commit(manifest)
    dist.barrier()
    return taken.size_bytes


def layout_of(job: dict) -> str:
    return json.dumps(job.get("layout", {}), sort_keys=True)


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    collect_rarely()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    jobs = json.loads((folder / "jobs.json").read_text())
    layouts = [layout_of(job) for job in jobs]
    jobs.sort(key=lambda job: layouts.index(layout_of(job)))  # groups take longest to make: share them
    for before, job in itertools.pairwise([None, *jobs]):
        keeps_groups = before is not None and layout_of(before) == layout_of(job)
        if "trap" in job:
            run_trapped(job, folder, rank, keeps_groups=keeps_groups)
        else:
            run_job(job, folder, rank, keeps_groups=keeps_groups)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of all imported modules would take longer than that of this rank's work
