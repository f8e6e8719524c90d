"""Engines that write nothing: scalar reward models give the raw number of the head for the last token,
teachers the log-probs of a completion's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from tests.contract.test_engine import MAX_MODEL_TOKENS, options_for, transformers_logprobs
from tests.reward_models import expected_values, make_reward_model
from tests.tiny_models import make_qwen3, make_scripted_model
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine
from yatt.engine.script import scripted_logprobs
from yatt.records import message as m

TEXTS = [[10, 20, 30, 40, 50, 60], [7], [*range(100, 140)], [5, 6, 2], [5, 7, 2]]
"""Two of them end with the end of a text, which is the padding token too."""


@dataclass
class Subject:
    """A started engine, and what it has to give for `TEXTS`."""

    engine: Engine
    expected: list[float]


@pytest.fixture(scope="module", params=["transformers-1-0", "transformers-3-2", "vllm-1-0", "vllm-3-2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    kind, labels, label = request.param.split("-")
    pytest.importorskip(kind)
    model = make_reward_model(tmp_path_factory.mktemp(kind) / "model", labels=int(labels))
    engine = build_engine(kind, options_for(model, label=int(label), deterministic=labels == "1"))
    engine.start()
    yield Subject(engine, [values[int(label)] for values in expected_values(model, TEXTS)])
    engine.close()


def asked(name: str, ids: list[int]) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=name,
        prompt_ids=m.pack_ids(ids),
        seed=0,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=1,
    )


def answers(engine: Engine) -> dict[str, m.Completed]:
    found: dict[str, m.Completed] = {}
    while engine.is_busy:
        found |= {each.request_id: each for each in engine.step()}
    return found


def test_numbers_are_those_of_transformers_whatever_else_is_in_the_batch(subject: Subject) -> None:
    for index, ids in enumerate(TEXTS):
        subject.engine.add(asked(str(index), ids))
        subject.engine.add(asked(str(index), ids))  # twice is once
    found = answers(subject.engine)
    assert {each.finish_reason for each in found.values()} == {"stop"} and len(found) == len(TEXTS)
    assert all(not each.token_ids and not each.logprobs for each in found.values())
    scores = [found[str(index)].score for index in range(len(TEXTS))]
    assert scores == pytest.approx(subject.expected, abs=3e-6)
    assert len({round(score, 4) for score in scores}) == len(TEXTS), "texts that end alike differ, too"


def test_a_text_that_is_too_long_is_refused_alone_and_others_can_be_aborted(subject: Subject) -> None:
    with pytest.raises(ValueError, match=f"the prompt has {MAX_MODEL_TOKENS} tokens"):
        subject.engine.add(asked("long", [9] * MAX_MODEL_TOKENS))
    subject.engine.add(asked("kept", TEXTS[0]))
    subject.engine.add(asked("ended", TEXTS[2]))
    (ended,) = subject.engine.abort(("ended",))
    assert ended.finish_reason == "abort"
    assert answers(subject.engine)["kept"].score == pytest.approx(subject.expected[0], abs=3e-6)


@pytest.mark.parametrize("kind", ["scripted", "transformers", "vllm"])
def test_a_teacher_gives_each_token_of_a_completion_its_log_prob(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    pytest.importorskip(kind) if kind != "scripted" else None
    folder = tmp_path_factory.mktemp(kind) / "model"
    model = make_scripted_model(folder) if kind == "scripted" else make_qwen3(folder, tied=True)
    engine = build_engine(kind, options_for(model, is_teacher=True, deterministic=False))
    engine.start()
    try:
        for index, ids in enumerate(TEXTS[2:]):
            engine.add(msgspec.structs.replace(asked(str(index), ids), scored_from=index + 1))
        (ended,) = engine.abort(("2",))
        assert ended.finish_reason == "abort"
        found = answers(engine)
        assert found.keys() == {"0", "1"}
        for index, ids in enumerate(TEXTS[2:4]):
            whole = scripted_logprobs(0, ids) if kind == "scripted" else transformers_logprobs(model, ids)
            scored = list(m.unpack_floats(found[str(index)].logprobs))
            assert scored == pytest.approx(whole[index:], abs=5e-6)
            assert not found[str(index)].token_ids and found[str(index)].finish_reason == "stop"
    finally:
        engine.close()
