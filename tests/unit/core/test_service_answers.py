"""What is read of a service's log-probs: of good answers everything, of others nothing, never an error."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from yatt.core.requests.answers import MOST_ALTERNATIVES, read_answer, refuses_logprobs
from yatt.records.judged import LOGPROBS_LEFT_OUT, LOGPROBS_UNREADABLE, ListedToken, Said


def answer(logprobs: Any, text: str = "yes") -> bytes:
    choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}
    return json.dumps({"choices": [choice]}).encode()


def read(content: bytes) -> Said:
    said = read_answer(content, wants_logprobs=True)
    assert said is not None
    plain = read_answer(content)
    assert plain == Said(text=said.text, finish_reason=said.finish_reason), "not asked, not read"
    assert bool(said.listed) == (not said.lacks_logprobs)
    return said


def entry(token: Any, logprob: Any, **others: Any) -> dict[str, Any]:
    top = [{"token": other, "logprob": each} for other, each in others.items()]
    return {"token": token, "logprob": logprob, "top_logprobs": top}


def test_tokens_are_listed_with_what_could_have_stood_there() -> None:
    """In the form that OpenAI's own client reads."""
    types = pytest.importorskip("openai.types.chat.chat_completion")
    tokens = pytest.importorskip("openai.types.chat.chat_completion_token_logprob")
    top_of, texts = tokens.TopLogprob, [("Y", -0.25, {"Y": -0.25, "N": -1.5}), ("!", -2.0, {".": -0.1})]
    content = [
        tokens.ChatCompletionTokenLogprob(
            token=text, logprob=own, bytes=list(text.encode()),
            top_logprobs=[top_of(token=t, logprob=p, bytes=list(t.encode())) for t, p in top.items()],
        )
        for text, own, top in texts
    ]  # fmt: skip
    message = {"role": "assistant", "content": "Y!"}
    choice = types.Choice(
        finish_reason="stop", index=0, message=message, logprobs=types.ChoiceLogprobs(content=content)
    )
    whole = types.ChatCompletion(
        id="1", choices=[choice], created=1, model="m", object="chat.completion"
    ).model_dump_json()
    listed = (
        ListedToken(text="Y", alternatives={"Y": -0.25, "N": -1.5}),
        ListedToken(text="!", alternatives={".": -0.1, "!": -2.0}),
    )
    assert read(whole.encode()) == Said(text="Y!", finish_reason="stop", listed=listed)


def test_the_form_of_completions_is_read_too() -> None:
    old = {
        "tokens": ["Y", "!"], "token_logprobs": [-0.25, -2], "text_offset": [0, 1],
        "top_logprobs": [{"Y": -0.25, "N": -1.5}, None],
    }  # fmt: skip
    first, second = read(answer(old)).listed
    assert first == ListedToken(text="Y", alternatives={"Y": -0.25, "N": -1.5})
    assert second == ListedToken(text="!", alternatives={"!": -2.0})
    assert read(answer(old | {"token_logprobs": [-0.25]})).lacks_logprobs == LOGPROBS_UNREADABLE


def test_texts_that_are_equal_count_once_and_only_so_many_are_read() -> None:
    twice = [{"token": "\ufffd", "logprob": each} for each in (-3.0, -1.0, -2.0)]
    many = [{"token": f"t{number}", "logprob": -1.0 - number} for number in range(50)]
    first, second = read(answer({"content": [
        {"token": "\ufffd", "logprob": -1.0, "top_logprobs": twice + many[:1]},
        {"token": "own", "logprob": -9.0, "top_logprobs": many},
    ]})).listed  # fmt: skip
    assert first.alternatives == {"\ufffd": -1.0, "t0": -1.0}
    assert len(second.alternatives) == MOST_ALTERNATIVES + 1 and second.alternatives["own"] == -9.0


@pytest.mark.parametrize("least", ["null", "-Infinity"])
def test_a_token_that_cannot_stand_there_has_no_chance(least: str) -> None:
    content = answer({"content": [entry("Y", 0.0005, Y=0.0005, N="LEAST")]}).replace(
        b'"LEAST"', least.encode()
    )
    (token,) = read(content).listed
    assert token.alternatives == {"Y": 0.0, "N": -math.inf}, "rounding above 0 is none"


def test_half_a_character_does_not_cost_the_log_probs() -> None:
    (token,) = read(answer({"content": [entry("\ud83d", -1.0, Y=-2.0)]}, "a \ud83d")).listed
    assert token == ListedToken(text="?", alternatives={"Y": -2.0, "?": -1.0})


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, {"content": []}, {"refusal": None}, {"content": [entry("Y", -1.0)]},
     {"content": [entry("Y", -1.0, Y=-1.0)]}, {"tokens": ["Y"], "token_logprobs": [-1.0]}],
)  # fmt: skip
def test_an_answer_without_alternatives_has_left_them_out(logprobs: Any) -> None:
    said = read(answer(logprobs))
    assert (said.text, said.lacks_logprobs) == ("yes", LOGPROBS_LEFT_OUT)


