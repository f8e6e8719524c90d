"""Scores of scalar reward models and teachers: what they are shown, what the answer becomes, what a failure
costs."""

import asyncio
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tiny_models import make_scripted_model
from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_scoring import HANGS, ROLES, Bench, good
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.groups.kept_files import KeptGroup, encode_group
from yatt.control.rollouts.scoring.scoring import NOT_APPLICABLE
from yatt.control.rollouts.scoring.subject import Judged
from yatt.core.samples.teaching import rewarded_turns
from yatt.engine.script import scripted_score
from yatt.judging.reading import transformed_values
from yatt.records import cluster as c, message as m
from yatt.records.episode import Likeliest, Turn

SAMPLE = m.SampleRequest(
    request_id="x", prompt_ids=b"", seed=0, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1
)


def bench_of(folder: Path, given: list[Any], **genrm: Any) -> Bench:
    """A bench whose GenRM is scalar."""
    return Bench(folder, given, good, **{"kind": "scalar", "verdict": {}, **genrm})


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


def bench_with_teacher(folder: Path, given: list[Any], **genrm: Any) -> Bench:
    """A bench whose sample has a turn of an environment between two of the policy's."""
    bench = bench_of(folder, given, kind="teacher", template="", **genrm)
    turns = [
        Turn(m.pack_ids([5, 6]), is_sampled=True, logprobs=m.pack_floats([-1.0, -2.0]), finish_reason="stop"),
        Turn(m.pack_ids([7])),
        Turn(m.pack_ids([8]), is_sampled=True, logprobs=m.pack_floats([-3.0]), finish_reason="stop"),
    ]
    bench.sample.turns, bench.subject.group.prompt = turns, m.pack_ids([1, 2])
    return bench


def taught(*logprobs: float) -> m.Completed:
    return m.Completed(
        request_id="x", token_ids=b"", logprobs=m.pack_floats(list(logprobs)), finish_reason="stop",
        policy_version=0,
    )  # fmt: skip


def test_a_teacher_rewards_the_tokens_that_the_policy_sampled(tmp_path: Path) -> None:
    bench = bench_with_teacher(tmp_path, [taught(-1.5, -1.0, -9.0, -2.0)], coef=0.5)
    sample = bench.score()
    assert m.unpack_ids(bench.asked[0].prompt_ids) == [1, 2, 5, 6, 7, 8] and bench.asked[0].scored_from == 2
    rewards = [list(m.unpack_floats(turn.token_rewards)) for turn in sample.turns]
    assert rewards == [[-0.25, 0.5], [], [0.5]]
    assert sample.scores["judge"] == pytest.approx(0.5), "the mean of -0.5, 1 and 1, without the factor"
    assert bench.scorer.weights["judge"] == 0.0
    bench.subject.group.refuse_scoreless({"judge": 0.0})
    assert not sample.failed
    nothing = partial(bench.subject.group.teaches_nothing, {"judge": 0.0}, bench.scorer.shaping)
    assert not nothing(by="") and nothing(by="judge"), "unless its own score is what groups are filtered by"
    sample.turns = [msgspec.structs.replace(turn, token_rewards=b"") for turn in sample.turns]
    assert nothing(by="")
    bench.subject.group.refuse_scoreless({"judge": 0.0})
    assert "no reward function has a score for it" in sample.failed
    sample.turns = [msgspec.structs.replace(turn, token_rewards=m.pack_floats(each) if each else b"")
                    for turn, each in zip(sample.turns, rewards, strict=True)]  # fmt: skip
    again, mean = rewarded_turns(sample.turns, [-1.0, -2.0, 0.0, -4.0], 2.0)
    assert [list(m.unpack_floats(turn.token_rewards)) for turn in again] == [[-0.25, 0.5], [], [-1.5]]
    assert mean == pytest.approx(-1 / 3)
    shorter = sample.turns[0].shorter(1)
    assert list(m.unpack_floats(shorter.token_rewards)) == [-0.25]


def test_a_teacher_of_other_data_is_not_asked(tmp_path: Path) -> None:
    bench = bench_with_teacher(tmp_path, [], data_sources=["product", "quotient"])
    sample = bench.score()
    assert not bench.asked and sample.unmeasured == {"judge": NOT_APPLICABLE}
    assert not any(turn.token_rewards for turn in sample.turns)
    asked = bench_with_teacher(tmp_path / "own", [taught(-1.0, -1.0, -1.0, -1.0)], data_sources=["sum"])
    assert "judge" in asked.score().scores


