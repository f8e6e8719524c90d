"""Numbers of numpy and torch are numbers in every place of a result."""

from typing import Any

import numpy as np
import pytest
import torch

from yatt.reward.results import Result, read_list, read_one


@pytest.mark.parametrize("make", [np.float32, np.int64, torch.tensor, lambda value: np.array([value])])
def test_a_scalar_is_a_number_as_score_measure_and_answer(make: Any) -> None:
    found = read_one({"score": make(2), "other": make(3), "pred": make(4)})
    assert (found.score, found.extra) == (2.0, {"other": 3.0, "pred": 4.0})
    assert float(found.pred) == 4


def test_several_numbers_are_no_number() -> None:
    assert read_one({"score": 1, "many": np.array([1, 2]), "pred": torch.tensor([1, 2])}) == Result(1.0)
    with pytest.raises(ValueError, match="not a number"):
        read_one({"score": np.array([1, 2])})


def test_a_list_of_them() -> None:
    assert read_list(torch.tensor([1.0, 2.0]), 2) == [Result(1.0), Result(2.0)]
    assert read_list([np.float16(1), {"score": torch.tensor(2.0)}], 2) == [Result(1.0), Result(2.0)]


def test_a_numbers_name_is_printable_and_short() -> None:
    found = read_one({"score": 1, "a\x1b[2J\nb": 2, "long" * 100: 3, "\ud800": 4}).extra
    assert all(name.isprintable() and len(name) <= 100 for name in found) and len(found) == 3


@pytest.mark.parametrize(
    ("score", "shown"),
    [
        (b"\x89PNG" * 4096, "its score is <16,384 bytes>, not a number"),
        ("good " * 10_000, "its score is 'good good"),
        ([[10**6000]], "its score is <list>, not a number"),
        (({"a\x1b[2J": 1},), r"its score is \(\{'a\\x1b\[2J': 1\},\), not a number"),
    ],
)
def test_a_score_that_is_none_is_shown_short_and_printable(score: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown) as found:
        read_one(score)
    assert len(str(found.value)) < 300
    assert str(found.value).isprintable()
