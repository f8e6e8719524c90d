"""The run file's section about the critic, the value model of PPO."""

from dataclasses import dataclass, field
from typing import Annotated

from yatt.config.sections.ranges import COUNT, COUNT_OR_NONE, FILE, OPERATIONAL, at_least
from yatt.config.sections.training import OptimizerSection

CRITIC_LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """The critic: a model that says before each token what reward it expects (PPO). A run with
    algorithm.adv_estimator: gae has one, in the trainer's layout; other runs have none."""

    path: Annotated[str, FILE] = ""
    """Hugging Face folder of its first weights, with the policy's tokenizer; empty: model.path. A tensor
    `score.weight` of one row, as reward models have it, is its value head; without one all values are 0 at
    first."""

    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=CRITIC_LR))
    """Its own optimizer and schedule."""

    value_clip: Annotated[float, at_least(0)] = 0.5
    """Values move at most this far from those before the iteration, as far as the loss pays for it
    (verl's cliprange_value); 0 is off."""

    epochs: Annotated[int, COUNT] = 1
    """Passes over the rollout batch per iteration, in mini-batches of trainer.mini_batch_size."""

    swap: Annotated[bool, OPERATIONAL] = False
    """Policy and critic take turns on the GPUs: one is in its host copy while the other works, so that a GPU
    needs memory for the larger one instead of both. Each iteration then copies the critic in and out, and the
    policy in once more (out too, where rollout has GPUs of its own)."""

    warmup_iterations: Annotated[int, COUNT_OR_NONE] = 0
    """First iterations in which only the critic is trained and the policy stays as it is."""