@pytest.mark.parametrize("given", [taught(-1.0), taught(-1.0, -1.0, math.nan, -1.0)])
def test_a_teacher_that_leaves_out_a_token_costs_the_group(tmp_path: Path, given: m.Completed) -> None:
    """Though its score has no weight: without its rewards the sample would be trained on as any other."""
    sample = bench_with_teacher(tmp_path, [given]).score()
    assert "gave no log-prob of some tokens" in sample.failed


IDS = [*range(10, 18)]
"""Two likeliest tokens at each of four places."""


def taught_more(ids: list[int], logprobs: list[float], count: int = 2) -> m.Completed:
    likeliest = Likeliest(count, m.pack_ids(ids), m.pack_floats(logprobs))
    return msgspec.structs.replace(taught(-1.5, -1.0, -9.0, -2.0), likeliest=likeliest)


def test_a_teacher_with_top_k_rewards_nothing_and_its_likeliest_tokens_go_with_the_turns(
    tmp_path: Path,
) -> None:
    logs = [-0.5 - place for place in range(8)]
    sample = bench_with_teacher(tmp_path, [taught_more(IDS, logs)], coef=0.5, top_k=2).score()
    first, observed, last = sample.turns
    assert not any(turn.token_rewards for turn in sample.turns) and observed.likeliest is None
    assert first.likeliest == Likeliest(2, m.pack_ids(IDS[:4]), m.pack_floats(logs[:4]), 0.5)
    assert last.likeliest == Likeliest(2, m.pack_ids(IDS[6:]), m.pack_floats(logs[6:]), 0.5)
    assert sample.scores["judge"] == pytest.approx(0.5), "as of a teacher that rewards"
    assert sample.is_taught and first.is_taught and not observed.is_taught
    cut = first.shorter(1)
    assert cut.likeliest == Likeliest(2, m.pack_ids(IDS[:2]), m.pack_floats(logs[:2]), 0.5)
    assert first.size_bytes - cut.size_bytes == 4 + 4 + 2 * 8
    assert m.Rollout(sample_id=0, turns=tuple(sample.turns)).size_bytes == 4 * (2 + 2 + 1 + 1 + 1) + 3 * 16


def test_likeliest_tokens_are_kept_and_sent_as_they_are(tmp_path: Path) -> None:
    """In kept groups, checkpoints and transfers of samples."""
    bench = bench_with_teacher(tmp_path, [taught_more(IDS, [-0.5 - place for place in range(8)])], top_k=2)
    sample = bench.score()
    group = msgspec.structs.replace(bench.subject.group, samples=[sample])
    kept = msgspec.msgpack.decode(encode_group(KeptGroup(group=group)), type=KeptGroup).group
    assert kept.samples[0].turns == sample.turns and kept.samples[0].is_taught
    body = c.SampleTransfer(iteration=3, rollouts=tuple(kept.rollouts().values()))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=c.SampleTransfer)
    assert sent == body and sent.rollouts[0].turns[1:] == tuple(sample.turns)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (taught(-1.5, -1.0, -9.0, -2.0), "no 2 likeliest tokens"),
        (taught_more(IDS, [-1.0] * 8, count=4), "no 2 likeliest tokens"),
        (taught_more(IDS[:6], [-1.0] * 8), "no 2 likeliest tokens at some places"),
        (taught_more(IDS, [-1.0] * 9), "no 2 likeliest tokens at some places"),
        (taught_more([*IDS[:7], -1], [-1.0] * 8), "ids that are no tokens"),
        (taught_more(IDS, [*[-1.0] * 7, math.nan]), "log-probs that are none"),
        (taught_more(IDS, [*[-1.0] * 7, -math.inf]), "log-probs that are none"),
        (taught_more(IDS, [*[-1.0] * 7, 0.5]), "log-probs that are none"),
    ],
)
def test_likeliest_tokens_that_are_none_cost_the_group(tmp_path: Path, given: m.Completed, why: str) -> None:
    sample = bench_with_teacher(tmp_path, [given], top_k=2).score()
    assert f"GenRM 'judge' gave {why}" in sample.failed and not sample.is_taught
