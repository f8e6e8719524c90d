"""Supervised fine-tuning in one process, with the trainer's own model, passes and optimizer.

Trains the small models of the quickstart from random weights, and warms up policies. Not made for
scale: one process, one packed batch per step.

Suffixes: B prompts, L tokens, V vocabulary, T completion tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from yatt.adapters.node_local.prepared_media import open_prepared, prepared_names
from yatt.checkpoint.convert.hf_folder import copy_side_files
from yatt.collectives.group import collective_backend
from yatt.config.schema import (
    DataSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainerSection,
    VisionSection,
)
from yatt.models.model import model_of, read_model
from yatt.models.pictures.tokens import pixel_scale
from yatt.trainer.attention.batches import MicroBatch, SequenceLayout, micro_batch, one_turn
from yatt.trainer.device import prepare_process
from yatt.trainer.forward.passes import HeadInput, Reader, optimizer_step, reader_of, run_pass
from yatt.trainer.mcore.model import Policy, build_policy, join_model_parallel
from yatt.trainer.mcore.seeing import SeeingModel
from yatt.trainer.mcore.tower import PictureFeatures
from yatt.trainer.sft_rows import Example
from yatt.trainer.state.hf_folder import export_hf
from yatt.weights.convert import HFTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Training settings. The learning rate rises over `warmup_steps` and then stays constant. `prepared` is
    the folder of prepared pictures, for a model that takes some."""

    max_steps: int
    lr: float
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    seed: int = 0
    threads: int = 2
    vision: VisionSection = field(default_factory=VisionSection)
    prepared: Path | None = None


@dataclass(frozen=True, slots=True)
class SftResult:
    """Number of steps, and the last batch's loss per token."""

    num_steps: int
    loss: float


class SftModel:
    """The model in training; the stop rule can generate completions with it."""

    def __init__(self, policy: Policy, pictures: "SftPictures | None" = None) -> None:
        self._policy, self._pictures = policy, pictures

    @torch.no_grad()
    def complete(
        self, prompts: Sequence[Example], num_tokens: int, *, temperature: float = 1.0, seed: int = 0
    ) -> list[list[int]]:
        """Generates tokens after each prompt; temperature 0 is greedy."""
        generator = torch.Generator(self._policy.device).manual_seed(seed)
        said: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            next_B = [
                Example(each.prompt, [*ids, 0], each.media) for each, ids in zip(prompts, said, strict=True)
            ]
            logits_BV = self._last_logits(next_B)
            if temperature:
                chosen = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits_BV.argmax(-1, keepdim=True)
            for ids, (token,) in zip(said, chosen.tolist(), strict=True):
                ids.append(token)
        return said

    def _last_logits(self, examples: list[Example]) -> Tensor:
        """Logits [B, V] of the last token of each example."""
        micro = packed_examples(examples, self._policy, self._pictures)
        is_last_T = torch.zeros(len(micro.labels_T), dtype=torch.bool)
        is_last_T[torch.tensor([len(each.completion) for each in examples]).cumsum(0) - 1] = True
        rows_T = torch.empty_like(micro.flat_T)
        rows_T[micro.flat_T] = torch.arange(len(micro.flat_T))  # micro-batches are ordered by length
        rows_B = rows_T[is_last_T]

        def finish(_: int, __: MicroBatch, given: HeadInput) -> Tensor:
            logits = given.hidden_RH[rows_B.to(given.hidden_RH.device)].float() @ given.weight_VH.float().T
            return logits[:, : self._policy.shape.vocab_size]

        (found,) = run_pass(self._policy.chunks, [micro], finish, lambda: None, trains=False)
        logits_BV: Tensor = found
        return logits_BV


class SftPictures:
    """Shows a model the pictures of one batch of examples at a time.

    Args:
        folder: of prepared files.
    """

    def __init__(self, features: PictureFeatures, folder: Path) -> None:
        self._features, self._folder = features, folder
        self._names, self._batch = prepared_names(folder), 0

    def show(self, examples: Sequence[Example]) -> None:
        """Makes the model see these examples' pictures, and forget all others."""
        self._batch += 1
        self._features.begin_iteration(self._batch)
        for sha256 in dict.fromkeys(each.ref.sha256 for example in examples for each in example.media):
            self._features.add_picture(sha256, open_prepared(self._folder, self._names[sha256]))


