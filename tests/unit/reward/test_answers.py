"""verl's `pred` in a function's dict: the answer that a majority vote compares."""

import pytest

from yatt.reward.results import MOST_PRED, read_one


@pytest.mark.parametrize(
    ("pred", "answer"),
    [("42", "42"), (42, "42"), (None, ""), (["42"], ""), ("\ud800", "?"), ("x" * 5000, "x" * MOST_PRED)],
)
def test_an_answer_is_a_text_of_limited_length(pred, answer):
    assert read_one({"score": 1, "pred": pred}).pred == answer


def test_a_result_without_an_answer_has_none():
    assert read_one(0.5).pred == read_one({"score": 0.5}).pred == ""


def test_a_text_is_no_metric():
    assert read_one({"score": 1, "pred": "42", "length": 2}).extra == {"length": 2.0}
