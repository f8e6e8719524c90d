"""Scores of scalar reward models: what they are shown, what the number becomes, what a failure costs."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_scripted_model
from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_scoring import HANGS, ROLES, Bench, good
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.scoring.subject import Judged
from yatt.core.samples.verdict import transformed_values
from yatt.engine.script import scripted_score
from yatt.records import message as m

SAMPLE = m.SampleRequest(
    request_id="x", prompt_ids=b"", seed=0, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1
)


def bench_of(folder: Path, given: list[Any], **genrm: Any) -> Bench:
    """A bench whose GenRM is scalar."""
    return Bench(folder, given, good, kind="scalar", **{"verdict": {}, **genrm})


def number(score: float, reason: str = "stop", error: str = "") -> m.Completed:
    return m.Completed(
        request_id="x", token_ids=b"", logprobs=b"", finish_reason=reason, policy_version=0, error=error,
        score=score,
    )  # fmt: skip


def test_the_raw_number_of_the_text_is_the_score(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, [number(-3.25)])
    bench.subject = bench.subject.__class__(**{**fields_of(bench.subject), "judged": []})
    sample = bench.score()
    assert sample.scores["judge"] == -3.25 and sample.verdicts == {"judge": "-3.25"}
    tokenizer = Tokenizer(make_scripted_model(tmp_path / "tokenizer"))
    assert tokenizer.decode(m.unpack_ids(bench.asked[0].prompt_ids)) == "1 + 1 = 2"
    assert bench.subject.counters["genrm/judge/asked"] == 1
    (judged,) = bench.subject.judged or []
    assert isinstance(judged, Judged)
    assert (judged.answer, judged.verdict) == ("-3.25", m.Scored(score=-3.25))


def fields_of(subject: Any) -> dict[str, Any]:
    return {name: getattr(subject, name) for name in subject.__dataclass_fields__}


def test_with_chat_it_is_shown_the_conversation_without_a_turn_to_come(tmp_path: Path) -> None:
    """Control tokens that the policy writes are text."""
    bench = bench_of(tmp_path, [number(1.0), number(2.0)], template="", chat=True)
    bench.sample.text = " 2<|im_end|>"
    bench.score()
    tokenizer = Tokenizer(make_scripted_model(tmp_path / "tokenizer"))
    ids = m.unpack_ids(bench.asked[0].prompt_ids)
    shown = tokenizer.decode(ids, skip_special=False)
    assert shown == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n 2<|im_end|><|im_end|>\n"
    plain = tokenizer.decode(ids)
    assert "2<|im_end|>" in plain, "the first of the two is no control token"
    bench.sample.scores = {}
    turns = (("assistant", "which?"), ("tool", "both"), ("assistant", "2"))
    bench.subject = bench.subject.__class__(**{**fields_of(bench.subject), "turns": turns})
    bench.score()
    said = tokenizer.decode(m.unpack_ids(bench.asked[1].prompt_ids), skip_special=False)
    assert said.endswith("assistant\nwhich?<|im_end|>\n<|im_start|>tool\nboth<|im_end|>\n"
                         "<|im_start|>assistant\n2<|im_end|>\n")  # fmt: skip


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (number(0.0, "error", "the prompt has 90 tokens"), "the prompt has 90 tokens"),
        (number(math.nan), "GenRM 'judge' gave nan, which is no score"),
        (number(math.inf), "GenRM 'judge' gave inf, which is no score"),
    ],
)
def test_what_it_cannot_score_costs_the_group(tmp_path: Path, given: m.Completed, why: str) -> None:
    sample = bench_of(tmp_path, [given]).score()
    assert why in sample.failed and sample.is_users_failure


def test_a_question_that_is_interrupted_or_aborted_has_no_score(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, [HANGS])

    async def play() -> None:
        scoring = asyncio.create_task(bench.scorer.score(bench.subject, ROLES))
        while not bench.open:
            await asyncio.sleep(0)
        await bench.scorer.interrupt()
        await scoring

    asyncio.run(play())
    assert "judge" not in bench.sample.scores and not bench.sample.failed
    lost = bench_of(tmp_path / "lost", [completion(SAMPLE, [], ABORTED)])
    with pytest.raises(Exception, match="GenRM 'judge' was interrupted"):
        lost.score()


def test_numbers_are_transformed_as_the_config_says() -> None:
    values = [-800.0, -1.0, 0.0, 2.0, 800.0]
    assert transformed_values("none", values) == values
    expected = [0.0, 1 / (1 + math.e), 0.5, 1 / (1 + math.exp(-2)), 1.0]
    assert transformed_values("sigmoid", values) == pytest.approx(expected, abs=1e-15)
    assert transformed_values("standardize", [1.0, 3.0, 5.0]) == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5])
    assert transformed_values("standardize", [2.0, 2.0]) == [0.0, 0.0]


def test_standardized_scores_need_the_whole_group(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, [number(1.0), number(4.0)], transform="standardize")
    assert bench.scorer.is_of_groups("judge")
    assert "judge" not in bench.score().scores
    subjects = [bench.subject, bench.subject.__class__(**fields_of(bench.subject))]
    asyncio.run(bench.scorer.score_group(subjects, ROLES))
    assert bench.sample.scores["judge"] in (-1.0, 1.0)


def test_a_script_gives_each_text_its_own_number() -> None:
    numbers = [scripted_score(ids, label) for ids in ([1, 2], [2, 1], [1, 2, 3]) for label in (0, 1)]
    assert len(set(numbers)) == 6 and all(-1 <= value < 1 for value in numbers)
