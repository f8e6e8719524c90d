"""Executes the orders that a controller sends to a trainer rank.

Orders first pass the fence of `yatt.adapters.net.worker_link`. Every order may arrive twice.

The ranks meet in a key-value store on rank 0, at the address in the run's network (adr/0020).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.model_family import critic_of_run, trained_model
from yatt.adapters.net.curve import CurveKeys
from yatt.adapters.node_local.host_segment import AREAS, CRITIC_STATE, STATE, plan_path
from yatt.adapters.node_local.prepared_media import noise_picture, open_prepared
from yatt.checkpoint.commit.manifest_format import CRITIC_KEYS, Manifest
from yatt.checkpoint.convert.hf_folder import copy_side_files
from yatt.checkpoint.local.local_first import Ranges
from yatt.checkpoint.store.store import Store
from yatt.collectives.group import RunGroup
from yatt.config.schema import RunConfig
from yatt.errors import WorkerFailed
from yatt.models.pictures.probe import NAME, probe_media
from yatt.models.pictures.tokens import pixel_scale, unlimited_tokens
from yatt.models.rows import SCORE
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.message import Join
from yatt.trainer.forward.passes import Tick
from yatt.trainer.forward.routes import Routes
from yatt.trainer.mcore.layout import check_layout
from yatt.trainer.mcore.model import Policy, build_policy, build_reference, join_model_parallel
from yatt.trainer.mcore.parted_step import step_in_parts
from yatt.trainer.mcore.seeing import SeeingModel
from yatt.trainer.mcore.tower import PictureFeatures
from yatt.trainer.orders import ArrivedSamples, carried_out
from yatt.trainer.own_algorithm import algorithm_of
from yatt.trainer.probe import MeasuredRounding, ProbeSequence, probe_logprobs
from yatt.trainer.state.hf_folder import export_hf
from yatt.trainer.state.host_copy import HostCopy
from yatt.trainer.state.model_tensors import add_critic, host_copy_of
from yatt.trainer.state.publish import Weights
from yatt.trainer.state.restoring import CheckpointSource
from yatt.trainer.state.snapshot import (
    restore_state,
    restore_weights,
    save_plan,
    saved_kl_coefficient,
    snapshot_common,
)
from yatt.trainer.update.critic import critic_config
from yatt.trainer.update.given import measure_given, train_given
from yatt.trainer.update.objective import KlCoefficient
from yatt.trainer.update.profile import profiler_of
from yatt.trainer.update.update import Learner, sequence_cut, train_iteration
from yatt.weights.convert import HFTensors


class Meeting:
    """This rank's store and process groups. Global rank 0 has the store, from `open_store` on."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._group: RunGroup | None = None

    def open_store(self, host: str) -> int:
        """Starts the store on a free port and returns the port; a second call returns the same port."""
        return self._run_group().serve(host)

    def join(self, order: Join) -> None:
        """Joins the process group and creates megatron-core's; a second call does nothing.

        Raises:
            torch.distributed.DistStoreError: not all ranks joined in time.
        """
        if dist.is_initialized():
            return
        launch = self._config.launch
        self._run_group().join(
            (order.host, order.port),
            rank=order.global_rank,
            world_size=order.world_size,
            device_type=self._device.type,
            join_s=launch.start_timeout_s,
            timeout_s=launch.phase_timeout_s,
        )
        join_model_parallel(self._config.trainer, self._config.run.seed)

    def leave(self) -> None:
        """Leaves the process group and stops the store."""
        if self._group is not None:
            self._group.leave()

    def _run_group(self) -> RunGroup:
        """Returns the group; its keys are read when they are needed."""
        if self._group is None:
            self._group = RunGroup(CurveKeys(RunPaths(Path(self._config.run.dir)).keys))
        return self._group


@dataclass(frozen=True, slots=True)
class _Built:
    """The model, its host copy, and what of the host copy engines load and a checkpoint contains."""

    learner: Learner
    host: HostCopy
    weights: Weights
    plan: m.SavePlan


