"""How far an engine's log-probs may be from the trainer's."""

import math
from dataclasses import replace

import pytest

from tests.unit.core.test_placement import config
from yatt.core.gpus.weight_check import (
    LEAST_ALLOWED,
    QUANTISED_MOST,
    ROUNDINGS_ALLOWED,
    WeightCheck,
    allowed_difference,
    row_differences,
)
from yatt.records.message import WeightsLoaded, pack_floats


def packed(*logprobs: list[float]) -> tuple[bytes, ...]:
    return tuple(pack_floats(row) for row in logprobs)


def test_the_mean_is_over_the_tokens_of_each_row_so_that_none_hides_another() -> None:
    found = row_differences(packed([-1.0, -2.0], [-3.0]), packed([-1.5, -2.0], [-4.0]))
    assert found == pytest.approx([0.25, 1.0])
    assert row_differences((), ()) == []


@pytest.mark.parametrize(
    "got", [[[-1.0]], [[-1.0, -2.0, -3.0]], [[-1.0, math.nan]], [[-1.0, -math.inf]], [[-1.0], [-2.0]], []]
)
def test_what_cannot_be_compared_is_infinitely_far(got: list[list[float]]) -> None:
    assert row_differences(packed([-1.0, -2.0]), packed(*got)) == [math.inf]


@pytest.mark.parametrize("dtype", LEAST_ALLOWED)
def test_what_is_allowed_follows_the_measured_rounding_unless_configured(dtype: str) -> None:
    assert allowed_difference(dtype, 0.0, 0.0) == LEAST_ALLOWED[dtype]
    assert allowed_difference(dtype, 0.0, 0.2) == pytest.approx(ROUNDINGS_ALLOWED * 0.2)
    assert allowed_difference(dtype, 0.05, 0.2) == 0.05


def weight_check(**options: str) -> WeightCheck:
    """For a run whose engines have these options."""
    run = config(1, 1, 1, 0)
    return WeightCheck(replace(run, rollout=replace(run.rollout, engine="vllm", engine_args=options)))


def loaded(difference: float, **more: float) -> WeightsLoaded:
    """The answer of an engine whose log-probs are so far from [-1, -2]."""
    answer = packed([-1.0 - difference, -2.0 - difference])
    facts = {"policy_version": 3, "num_compared": 2, "num_readable": 2, **more}
    return WeightsLoaded(probe_logprobs=answer, **facts)


def fault(check: WeightCheck, answer: WeightsLoaded, rounding: float = 0.0) -> str:
    return check.checked(packed([-1.0, -2.0]), rounding, answer).fault


def test_log_probs_of_sampled_tokens_are_those_that_the_engine_gives_them_itself() -> None:
    check = weight_check(max_num_batched_tokens="512")
    assert fault(check, loaded(0.0, decoded_difference=1e-5)) == ""
    said = fault(check, loaded(0.0, decoded_difference=0.3))
    assert "with policy version 3, log-probs of tokens that it sampled differ from its own scores" in said
    assert "3.00e-01 on average" in said
    assert said.endswith("it has the options max_num_batched_tokens (rollout.engine_args): remove them")
    for wrong in (math.inf, math.nan):
        assert fault(weight_check(), loaded(0.0, decoded_difference=wrong)).endswith("is allowed")


def test_quantised_engines_are_as_far_as_at_first_and_no_farther() -> None:
    assert "differ from the trainer's by 2.00e-01" in fault(weight_check(), loaded(0.2))
    check = weight_check(quantization="fp8")
    assert fault(check, loaded(0.1)) == ""
    assert fault(check, loaded(0.29)) == "", "three times the first"
    assert "3.10e-01 on average in a sequence of text, 3.00e-01 is allowed" in fault(check, loaded(0.31))
    assert "is allowed" in fault(weight_check(quantization="fp8"), loaded(QUANTISED_MOST + 0.01))
    far = weight_check(quantization="fp8")
    assert fault(far, loaded(0.9), rounding=0.1) == "", "one rounding more moves this model by 0.1 already"
    assert fault(weight_check(quantization="fp8"), loaded(0.0, num_readable=0)).startswith("no tensor of")