def _pictures_of(policy: Policy, folder: str, prepared: Path | None) -> SftPictures | None:
    model = policy.models[0]
    if not isinstance(model, SeeingModel) or model.tower is None:
        return None
    model.pictures = PictureFeatures(model.tower, pixel_scale(folder), policy.shape, policy.device)
    return SftPictures(model.pictures, prepared) if prepared is not None else None


def train_sft(
    start: Any,
    batches: Iterator[list[Example]],
    folder: Path,
    settings: SftSettings,
    should_stop: Callable[[int, float, SftModel], bool],
) -> SftResult:
    """Trains on batches until `should_stop` or `max_steps`, and saves a Hugging Face folder.

    Args:
        start: a Hugging Face folder (str or Path), or a transformers config for random weights.
        batches: one list of examples per step.
        folder: output folder for config and weights, and for the tokenizer of `start` if that is a folder.
        should_stop: called after each step with steps taken, loss per token, and the model.

    Raises:
        ConfigError: the architecture is not supported.
    """
    is_folder = isinstance(start, str | Path)
    config = sft_run_config(str(start) if is_folder else "", settings)
    device = prepare_process(config, 0)
    model = read_model(str(start)) if is_folder else model_of(start)
    dist.init_process_group(collective_backend(device.type), store=HashStore(), rank=0, world_size=1)
    try:
        join_model_parallel(config.trainer, settings.seed)
        source = HFTensors(str(start)) if is_folder else None
        policy = build_policy(config, model, device, source, lambda: None)
        result = _learn(policy, config.model.path, batches, settings, should_stop)
        export_hf(policy, folder, lambda: None, writes=True)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
    if is_folder:
        copy_side_files(Path(start), folder, config.model.dtype)
    else:
        start.save_pretrained(folder)
    return result


def _learn(
    policy: Policy,
    start: str,
    batches: Iterator[list[Example]],
    settings: SftSettings,
    should_stop: Callable[[int, float, SftModel], bool],
) -> SftResult:
    pictures = _pictures_of(policy, start, settings.prepared)
    student, reader = SftModel(policy, pictures), reader_of(policy, 1.0)

    def finish(_: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Tensor]:
        return _negative_likelihood(reader, micro, given)

    step, loss = 0, float("nan")
    for step, examples in zip(range(1, settings.max_steps + 1), batches, strict=False):
        micro = packed_examples(examples, policy, pictures)
        measured, *_ = optimizer_step(policy, [micro], finish, lambda: None)
        loss = float(measured[0]) / len(micro.labels_T)
        if should_stop(step, loss, student):
            break
    return SftResult(step, loss)


def _negative_likelihood(
    reader: Reader, micro: MicroBatch, given: HeadInput
) -> tuple[Tensor, Tensor, Tensor]:
    loss = -reader(micro, given)[0].sum()
    num_tokens = torch.tensor(len(micro.labels_T), dtype=torch.int32, device=loss.device)
    return loss, num_tokens, loss.detach()


def packed_examples(examples: Sequence[Example], policy: Policy, pictures: SftPictures | None) -> MicroBatch:
    """Packs examples; the model sees their pictures."""
    samples, weights, start = [], [], 0
    for each in examples:
        sample = one_turn(each.prompt, each.completion, start)
        samples.append(replace(sample, media=each.media))
        weights.append(np.zeros(len(each.completion), np.float32))
        start += len(each.completion)
    if pictures is not None:
        pictures.show(examples)
    cut = SequenceLayout(
        align=1, has_few_lengths=policy.device.type == "cpu", merge_size=policy.shape.picture_merge
    )
    return micro_batch(samples, weights, cut, policy.device)


def sft_run_config(path: str, settings: SftSettings) -> RunConfig:
    """Run config for one process in float32."""
    return RunConfig(
        run=RunSection(dir="", seed=settings.seed),
        data=DataSection(train_files=("unused",)),
        model=ModelSection(path=path, dtype="float32"),
        vision=settings.vision,
        launch=LaunchSection(threads_per_worker=settings.threads),
        optimizer=OptimizerSection(
            lr=settings.lr,
            lr_warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
        ),
        trainer=TrainerSection(total_iterations=settings.max_steps, train_batch_size=1, mini_batch_size=1),
    )