class TrainerRank:
    """One rank's state and its handlers of orders.

    Args:
        store: the checkpoint store.
        tick: called after each micro-batch, and after each tensor that is loaded or published.
        say: called about waits for the store of another run, as in `PatientStore`.
    """

    def __init__(
        self, config: RunConfig, device: torch.device, store: Store, *, tick: Tick, say: Callable[[str], None]
    ) -> None:
        self._config, self._device, self._tick = config, device, tick
        self._source = CheckpointSource(config, store, tick=tick, say=say)
        self._meeting, self._rounding = Meeting(config, device), MeasuredRounding()
        self._built: _Built | None = None
        self._trained: dict[bool, tuple[int, m.Message]] = {}
        self._arrived = ArrivedSamples()
        self._handlers: dict[type[m.Message], Callable[[Any], m.Message]] = {
            m.OpenStore: self._open_store,
            m.Join: self._join,
            m.Build: self._build,
            m.Restore: self._restore,
            m.Wake: self._wake,
            m.Sleep: self._sleep,
            c.SampleTransfer: self._arrived.receive,
            m.SeePictures: self._see_pictures,
            m.Train: self._train,
            m.Publish: self._publish,
            m.TakeSnapshot: self._take_snapshot,
            m.ExportHF: self._export_hf,
        }

    def handle(self, order: m.Message) -> m.Message:
        """Executes one order; see `carried_out`."""
        return carried_out(self._handlers, order)

    def leave(self) -> None:
        """Leaves the process group, and ends the thread that writes profiles."""
        if self._built is not None:
            self._built.learner.profiler.close()
        self._meeting.leave()

    @property
    def _ready(self) -> _Built:
        if self._built is None:
            raise WorkerFailed("this trainer rank has no model yet; Build comes first")
        return self._built

    @property
    def _policy(self) -> Policy:
        return self._ready.learner.policy

    def _open_store(self, order: m.OpenStore) -> m.Message:
        return m.StoreOpened(host=order.host, port=self._meeting.open_store(order.host))

    def _join(self, order: m.Join) -> m.Message:
        self._meeting.join(order)
        return m.Done()

    def _build(self, order: m.Build) -> m.Message:
        config = self._config
        limit_s = config.launch.phase_timeout_s
        model = with_retries(
            partial(trained_model, config), limit_s=limit_s, on_failure=lambda _: self._tick()
        )
        check_layout(model.shape, config.trainer, dist.get_world_size())
        algorithm = algorithm_of(config)
        zeros = (SCORE,) if model.has_value_head else ()
        source = HFTensors(config.model.path, limit_s=limit_s, tick=self._tick, zeros=zeros)
        policy = build_policy(config, model, self._device, source, self._tick)
        reference: list[nn.Module] = []
        if config.has_reference or algorithm.needs.reference:
            reference = build_reference(config, model, self._device, source, self._tick)
        profiler = profiler_of(
            config, policy.models, self._device, attempt=order.attempt, scratch=Path(order.stem).parent
        )
        kl = KlCoefficient(config.algorithm.kl_coef)
        routes = Routes(
            policy.chunks,
            policy.shape,
            self._device,
            is_replayed=config.trainer.router_replay,
            is_recomputed=config.trainer.recompute != "none",
        )
        host = host_copy_of(policy, reference, Path(order.stem), order.attempt)
        plan = save_plan(policy, host)
        if config.trainer.offload_optimizer:
            host.keep_away(STATE)
            step_in_parts(policy.optimizer, host.visited)
        critic, of_critic = self._built_critic(host)
        plan = msgspec.structs.replace(plan, files=plan.files + of_critic)
        plan_path(Path(order.stem)).write_bytes(msgspec.msgpack.encode(plan))
        pictures = _picture_features(config, policy, reference)
        learner = Learner(config, algorithm, policy, reference, host, kl, profiler, routes, pictures, critic)
        self._built = _Built(learner, host, Weights(config, policy, host, Path(order.stem)), plan)
        self._trained = {}
        return m.Built(host_bytes=host.host_bytes)

    def _built_critic(self, host: HostCopy) -> tuple[Policy | None, tuple[tuple[m.PlannedPiece, ...], ...]]:
        """Builds the critic, if the run has one, and adds it to the host copy; returns its files of a
        checkpoint too. If they swap, the policy is away meanwhile. Collective."""
        config = critic_config(self._config)
        limit_s = config.launch.phase_timeout_s
        model = with_retries(
            partial(critic_of_run, self._config), limit_s=limit_s, on_failure=lambda _: self._tick()
        )
        if model is None:
            return None, ()
        if config.critic.swap:
            host.offload()
        source = HFTensors(config.model.path, limit_s=limit_s, tick=self._tick, zeros=(SCORE,))
        critic = build_policy(config, model, self._device, source, self._tick, CRITIC_KEYS)
        add_critic(host, critic, is_apart=config.critic.swap)
        files = save_plan(critic, host).files
        if config.trainer.offload_optimizer:
            host.keep_away(CRITIC_STATE)
            step_in_parts(critic.optimizer, host.visited)
        if config.critic.swap:
            host.swap_out()
            host.changed(0)
        return critic, files

    def _restore(self, order: m.Restore) -> m.Message:
        """Restores a checkpoint; see `CheckpointSource.restored`."""
        return self._source.restored(order, partial(self._fill, order))

    def _fill(self, order: m.Restore, ranges: Ranges, manifest: Manifest) -> None:
        fill = restore_weights if order.weights_only else restore_state
        host, version = self._ready.host, 0 if order.weights_only else manifest.iteration
        host.overwrite(STATE)
        fill(self._policy, host, ranges, manifest, self._tick)
        host.changed(version)
        critic = self._ready.learner.critic
        if critic is not None and not order.weights_only:
            host.overwrite(CRITIC_STATE)
            host.swap_in()
            try:
                restore_state(critic, host, ranges, manifest, self._tick)
            finally:  # it may be tried again
                host.swap_out()
        host.changed(version)
        if not order.weights_only and self._config.algorithm.kl_target:
            self._ready.learner.kl.value = saved_kl_coefficient(manifest, self._config.algorithm.kl_coef)

    def _wake(self, _: m.Wake) -> m.Message:
        if self._built is not None:
            self._built.host.onload()
        return m.Done()

    def _sleep(self, _: m.Sleep) -> m.Message:
        if self._built is not None:
            self._built.host.offload()
        return m.Done()

    def _see_pictures(self, order: m.SeePictures) -> m.Message:
        """Computes features. Can be repeated: what is there is not computed again."""
        features = self._ready.learner.pictures
        if not features:
            raise WorkerFailed("pictures came to a trainer rank that has no tower")
        for one in features:
            one.begin_iteration(order.iteration)
        missing = []
        for index, each in enumerate(order.pictures):
            try:
                prepared = open_prepared(Path(order.folder), each.digest)
                for one in features:
                    one.add_picture(each.sha256, prepared)
            except FileNotFoundError:
                missing.append(index)
            self._tick()
        return m.PicturesSeen(missing=tuple(missing))

    def _train(self, order: m.Train) -> m.Message:
        """Trains once per iteration, or measures. A repeated order gets the same answer without training
        again."""
        answered = self._trained.get(order.is_held_out)
        if answered is not None and answered[0] == order.iteration:
            return answered[1]
        order = self._arrived.completed(order)
        if order.is_held_out:
            answer = measure_given(self._ready.learner, order, self._tick)
        else:
            learner = self._ready.learner
            with learner.profiler.of_iteration(order.iteration):
                train = train_given if self._config.is_given else train_iteration
                answer = train(learner, order, self._tick)
            self._ready.host.changed(order.iteration)
        self._trained[order.is_held_out] = order.iteration, answer
        return answer

    def _publish(self, order: m.Publish) -> m.Message:
        built, learner = self._ready, self._ready.learner
        if built.host.version != order.policy_version:
            raise WorkerFailed(
                f"policy version {order.policy_version} was to be published, it is {built.host.version}"
            )
        sums, part_sums = built.weights.publish(order.policy_version, self._tick)
        sequences = self._probe_sequences(order.probe)
        cut = sequence_cut(learner)
        rows = probe_logprobs(learner.policy, sequences, cut, self._tick)
        return m.Published(
            size_bytes=built.weights.size_bytes,
            sums=sums,
            part_sums=part_sums,
            probe_logprobs=tuple(m.pack_floats(row.tolist()) for row in rows),
            rounding=self._rounding.at(
                order.policy_version, learner.policy, sequences, rows, cut, self._tick
            ),
        )

    def _probe_sequences(self, probe: tuple[bytes, ...]) -> list[ProbeSequence]:
        """The sequences of the probe; the features of its picture are there."""
        rows = [m.unpack_ids(raw) for raw in probe]
        if not self._config.data.media_store:
            return [ProbeSequence(ids) for ids in rows]
        tokens = with_retries(partial(unlimited_tokens, self._config.model.path))
        for features in self._ready.learner.pictures:
            features.add_picture(NAME, noise_picture(tokens))
        return [ProbeSequence(ids, probe_media(ids, tokens)) for ids in rows]

    def _take_snapshot(self, order: m.TakeSnapshot) -> m.Message:
        """Copies what has changed to the host. Can be repeated: what is there is not copied again."""
        built = self._ready
        if built.host.version != order.iteration:
            raise WorkerFailed(
                f"the state of iteration {order.iteration} was to be saved, it is of {built.host.version}"
            )
        built.host.copy(AREAS)
        learner = built.learner
        common = snapshot_common(learner.policy, learner.kl.value, learner.critic)
        return m.SnapshotTaken(common=common, size_bytes=built.plan.size_bytes)

    def _export_hf(self, order: m.ExportHF) -> m.Message:
        is_writer = dist.get_rank() == 0
        export_hf(self._policy, Path(order.folder), self._tick, writes=is_writer)
        if is_writer:
            model = self._config.model
            has_score = self._config.run.kind == "reward_model"
            copy_side_files(Path(model.path), Path(order.folder), model.dtype, has_score=has_score)
        return m.Done()


def _picture_features(
    config: RunConfig, policy: Policy, reference: list[nn.Module]
) -> tuple[PictureFeatures, ...]:
    """What computes features of pictures, on ranks of the first stage: for the policy, and for a reference
    whose tower is another."""
    found = list[PictureFeatures]()
    for model in (*policy.models, *reference):
        for module in (
            each for each in model.modules() if isinstance(each, SeeingModel) and each.pre_process
        ):
            if module.tower is not None:
                scale = with_retries(partial(pixel_scale, config.model.path))
                found.append(PictureFeatures(module.tower, scale, policy.shape, policy.device))
            module.pictures = found[-1]
    return tuple(found)
