"""A user's algorithm that is wrong is named with its file and line; it never trains on wrong maths."""

from pathlib import Path

import pytest
import torch

from yatt.algo.advantage import RewardTable
from yatt.algo.view import LossView
from yatt.config.schema import AlgorithmSection
from yatt.errors import ConfigError
from yatt.trainer.own_algorithm import OwnAlgorithm

RIGHT = """
import torch
from yatt.algo.algorithm import Needs
from yatt.algo.loss import TokenLosses

class Mine:
    needs = Needs()

    def advantages(self, table):
        return table.rewards_N.repeat_interleave(table.lengths_N).float()

    def loss(self, view):
        zeros = torch.zeros_like(view.logprobs_T)
        return TokenLosses(-view.advantages_T * view.logprobs_T, zeros, zeros, zeros)

def make_algorithm(section):
    return Mine()
"""
TABLE = RewardTable(
    rewards_N=torch.tensor([1.0, 0.5]), groups_N=torch.tensor([0, 0]), lengths_N=torch.tensor([2, 3])
)


def view() -> LossView:
    logprobs = torch.zeros(5, requires_grad=True)
    plain = torch.zeros(5)
    return LossView(
        logprobs_T=logprobs, old_T=plain, sampler_T=plain, advantages_T=torch.ones(5),
        samples_T=torch.tensor([0, 0, 1, 1, 1]), lengths_S=torch.tensor([2, 3]),
    )  # fmt: skip


def made(folder: Path, text: str) -> OwnAlgorithm:
    (folder / "own.py").write_text(text)
    return OwnAlgorithm(AlgorithmSection(path=str(folder / "own.py")))


def test_a_right_one_is_passed_on(tmp_path: Path) -> None:
    own = made(tmp_path, RIGHT)
    assert own.advantages(TABLE).tolist() == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert own.loss(view()).losses_T.requires_grad
    assert own.needs == type(own.needs)()


ADVANTAGES = "return table.rewards_N.repeat_interleave(table.lengths_N).float()"
LOSSES = "-view.advantages_T * view.logprobs_T"


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (ADVANTAGES, "return table.rewards_N[:, None].repeat(1, 5)", r"has shape \(2, 5\); needed"),
        (ADVANTAGES, ADVANTAGES + "[:, None]", r"advantages has shape \(5, 1\)"),
        (ADVANTAGES, "return 1.0", "advantages is float, not a tensor"),
        (ADVANTAGES, "return None", "advantages is NoneType, not a tensor"),
        (ADVANTAGES, ADVANTAGES + " / 0", "advantages gives numbers that are not finite"),
        (ADVANTAGES, "return table.rewards[0]", r"own.py:10: AttributeError: .*rewards"),
        (LOSSES, "view.logprobs_T[:1]", r"losses_T has shape \(1,\); needed is one entry per token, \(5"),
        (LOSSES, "view.logprobs_T.sum()", r"losses_T has shape \(\)"),
        (LOSSES, "view.logprobs_T.detach()", "losses_T does not depend on view.logprobs_T"),
        (f"TokenLosses({LOSSES}, zeros, zeros, zeros)", "zeros", "loss gives Tensor, not TokenLosses"),
        (f"{LOSSES}, zeros,", f"{LOSSES}, None,", "loss: is_clipped_T is NoneType"),
        (LOSSES, "view.nothing", r"own.py:14: AttributeError"),
        ("needs = Needs()", "needs = {}", "needs is dict, not Needs"),
        ("return Mine()", "return 1 / 0", r"own.py:17: ZeroDivisionError"),
        ("return Mine()", "raise ValueError('x' * 10**6)", r"own.py:17: ValueError: x{280,290}\.$"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_named(tmp_path: Path, was: str, now: str, says: str) -> None:
    assert was in RIGHT
    with pytest.raises(ConfigError, match=says) as caught:
        own = made(tmp_path, RIGHT.replace(was, now))
        own.advantages(TABLE)
        own.loss(view())
    assert str(caught.value).startswith("algorithm.path: ") and len(str(caught.value)) < 600


def test_the_end_of_another_rank_is_not_the_users_mistake(tmp_path: Path) -> None:
    """Collectives fail in torch.distributed, below a line of the user's file."""
    own = made(tmp_path, RIGHT.replace(LOSSES, "torch.distributed.all_reduce(view.logprobs_T)"))
    with pytest.raises(Exception, match="process group") as caught:
        own.loss(view())
    assert not isinstance(caught.value, ConfigError)