GOOD = entry("Y", -1.0, Y=-1.0, N=-2.0)


@pytest.mark.parametrize(
    "logprobs",
    [
        [], "none", 3, True, {"content": {}}, {"content": [3]}, {"content": [GOOD, {}]},
        {"content": [GOOD, entry(3, -1.0)]}, {"content": [GOOD, entry("Y", "-1")]},
        {"content": [GOOD, entry("Y", True)]}, {"content": [GOOD, entry("Y", 0.5)]},
        {"content": [GOOD, entry("Y", float("nan"))]}, {"content": [GOOD, entry("Y", float("inf"))]},
        {"content": [GOOD, entry("Y", -1.0, N=2)]}, {"content": [GOOD, entry("Y" * 1025, -1.0)]},
        {"content": [GOOD, entry("Y", -1.0, **{"N" * 1025: -1.0})]},
        {"content": [GOOD, GOOD | {"top_logprobs": {"Y": -1.0}}]}, {"content": [GOOD, None]},
        {"tokens": "Y", "token_logprobs": [-1.0], "top_logprobs": [{"Y": -1.0}]},
    ],
)  # fmt: skip
def test_log_probs_of_another_shape_are_not_read_and_the_text_is(logprobs: Any) -> None:
    said = read(answer(logprobs))
    assert (said.text, said.lacks_logprobs) == ("yes", LOGPROBS_UNREADABLE)


def test_a_tower_of_lists_is_not_read() -> None:
    deep = (
        b'{"choices": [{"message": {"content": "yes"}, "logprobs": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}]}"
    )
    assert read_answer(deep, wants_logprobs=True) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["content", "token", "logprob", "top_logprobs", "tokens", "token_logprobs"]),
            inner,
        )
    ),
)
NUMBERS = st.none() | st.floats(max_value=0.0) | st.floats() | st.integers()
ENTRIES = st.builds(
    lambda token, logprob, top: {"token": token, "logprob": logprob, "top_logprobs": top},
    st.text(st.characters()) | JSON,
    NUMBERS,
    st.none()
    | st.lists(st.builds(lambda t, p: {"token": t, "logprob": p}, st.text(st.characters()), NUMBERS)),
)


@given(JSON | st.builds(lambda content: {"content": content}, st.lists(ENTRIES)))
def test_whatever_log_probs_a_service_sends_are_numbers_or_a_reason(logprobs: Any) -> None:
    said = read(answer(logprobs))
    assert said.text == "yes" and said.lacks_logprobs in ("", LOGPROBS_LEFT_OUT, LOGPROBS_UNREADABLE)
    for token in said.listed:
        token.text.encode()
        assert token.alternatives[token.text] <= 0 and len(token.alternatives) <= MOST_ALTERNATIVES + 1
        assert all(each <= 0 for each in token.alternatives.values()), "and a number"
        "".join(token.alternatives).encode()


@given(st.binary() | st.builds(lambda value: json.dumps(value).encode(), JSON))
def test_whatever_bytes_an_error_has_it_names_log_probs_or_not(content: bytes) -> None:
    assert refuses_logprobs(content) in (True, False)


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        ({"error": {"message": "You are not allowed to request logprobs from this.", "param": None}}, True),
        ({"error": {"message": "Unsupported parameter", "param": "top_logprobs"}}, True),
        ({"error": "top_logprobs must be at most 5"}, True),
        ({"object": "error", "message": "`logprobs` is not supported", "code": 400}, True),
        ({"detail": [{"loc": ["body", "logprobs"], "msg": "Extra inputs are not permitted"}]}, True),
        ({"detail": "logprobs is unknown"}, True),
        ({"detail": [{"loc": ["body", "seed"], "msg": "no", "input": {"logprobs": True}}]}, False),
        ({"error": {"message": "too long", "param": "messages"}, "request": {"logprobs": True}}, False),
        ({"error": {"message": ["logprobs"]}}, False),
        (["logprobs"], False),
        ({}, False),
    ],
)  # fmt: skip
def test_an_error_that_names_log_probs_is_about_them_and_one_that_quotes_the_request_is_not(
    error: Any, is_named: bool
) -> None:
    assert refuses_logprobs(json.dumps(error).encode()) is is_named


def test_an_error_in_words_is_read_too() -> None:
    assert refuses_logprobs(b"this model has no logprobs") and not refuses_logprobs(b"no")
