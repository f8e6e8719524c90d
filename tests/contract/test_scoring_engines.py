"""Engines that write nothing: scalar reward models give the raw number of the head for the last token,
teachers the log-probs of a completion's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.contract.test_engine import MAX_MODEL_TOKENS, options_for, transformers_logprobs
from tests.reward_models import expected_values, make_reward_model
from tests.tiny_models import make_qwen3, make_scripted_model, reference_model
from yatt.core.samples.teaching import likeliest_fault
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine
from yatt.engine.script import scripted_logprobs
from yatt.errors import WorkerFailed
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
        with pytest.raises(ValueError, match="samples no tokens, so it has no log-probs of watched ones"):
            engine.add(msgspec.structs.replace(asked("w", TEXTS[2]), watched=(3,)))
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


def tables(model: str, ids: list[int]) -> Any:
    """transformers' log-probs of the whole vocabulary after each token but the last."""
    import torch

    with torch.no_grad():
        return reference_model(model).float()(torch.tensor([ids])).logits.log_softmax(-1)[0, :-1]


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_teacher_gives_the_likeliest_tokens_at_each_place(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """More than vLLM gives by default (20). Where it scores a token that is not among them, its row has one
    more. An engine of vLLM has to start for it; no whole run."""
    pytest.importorskip(kind)
    count, model = 33, make_qwen3(tmp_path_factory.mktemp(kind) / "model", tied=True)
    engine = build_engine(kind, options_for(model, is_teacher=True, num_likeliest=count, deterministic=False))
    engine.start()
    try:
        for index, ids in enumerate(TEXTS[2:]):
            engine.add(msgspec.structs.replace(asked(str(index), ids), scored_from=index + 1))
        (ended,) = engine.abort(("2",))
        assert ended.likeliest is None
        found = answers(engine)
    finally:
        engine.close()
    is_among = set()
    for index, ids in enumerate(TEXTS[2:4]):
        answer, table = found[str(index)], tables(model, ids)[index:]
        said = list(m.unpack_floats(answer.logprobs))
        chosen = [table[at, token].item() for at, token in enumerate(ids[index + 1 :])]
        assert said == pytest.approx(chosen, abs=3e-6)
        likeliest = answer.likeliest
        assert likeliest is not None and likeliest.count == count
        assert likeliest_fault(likeliest, count, len(said)) == ""
        for at, (row, token) in enumerate(zip(table, ids[index + 1 :], strict=True)):
            here = likeliest.of_tokens(at, at + 1)
            tokens, logprobs = m.unpack_ids(here.ids), list(m.unpack_floats(here.logprobs))
            assert logprobs == pytest.approx(row.topk(count).values.tolist(), abs=3e-6)
            assert logprobs == pytest.approx(row[tokens].tolist(), abs=3e-6), "of the tokens that it names"
            assert len(set(tokens)) == count
            is_among.add(token in tokens)
    assert is_among == {True, False}


def test_a_scripted_teacher_gives_likeliest_tokens_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For rehearsals."""
    model = make_scripted_model(tmp_path_factory.mktemp("scripted") / "model")
    engine = build_engine("scripted", options_for(model, is_teacher=True, num_likeliest=3))
    engine.start()
    engine.add(msgspec.structs.replace(asked("0", TEXTS[0]), scored_from=2))
    (answer,) = answers(engine).values()
    assert answer.likeliest is not None and likeliest_fault(answer.likeliest, 3, 4) == ""
    assert m.unpack_floats(answer.likeliest.logprobs) == [-1.0, -2.0, -3.0] * 4


def test_rows_of_another_vllm_are_refused() -> None:
    pytest.importorskip("torch")
    from yatt.engine.scoring import flat_rows

    class Rows(NamedTuple):
        token_ids: list[int]
        logprobs: list[float]

    own, likeliest = flat_rows(Rows([5, 1, 2, 2, 2, 9], [-3, -1, -2, -0.5, -0.5, -4]), [5, 2], 2)
    assert m.unpack_floats(own) == [-3, -0.5] and m.unpack_ids(likeliest.ids) == [1, 2, 2, 9]
    for rows in (Rows([1, 2, 5, 2, 2, 9], [0.0] * 6), Rows([5, 1, 2, 9], [0.0] * 4)):
        with pytest.raises(WorkerFailed, match="rows of log-probs are not a token and the likeliest ones"):
            flat_rows(rows, [5, 2], 2)
