"""Log-probs of watched tokens: what is wrong with them is told by the token, whatever a library gave."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_engine import options_for, sample
from yatt.engine.protocol import WatchedRows, begin_watching
from yatt.engine.vllm import Running
from yatt.records import message as m


def completed(reason: str = "stop") -> m.Completed:
    return m.Completed(
        request_id="r", token_ids=m.pack_ids([5, 6]), logprobs=m.pack_floats([-1.0, -2.0]),
        finish_reason=reason, policy_version=0,
    )  # fmt: skip


def test_rows_are_given_in_the_order_asked() -> None:
    rows = WatchedRows((8, 2))
    rows.add([-1.0, -math.inf])
    rows.add([-0.25, -2.0])
    assert m.unpack_floats(rows.added_to(completed()).watched) == [-1.0, -math.inf, -0.25, -2.0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([-1.0, None], "the engine has left out the log-prob of watched token 2"),
        ([math.nan, -1.0], "the log-prob of watched token 8 is not a number"),
    ],
)
def test_a_row_that_is_none_refuses_the_request_and_the_first_cause_is_told(row: Any, says: str) -> None:
    rows = WatchedRows((8, 2))
    for each in ([-1.0, -1.0], row, [None, None], [-1.0, -1.0]):
        rows.add(each)
    refused = rows.added_to(completed())
    assert (refused.finish_reason, refused.token_ids, refused.logprobs) == ("error", b"", b"")
    assert refused.error.startswith(says) and refused.watched == b""
    aborted = rows.added_to(completed("abort"))
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", b""), "it is not wanted any more"


def step_of(*rows: dict[int, float]) -> Any:
    """vLLM's output of a step in which token 5 was sampled, with these log-probs."""
    listed = [{token: SimpleNamespace(logprob=each) for token, each in row.items()} for row in rows]
    return SimpleNamespace(token_ids=[5] * len(rows), logprobs=listed)


def test_a_token_that_vllm_leaves_out_is_found_out() -> None:
    """As the rejection sampler of its speculative decoding does: it lists the likeliest tokens."""
    running = Running(watched=WatchedRows((5, 9)))
    running.take(step_of({5: -1.0, 9: -3.0}))
    assert running.watched is not None and not running.watched.fault
    running.take(step_of({5: -1.0, 9: -3.0}, {5: -0.5, 4: -0.25}))
    assert running.watched.fault == "the engine has left out the log-prob of watched token 9"
    assert (running.token_ids, running.logprobs) == ([5, 5, 5], [-1.0])
    running = Running(watched=WatchedRows((5, 9)))
    running.take(SimpleNamespace(token_ids=[5, 6], logprobs=None))
    assert running.watched is not None
    assert running.watched.fault == "the engine has left out the log-prob of watched token 5"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arguments": {"speculative_config": {"method": "ngram"}}}, "with engine_args.speculative_config"),
        ({"label": 0}, "samples no tokens"),
        ({"is_teacher": True}, "samples no tokens"),
    ],
)
def test_engines_that_cannot_give_them_say_why(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        begin_watching(sample("r", watched=(3,)), options_for("m", **options), 10)
