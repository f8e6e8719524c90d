"""The run's algorithm: the configured one, or a user's own from a file.

Every call of a user's algorithm is checked, and what it raises is named with file and line.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from yatt.adapters.inputs.user_module import load_module, where_raised
from yatt.algo.advantage import RewardTable
from yatt.algo.algorithm import Algorithm, ConfiguredAlgorithm, Needs
from yatt.algo.loss import TokenLosses
from yatt.algo.view import LossView
from yatt.config.schema import AlgorithmSection, RunConfig
from yatt.errors import ConfigError, YattError, words_of

T = TypeVar("T")
METHODS = ("needs", "advantages", "loss")
MOST_SHOWN = 300


def algorithm_of(config: RunConfig) -> Algorithm:
    """Makes the algorithm.

    Raises:
        ConfigError: the file cannot be imported, or does not give an algorithm; or the algorithm compares
            completions of one prompt and there is only one.
    """
    section = config.algorithm
    made: Algorithm = OwnAlgorithm(section) if section.path else ConfiguredAlgorithm(section)
    if made.needs.group_baseline and config.rollout.n < 2 and not config.is_given:
        raise ConfigError("rollout.n: the algorithm compares completions of one prompt; write 2 or more.")
    return made


class OwnAlgorithm:
    """Makes and calls the user's algorithm.

    Raises:
        ConfigError: the file cannot be imported, or does not give an algorithm.
    """

    def __init__(self, section: AlgorithmSection) -> None:
        self._path = Path(section.path).absolute()
        factory = getattr(load_module(self._path, "algorithm.path"), section.factory, None)
        if not callable(factory):
            raise ConfigError(f"algorithm.factory: {self._path} has no function {section.factory}.")
        self._made: Any = self._guarded(lambda: factory(section))
        missing = [name for name in METHODS if not hasattr(self._made, name)]
        if missing:
            raise ConfigError(
                f"algorithm.factory: what {section.factory} in {self._path} returns has no "
                f"{', '.join(missing)}; see docs/extending.md."
            )
        needs = self._guarded(lambda: self._made.needs)
        if not isinstance(needs, Needs):
            self._refuse(f"needs is {type(needs).__name__}, not Needs")
        self._needs: Needs = needs

    @property
    def needs(self) -> Needs:
        """See `Algorithm`."""
        return self._needs

    def advantages(self, table: RewardTable) -> Tensor:
        """See `Algorithm`.

        Raises:
            ConfigError: it raised, or its result is not one finite number per token.
        """
        found: Tensor = self._guarded(lambda: self._made.advantages(table))
        self._check("advantages", found, int(table.lengths_N.sum()))
        if not bool(torch.isfinite(found).all()) and bool(torch.isfinite(table.rewards_N).all()):
            self._refuse("advantages gives numbers that are not finite for rewards that are")
        return found.float()

    def loss(self, view: LossView) -> TokenLosses:
        """See `Algorithm`.

        Raises:
            ConfigError: it raised, or its result is not one differentiable number per token.
        """
        found: TokenLosses = self._guarded(lambda: self._made.loss(view))
        if not isinstance(found, TokenLosses):
            self._refuse(f"loss gives {type(found).__name__}, not TokenLosses")
        for name in ("losses_T", "is_clipped_T", "is_dual_clipped_T", "approx_kl_T"):
            self._check(f"loss: {name}", getattr(found, name), len(view.logprobs_T))
        if view.logprobs_T.requires_grad and len(view.logprobs_T) and not found.losses_T.requires_grad:
            self._refuse("loss: losses_T does not depend on view.logprobs_T, so nothing would be learnt")
        return found

    def _check(self, what: str, found: object, count: int) -> None:
        if not isinstance(found, Tensor):
            self._refuse(f"{what} is {type(found).__name__}, not a tensor")
        elif found.shape != (count,):
            self._refuse(f"{what} has shape {tuple(found.shape)}; needed is one entry per token, ({count},)")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"algorithm.path: {self._path}: {why}.")

    def _guarded(self, work: Callable[[], T]) -> T:
        """Runs the user's code. Failures of the machine or of another rank are not the user's."""
        try:
            return work()
        except (YattError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if _is_of_collectives(error):
                raise
            says = words_of(error)[:MOST_SHOWN]
            raise ConfigError(f"algorithm.path: {where_raised(error, self._path)}: {says}.") from error


def _is_of_collectives(error: Exception) -> bool:
    """Whether it was raised in a collective operation, because another rank has ended for example."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed/" in frame.filename for frame in frames)
