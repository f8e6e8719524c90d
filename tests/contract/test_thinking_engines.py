"""A judge that thinks, on real engines: its verdict is the one that the model has after the whole thought."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_engine import ids_of, options_for, reference_rows, run, sample, shares_of
from tests.runs import RunFile
from tests.tiny_models import make_qwen3, reference_model
from tests.unit.control.test_group_scoring import ROLES
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine
from yatt.records import message as m
from yatt.reward.__main__ import read_verdict

BUDGET, VERDICT = 24, 3
LIMIT = 200
WORDS = ("7", "8")
COMPLETIONS = [f"one plus {word} is three" for word in ("two", "a model", "numbers", "three", "text", "")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_qwen3(tmp_path_factory.mktemp("judge"), tied=False)


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, model: str) -> Iterator[tuple[str, Engine]]:
    pytest.importorskip(request.param)
    engine = build_engine(request.param, options_for(model, max_model_tokens=LIMIT))
    engine.start()
    yield request.param, engine
    engine.close()


def judged_by(engine: Engine, config: RunConfig) -> list[tuple[Judged, float | None, dict[str, float]]]:
    """Each completion's answer, score and measures."""
    found: list[tuple[Judged, float | None, dict[str, float]]] = []
    genrm = config.genrms[0]

    async def complete(_: str, asked: m.SampleRequest) -> m.Completed:
        return run(engine, asked)[asked.request_id]

    async def abort(role: str, request_ids: tuple[str, ...]) -> None:
        raise AssertionError(f"{request_ids} of {role} are not aborted here")

    async def call(order: Any) -> m.Message:
        return read_verdict(order, genrm.verdict)

    judge = Judge(config, complete, abort, call, num_nodes=1, say=print)
    scorer = Scorer(config, judge, score_sources(config, judge, call))

    async def every() -> None:
        for number, text in enumerate(COMPLETIONS):
            group, judged = new_group(number, 0, "p", [1, 2], 1), list[Judged]()
            group.samples[0].text, group.samples[0].finish_reason = text, "stop"
            row = Row(prompt="p", data_source="", ground_truth="", raw={})
            await scorer.score(
                Subject(
                    group=group, sample=group.samples[0], row=row, ref=m.RowRef(0, 0, 0), counters=Counter(),
                    judged=judged,
                ),
                ROLES,
            )  # fmt: skip
            found.append((judged[0], group.samples[0].scores.get("judge"), group.samples[0].extras))

    asyncio.run(every())
    return found


def greedy(model: str, ids: list[int], count: int, eos: int = 2) -> list[int]:
    """The likeliest tokens, one after the other, by transformers."""
    import torch

    reference, said = reference_model(model).float(), list[int]()
    while len(said) < count and (not said or said[-1] != eos):
        with torch.no_grad():
            said.append(int(reference(torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
    return said


def test_the_verdict_is_the_one_after_the_whole_thought(
    engine: tuple[str, Engine], model: str, tmp_path: Path
) -> None:
    """The thought is what the engine samples from the question alone. The verdict is what the model, by
    transformers, says after question, thought and end: freely, or, where the engine keeps to a form, of the
    words. Thoughts end at a text that the model writes, or are cut."""
    kind, running = engine
    tokenizer = Tokenizer(model)
    question = tokenizer.encode("Is it right? " + COMPLETIONS[0])
    whole = greedy(model, question, BUDGET)
    end = next(
        text
        for each in whole[4:]
        if (text := tokenizer.decode([each]).strip()).isascii() and text.isprintable() and len(text) > 0
        and text not in tokenizer.decode(whole[: whole.index(each)])
    )  # fmt: skip
    words = [tokenizer.encode_plain(each)[0] for each in WORDS]
    is_bound = kind == "vllm"
    bound = {"choices": WORDS, "read": "soft", "grid": 0.0} if is_bound else {"pattern": "([78])"}
    section = {
        "name": "judge", "model": model, "engine": kind, "template": "Is it right? {completion}",
        "retries": 0, "max_tokens": VERDICT, "max_model_tokens": LIMIT, "dtype": "float32",
        "think": {"budget": BUDGET, "end": f" {end}\n"}, "verdict": {"scores": {"7": 1.0, "8": 0.0}, **bound},
    }  # fmt: skip
    run_file = RunFile(tmp_path, {"genrms": [section], "launch": {"nodes": 1}, "rewards": []})
    config = load_run_config([run_file.write()], [])
    after = tokenizer.encode_plain(f" {end}\n")
    seen: Counter[bool] = Counter()
    for (judged, score, extras), text in zip(judged_by(running, config), COMPLETIONS, strict=True):
        question = tokenizer.encode("Is it right? " + text)
        asked = sample("whole", prompt_ids=m.pack_ids(question), temperature=0.0, max_tokens=BUDGET)
        thought = ids_of(run(running, asked)["whole"])
        assert thought == greedy(model, question, BUDGET)
        while thought and (thought[-1] == 2 or end in tokenizer.decode(thought)):
            thought.pop()
        assert judged.thought == tokenizer.decode(thought)
        assert judged.is_thought_cut == (len(thought) == BUDGET)
        seen[judged.is_thought_cut] += 1
        told = [*question, *thought, *after]
        if is_bound:
            seven, eight = shares_of(reference_rows(model, [*told, 0], tuple(words), 0.0)[-1])
            assert judged.answer == WORDS[seven < eight]
            assert score == pytest.approx(seven, abs=1e-4)
            assert extras["judge/confidence"] == pytest.approx(max(seven, eight), abs=1e-4)
            assert 0.5 <= extras["judge/confidence"] < 1 - 1e-6
        else:
            assert judged.answer == tokenizer.decode(greedy(model, told, VERDICT))
    assert seen[False] and math.isclose(seen.total(), len(COMPLETIONS))
