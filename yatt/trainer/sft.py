"""Supervised fine-tuning in one process, with the trainer's own model, passes and optimizer.

Trains the small models of the quickstart from random weights, and warms up policies. Not made for
scale: one process, one packed batch per step.

Suffixes: B prompts, L tokens, V vocabulary, T completion tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch._C._distributed_c10d import HashStore

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
)
from yatt.models.model import model_of, read_model
from yatt.trainer.attention.batches import MicroBatch, SequenceLayout, micro_batch, one_turn
from yatt.trainer.device import prepare_process
from yatt.trainer.forward.passes import HeadInput, Reader, optimizer_step, reader_of
from yatt.trainer.mcore.model import Policy, build_policy, join_model_parallel
from yatt.trainer.sft_rows import Example
from yatt.trainer.state.hf_folder import export_hf
from yatt.weights.convert import HFTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Training settings. The learning rate rises over `warmup_steps` and then stays constant."""

    max_steps: int
    lr: float
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    seed: int = 0
    threads: int = 2


@dataclass(frozen=True, slots=True)
class SftResult:
    """Number of steps, and the last batch's loss per token."""

    num_steps: int
    loss: float


class SftModel:
    """The model in training; the stop rule can generate completions with it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @torch.no_grad()
    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 1.0, seed: int = 0
    ) -> list[list[int]]:
        """Generates tokens after each prompt; temperature 0 is greedy.

        Args:
            prompts: ids, all of the same length.
        """
        device = self._policy.device
        generator = torch.Generator(device).manual_seed(seed)
        ids_BL = torch.tensor(prompts, device=device)
        for _ in range(num_tokens):
            positions = torch.arange(ids_BL.size(1), device=device).expand_as(ids_BL)
            logits_BV = self._policy.chunks[0](ids_BL, positions, None)[:, -1].float()
            if temperature:
                chosen = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits_BV.argmax(-1, keepdim=True)
            ids_BL = torch.cat([ids_BL, chosen], 1)
        completions: list[list[int]] = ids_BL[:, -num_tokens:].tolist()
        return completions


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
    config = _run_config(str(start) if is_folder else "", settings)
    device = prepare_process(config, 0)
    model = read_model(str(start)) if is_folder else model_of(start)
    dist.init_process_group(collective_backend(device.type), store=HashStore(), rank=0, world_size=1)
    try:
        join_model_parallel(config.trainer, settings.seed)
        source = HFTensors(str(start)) if is_folder else None
        policy = build_policy(config, model, device, source, lambda: None)
        result = _learn(policy, batches, settings, should_stop)
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
    batches: Iterator[list[Example]],
    settings: SftSettings,
    should_stop: Callable[[int, float, SftModel], bool],
) -> SftResult:
    student, reader = SftModel(policy), reader_of(policy, 1.0)

    def finish(_: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Tensor]:
        return _negative_likelihood(reader, micro, given)

    step, loss = 0, float("nan")
    for step, examples in zip(range(1, settings.max_steps + 1), batches, strict=False):
        micro = _packed(examples, policy.device)
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


def _packed(examples: list[Example], device: torch.device) -> MicroBatch:
    samples, weights, start = [], [], 0
    for prompt, completion in examples:
        samples.append(one_turn(prompt, completion, start))
        weights.append(np.zeros(len(completion), np.float32))
        start += len(completion)
    return micro_batch(
        samples, weights, SequenceLayout(align=1, has_few_lengths=device.type == "cpu"), device
    )


def _run_config(path: str, settings: SftSettings) -> RunConfig:
    """Run config for one process in float32."""
    return RunConfig(
        run=RunSection(dir="", seed=settings.seed),
        data=DataSection(train_files=("unused",)),
        model=ModelSection(path=path, dtype="float32"),
        launch=LaunchSection(threads_per_worker=settings.threads),
        optimizer=OptimizerSection(
            lr=settings.lr,
            lr_warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
        ),
        trainer=TrainerSection(total_iterations=settings.max_steps, train_batch_size=1, mini_batch_size=1),
    )
