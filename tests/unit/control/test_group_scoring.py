"""Scores that need a whole group: functions of groups and batches, GenRMs that compare."""

import asyncio
import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from tests.unit.adapters.test_judge_api import Service, says
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.sections.functions import RewardSection
from yatt.control.gpus.prepared_requests import MediaUnusable
from yatt.control.rollouts.groups.groups import PromptGroup, new_group
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import Batches, score_sources
from yatt.control.rollouts.scoring.subject import Subject
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m
from yatt.reward.__main__ import read_verdict

ROLES = ("genrm:judge",)
TEXTS = ["bb", "aaaa", "c", "ddd"]
"""A longer one is better."""

PAIR = {
    "judging": {"by": "pairwise"}, "template": "1:{completion_a}; 2:{completion_b}; best:",
    "verdict": {"pattern": "^([12=])$", "scores": {"1": 1.0, "2": 0.0, "=": 0.5}},
}  # fmt: skip
LIST = {
    "judging": {"by": "listwise"},
    "template": "{completions}; ranking:",
    "verdict": {"pattern": "^(.*)$"},
}


def better(text: str) -> str:
    """An honest judge of pairs."""
    first, second = (len(part.partition(":")[2].strip()) for part in text.split(";")[:2])
    return "1" if first > second else "2" if second > first else "="


def ranking(text: str) -> str:
    """An honest judge of lists."""
    shown = [block.split("]\n")[1].strip() for block in text.partition(";")[0].split("\n\n")]
    return " > ".join(str(1 + i) for i in sorted(range(len(shown)), key=lambda i: -len(shown[i])))


class GroupBench:
    """A scorer whose GenRM answers by a function of its prompt, and whose functions are Python functions."""

    def __init__(
        self, folder: Path, says: Callable[[str], str], *, rewards: Callable[..., m.Message] | None = None,
        settings: dict[str, Any] | None = None, **genrm: Any,
    ) -> None:  # fmt: skip
        judge = make_scripted_model(folder / "judge", mean_tokens=3)
        (Path(judge) / "model.safetensors").write_bytes(b"")
        section = {"name": "judge", "model": judge, "engine": "scripted", "max_model_tokens": 400, **genrm}
        run = RunFile(folder, {"genrms": [section], "launch": {"nodes": 1}, **(settings or {})})
        self.config = load_run_config([run.write()], [])
        self.tokenizer, self.says, self.rewards = Tokenizer(judge), says, rewards
        self.prompts: list[str] = []
        self.seeds: list[int] = []
        self.orders: list[m.Message] = []
        self.judge = Judge(self.config, self._complete, self._abort, self._call, num_nodes=1, say=print)
        sources = score_sources(self.config, self.judge, self._call)
        self.scorer = Scorer(self.config, self.judge, sources)
        self.group: PromptGroup = new_group(4, 0, "say much", [1, 2], len(TEXTS))
        self.counters: Counter[str] = Counter()
        self.subjects = []
        for sample, text in zip(self.group.samples, TEXTS, strict=True):
            sample.text, sample.finish_reason = text, "stop"
            row = Row(prompt="say much", data_source="talk", ground_truth="zzz", raw={})
            ref = m.RowRef(0, 0, 0)
            self.subjects.append(
                Subject(group=self.group, sample=sample, row=row, ref=ref, counters=self.counters)
            )

    async def _complete(self, role: str, sample: m.SampleRequest) -> m.Completed:
        prompt = self.tokenizer.decode(m.unpack_ids(sample.prompt_ids))
        self.prompts.append(prompt)
        self.seeds.append(sample.seed)
        said = self.says(prompt)
        ids = self.tokenizer.encode_parts([TextPart(said, False)], adds_special=False)
        return m.Completed(
            request_id=sample.request_id, token_ids=m.pack_ids(ids), logprobs=m.pack_floats([0.0] * len(ids)),
            finish_reason="stop", policy_version=0,
        )  # fmt: skip

    async def _abort(self, role: str, request_ids: tuple[str, ...]) -> None:
        raise AssertionError(f"{request_ids} of {role} are not aborted here")

    async def _call(self, order: m.Score | m.ScoreMany) -> m.Message:
        if isinstance(order, m.Score) and order.reward == "judge":
            return read_verdict(order, self.config.genrms[0].verdict)
        self.orders.append(order)
        assert self.rewards is not None
        return self.rewards(order)

    def judged(self) -> list[float]:
        asyncio.run(self.scorer.score_group(self.subjects, ROLES))
        return [s.scores.get("judge", -1.0) for s in self.group.samples]


ONLY_JUDGE: dict[str, Any] = {"rewards": []}


@pytest.mark.parametrize("by", ["win_rate", "bradley_terry"])
@pytest.mark.parametrize("pairs", ["all", "circular", "anchor", "ground_truth"])
def test_pairs_become_scores_in_the_judges_order(tmp_path: Path, pairs: str, by: str) -> None:
    settings = {**ONLY_JUDGE, "data": {"ground_truth_key": "answer"}}
    judging = {"by": "pairwise", "pairs": pairs, "scores_by": by}
    bench = GroupBench(tmp_path, better, settings=settings, **{**PAIR, "judging": judging})
    scores = bench.judged()
    assert all(0 <= score <= 1 for score in scores)
    assert len(bench.prompts) == {"all": 12, "circular": 8, "anchor": 6, "ground_truth": 8}[pairs]
    if pairs == "all":
        assert sorted(range(4), key=lambda i: -scores[i]) == [1, 3, 0, 2]
    if pairs == "all" and by == "win_rate":
        assert scores == pytest.approx([1 / 3, 1.0, 0.0, 2 / 3])
    if pairs == "ground_truth" and by == "win_rate":
        assert scores == pytest.approx([0.0, 1.0, 0.0, 0.5]), "ddd is as long as zzz"
    assert bench.counters["genrm/judge/asked"] == len(bench.prompts) == len(set(bench.seeds))


def test_a_judge_that_prefers_a_position_gives_equal_scores_and_is_counted(tmp_path: Path) -> None:
    bench = GroupBench(tmp_path, lambda _: "1", settings=ONLY_JUDGE, **PAIR)
    assert bench.judged() == [0.5] * 4
    assert bench.counters["genrm/judge/contradictions"] == 6
    one_order = {**PAIR, "judging": {"by": "pairwise", "orders": "one"}}
    once = GroupBench(tmp_path, lambda _: "1", settings=ONLY_JUDGE, **one_order)
    assert once.judged() == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0]), "what the swap is for"


def test_a_list_is_ranked_in_both_orders(tmp_path: Path) -> None:
    bench = GroupBench(tmp_path, ranking, settings=ONLY_JUDGE, **LIST)
    assert bench.judged() == pytest.approx([1 / 3, 1.0, 0.0, 2 / 3])
    assert len(bench.prompts) == 2
    lazy = GroupBench(tmp_path, lambda _: "1 2 3 4", settings=ONLY_JUDGE, **LIST)
    assert lazy.judged() == [0.5] * 4


@pytest.mark.parametrize("said", ["1 > 2 > 3", "1 2 3 3", "1 2 3 5", "none", "1 2 3 4 4", "0 1 2 3"])
def test_a_ranking_that_is_none_drops_the_group(tmp_path: Path, said: str) -> None:
    bench = GroupBench(tmp_path, lambda _: said, settings=ONLY_JUDGE, **LIST)
    assert bench.judged() == [-1.0] * 4
    failed = bench.group.failure()
    asked = r"'[1]\nbb\n\n[2]\naaaa\n\n[3]\nc\n\n[4]\nddd; ranking:'"
    why = f"no readable verdict about samples 0, 1, 2, 3 in {said!r}; the question was {asked}"
    assert failed is not None and failed.failed == f"genrm 'judge', prompt 4: {why}", "the first question"
    assert failed.is_users_failure and bench.counters["genrm/judge/unparsable"] == 4, "asked again once each"


def test_an_unreadable_verdict_on_a_pair_may_have_a_score(tmp_path: Path) -> None:
    settings = {"on_unparsable": "score", **PAIR}
    bench = GroupBench(
        tmp_path, lambda text: "?" if "aaaa" in text else better(text), settings=ONLY_JUDGE, **settings
    )
    assert bench.judged() == pytest.approx([0.5, 0.5, 1 / 6, 5 / 6])


def test_votes_are_asked_with_other_seeds_and_their_mean_counts(tmp_path: Path) -> None:
    says = iter("1122" * 12)
    bench = GroupBench(tmp_path, lambda _: next(says), settings=ONLY_JUDGE, votes=4, temperature=1.0, **PAIR)
    assert bench.judged() == [0.5] * 4
    assert len(set(bench.seeds)) == 48


def test_an_interrupted_judge_drops_only_the_group(tmp_path: Path) -> None:
    def fails(_: str) -> str:
        raise WorkerFailed("the engines are gone")

    settings = {**ONLY_JUDGE, "run": {"deterministic": False}}
    bench = GroupBench(tmp_path, fails, settings=settings, **PAIR)
    assert bench.judged() == [-1.0] * 4
    failed = bench.group.failure()
    assert failed is not None and "the engines are gone" in failed.failed and not failed.is_users_failure


GROUP_REWARD = {"rewards": [{"name": "rank", "path": "rank.py", "scope": "group"}]}


def test_a_function_of_a_group_gets_all_of_it_once(tmp_path: Path) -> None:
    def ranks(order: m.ScoreMany) -> m.Message:
        lengths = [len(item.completion) for item in order.items]
        scores = [sum(other < mine for other in lengths) / 3 for mine in lengths]
        return m.ScoredMany(scores=tuple(m.Scored(score=s, extra={"len": 1.0}) for s in scores))

    bench = GroupBench(tmp_path, better, rewards=ranks, settings=GROUP_REWARD, **PAIR)
    asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
    assert bench.orders == [], "not before the group is complete"
    bench.judged()
    assert [s.scores["rank"] for s in bench.group.samples] == pytest.approx([1 / 3, 1.0, 0.0, 2 / 3])
    assert len(bench.orders) == 1 and bench.group.samples[0].extras == {"rank/len": 1.0}
    bench.judged()
    assert len(bench.orders) == 1, "what is there is not made again"


def test_none_leaves_a_score_out_and_a_sample_without_any_fails(tmp_path: Path) -> None:
    def some(order: m.ScoreMany) -> m.Message:
        return m.ScoredMany(
            scores=tuple(m.Scored(score=1.0, applies=item.completion != "c") for item in order.items)
        )

    bench = GroupBench(tmp_path, better, rewards=some, settings=GROUP_REWARD, **PAIR)
    bench.judged()
    weights, shaping = bench.scorer.weights, bench.scorer.shaping
    assert bench.group.is_scored(bench.scorer.names())
    assert bench.group.rewards(weights, shaping) == pytest.approx([4 / 3, 2.0, 0.0, 5 / 3])
    assert bench.counters["reward/rank/not_applicable"] == 1
    bench.group.refuse_scoreless(weights)
    assert bench.group.failure() is None
    bench.group.refuse_scoreless({"rank": 1.0, "judge": 0.0})
    failed = bench.group.failure()
    assert (
        failed is not None and failed.index == 2 and "no reward function has a score for it" in failed.failed
    )


@pytest.mark.parametrize(
    ("genrm", "says"),
    [
        ({**PAIR, "template": "{completion}"}, "unknown field {completion}"),
        ({**PAIR, "template": "{completion_a}"}, "{completion_b} is missing"),
        ({**LIST, "template": "{prompt}"}, "{completions} is missing"),
        ({**PAIR, "verdict": {"pattern": "(A)", "scores": {"A": 2.0}}}, "between 0 and 1"),
        ({**PAIR, "verdict": {"pattern": "([0-9])"}}, "needs verdict.scores"),
        ({**PAIR, "votes": 3}, "at temperature 0 all votes are the same"),
        ({**PAIR, "template": "", "path": "my.py"}, "needs a template"),
        ({**PAIR, "verdict": {"pattern": "(A)", "choices": ["A"]}}, "are alternatives"),
    ],
)
def test_mistakes_are_named_before_anything_starts(tmp_path: Path, genrm: dict[str, Any], says: str) -> None:
    from yatt.judging.judging import judging_of
    from yatt.judging.template import check_template

    with pytest.raises((ConfigError, ValueError)) as caught:
        bench = GroupBench(tmp_path, better, settings=ONLY_JUDGE, **genrm)
        section = bench.config.genrms[0]
        check_template(section.template, "genrms[0].template", judging_of(section).fields, section.judging.by)
    assert says in str(caught.value)


SOFT: dict[str, Any] = {
    "template": "{completion}?",
    "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}, "read": "soft"},
}


def watched_by(bench: GroupBench, shares: Callable[[str], float]) -> None:
    """Has the judge say "no: Y" or "no: N" with these probabilities of Y at its last token."""
    tokenizer = bench.tokenizer

    async def complete(role: str, sample: m.SampleRequest) -> m.Completed:
        prompt = tokenizer.decode(m.unpack_ids(sample.prompt_ids))
        share = shares(prompt)
        ids = tokenizer.encode_plain("no: " + ("Y" if share >= 0.5 else "N"))
        chances = {
            tokenizer.encode_plain("Y")[0]: share * 0.8,
            tokenizer.encode_plain("N")[0]: (1 - share) * 0.8,
        }
        last = [math.log(chances[token]) if chances.get(token) else -math.inf for token in sample.watched]
        rows = [[0.0] * len(sample.watched)] * (len(ids) - 1) + [last]
        return m.Completed(
            request_id=sample.request_id, token_ids=m.pack_ids(ids), logprobs=m.pack_floats([0.0] * len(ids)),
            watched=m.pack_floats([each for row in rows for each in row]), finish_reason="stop",
            policy_version=0,
        )  # fmt: skip

    bench.judge._complete = complete


def test_a_soft_verdict_is_the_share_of_its_word_on_the_grid(tmp_path: Path) -> None:
    """Where the word stands, not at an earlier place; nearly equal shares are equal scores."""
    bench = GroupBench(tmp_path, better, settings=ONLY_JUDGE, **SOFT)
    watched_by(bench, lambda prompt: {"bb?": 0.61, "aaaa?": 0.999, "c?": 0.9993, "ddd?": 0.0}[prompt])

    async def all_scores() -> None:
        for subject in bench.subjects:
            await bench.scorer.score(subject, ROLES)

    asyncio.run(all_scores())
    samples = bench.group.samples
    assert [sample.scores["judge"] for sample in samples] == [pytest.approx(0.6), 1.0, 1.0, 0.0]
    assert samples[0].extras["judge/confidence"] == pytest.approx(0.61)
    assert samples[3].extras == {"judge/confidence": 1.0, "judge/elsewhere": pytest.approx(0.2)}
    assert samples[0].verdicts == {"judge": "no: Y"} and not bench.counters["genrm/judge/unparsable"]


def test_soft_comparisons_and_criteria_are_shares_too(tmp_path: Path) -> None:
    pair = {**PAIR, "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}, "read": "soft"}}
    bench = GroupBench(tmp_path, better, settings=ONLY_JUDGE, **pair)
    watched_by(bench, lambda prompt: {"1": 0.9, "2": 0.1, "=": 0.5}[better(prompt)])
    assert bench.judged() == pytest.approx([0.1 / 3 + 0.9 / 3 + 0.1 / 3, 0.9, 0.1, 0.1 / 3 + 1.8 / 3])
    assert all(s.extras["judge/confidence"] == pytest.approx(0.9) for s in bench.group.samples)
    rubric = {**RUBRIC, "verdict": SOFT["verdict"]}
    rubric["judging"] = {"by": "rubric", "criteria": RUBRIC["judging"]["criteria"][1:]}
    other = GroupBench(tmp_path / "rubric", better, settings=ONLY_JUDGE, **rubric)
    watched_by(other, lambda prompt: 0.8 if "over two" in prompt else 0.3)
    assert other.judged() == pytest.approx([(3 * 0.8 + 0.3) / 4] * 4)
    assert other.group.samples[0].extras["judge/long"] == pytest.approx(0.8)
    assert other.counters["genrm/judge/criterion/long/same"] == 1


@pytest.mark.parametrize("word", ["no: Y", "no:Y"])
def test_a_place_where_no_word_could_stand_is_no_verdict(tmp_path: Path, word: str) -> None:
    """By its probabilities; or because a token with more than the word stands there, of which nothing was
    watched."""
    bench = GroupBench(tmp_path, better, settings=ONLY_JUDGE, retries=0, **SOFT)
    watched_by(bench, lambda _: math.nan)
    if word == "no:Y":
        watched_by(bench, lambda _: 0.9)
        bench.judge._encoder._words["judge"] = {"Y": (3,), "N": (4,)}
    asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
    assert "no readable verdict" in bench.group.samples[0].failed
    assert bench.counters["genrm/judge/unparsable"] == 1


@pytest.mark.parametrize("gives", [True, False])
def test_a_service_says_soft_verdicts_or_that_it_cannot(tmp_path: Path, gives: bool) -> None:
    tokens = [
        {"token": text, "logprob": 0.0, "top_logprobs": [
            {"token": each, "logprob": math.log(share)} for each, share in (("Y", 0.75), ("N", 0.25))
        ]}
        for text in ("is: ", "Y")
    ]  # fmt: skip

    def answered(_: int) -> tuple[int, dict[str, str], bytes]:
        choice = {"message": {"content": "is: Y"}, "finish_reason": "stop"}
        choice |= {"logprobs": {"content": tokens}} if gives else {}
        return 200, {}, json.dumps({"choices": [choice]}).encode()

    service = Service(answered)
    try:
        bench = GroupBench(
            tmp_path, better, settings=SERVICE, engine="auto", api={"url": service.url}, **SOFT
        )
        asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
    finally:
        service.close()
    sample = bench.group.samples[0]
    assert service.got[0][1]["logprobs"] is True
    if gives:
        assert sample.scores == {"judge": 0.75} and sample.extras["judge/confidence"] == pytest.approx(0.75)
    else:
        assert "leaves logprobs out of its answers, which verdict.read: soft needs" in sample.failed


RUBRIC: dict[str, Any] = {
    "template": "{completion}|{criterion}:", "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}},
    "judging": {
        "by": "rubric",
        "criteria": [
            {"name": "form", "rule": "letters", "required": True},
            {"name": "long", "text": "over two", "weight": 3}, {"name": "d", "text": "a d"},
        ],
    },
}  # fmt: skip


def criterion(text: str) -> str:
    """An honest judge of criteria."""
    completion, _, asked = text.partition("|")
    return "Y" if (len(completion) > 2 if asked == "over two:" else "d" in completion) else "N"


@pytest.mark.parametrize("scope", ["sample", "group"])
def test_a_rubric_asks_each_criterion_of_completions_that_meet_the_required_rule(
    tmp_path: Path, scope: str
) -> None:
    """The rule is a function of one sample or of a group; it was scored before, or is when it is wanted."""

    def letters(order: m.Score | m.ScoreMany) -> m.Message:
        items = order.items if isinstance(order, m.ScoreMany) else (order,)
        scores = tuple(m.Scored(score=float(item.completion != "c")) for item in items)
        return m.ScoredMany(scores=scores) if isinstance(order, m.ScoreMany) else scores[0]

    rewards = [{"name": "letters", "path": "l.py", "weight": 0, "scope": scope}]
    bench = GroupBench(tmp_path, criterion, rewards=letters, settings={"rewards": rewards}, **RUBRIC)
    before = GroupBench(tmp_path / "2", criterion, rewards=letters, settings={"rewards": rewards}, **RUBRIC)

    async def all_scores() -> None:
        for subject in before.subjects:
            await before.scorer.score(subject, ROLES)
        await before.scorer.score_group(before.subjects, ROLES)

    asyncio.run(all_scores())
    assert {sample.scores["letters"] for sample in before.group.samples} == {0.0, 1.0}
    asyncio.run(bench.scorer.score_together("judge", bench.subjects))
    first = [sample.scores["judge"] for sample in bench.group.samples]
    assert first == pytest.approx([1 / 5, 4 / 5, 0.0, 1.0]), "bb, aaaa, c, ddd"
    asked = sorted(bench.prompts)
    assert asked == sorted(
        f"{text}|{what}:" for text in ("bb", "aaaa", "ddd") for what in ("over two", "a d")
    )
    assert bench.group.samples[2].extras == {"judge/form": 0.0}
    assert bench.group.samples[3].extras == {"judge/form": 1.0, "judge/long": 1.0, "judge/d": 1.0}
    assert bench.counters["genrm/judge/asked"] == 6
    assert bench.counters["genrm/judge/criterion/long/groups"] == 1
    assert not any(bench.counters[key] for key in bench.counters if key.endswith("/same"))
    assert [sample.scores["judge"] for sample in before.group.samples] == first
    assert sorted(before.prompts) == asked, "the same questions"


def test_a_rule_without_a_score_and_a_row_without_criteria_fail_the_group_and_say_why(tmp_path: Path) -> None:
    settings = {"rewards": [{"name": "letters", "path": "l.py", "weight": 0}]}
    bench = GroupBench(
        tmp_path, criterion, rewards=lambda _: m.Scored(score=0.0, applies=False), settings=settings, **RUBRIC
    )
    bench.judged()
    failed = bench.group.failure()
    assert failed is not None and failed.is_users_failure
    assert "rewards[letters], which is a criterion, sample 0: it has no score for it" in failed.failed
    own = {**RUBRIC, "judging": {"by": "rubric", "criteria_key": "extra_info.rubric"}}
    other = GroupBench(tmp_path / "rows", criterion, settings=ONLY_JUDGE, **own)
    other.judged()
    failed = other.group.failure()
    assert failed is not None and "the data row: extra_info.rubric is no list of criteria" in failed.failed
    assert other.prompts == []


def test_a_rule_that_no_function_is_named_as_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"criteria\[0\]\.rule: no entry of rewards is named 'letters'"):
        GroupBench(tmp_path, criterion, settings=ONLY_JUDGE, **RUBRIC)


def test_comparing_needs_two_completions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pairwise compares completions; write rollout\.n: 2 or more"):
        GroupBench(tmp_path, better, settings={**ONLY_JUDGE, "rollout": {"n": 1}}, **PAIR)


# ---- batches --------------------------------------------------------------------------------------


def batch_of(call: Callable[[m.ScoreMany], m.Message], count: int, **section: Any) -> list[m.Message]:
    async def answer(order: m.ScoreMany) -> m.Message:
        await asyncio.sleep(0)
        return call(order)

    async def run() -> list[m.Message]:
        reward = RewardSection(name="r", path="r.py", scope="batch", **section)
        batches = Batches(reward, answer)
        items = [
            m.Score(reward="r", prompt="p", completion=str(i), row=m.RowRef(0, 0, 0)) for i in range(count)
        ]
        return await asyncio.gather(*map(batches.score, items))

    return asyncio.run(run())


def test_samples_wait_for_each_other_and_get_their_own_scores() -> None:
    sizes: list[int] = []

    def call(order: m.ScoreMany) -> m.Message:
        sizes.append(len(order.items))
        return m.ScoredMany(scores=tuple(m.Scored(score=float(i.completion)) for i in order.items))

    answers = batch_of(call, 10, batch_size=4)
    assert [answer.score for answer in answers] == list(range(10))
    assert sorted(sizes) == [2, 4, 4]


def test_one_sample_that_cannot_be_scored_costs_no_others() -> None:
    def call(order: m.ScoreMany) -> m.Message:
        if any(item.completion == "3" for item in order.items):
            return m.Failed(error="three", exit_code=2)
        return m.ScoredMany(scores=tuple(m.Scored(score=float(i.completion)) for i in order.items))

    answers = batch_of(call, 5, batch_size=5)
    assert isinstance(answers[3], m.Failed) and answers[3].error == "three"
    assert [a.score for i, a in enumerate(answers) if i != 3] == [0, 1, 2, 4]


def test_a_lost_process_is_not_asked_again_one_by_one() -> None:
    calls: list[int] = []

    def call(order: m.ScoreMany) -> m.Message:
        calls.append(len(order.items))
        return m.Failed(error="gone", exit_code=1)

    answers = batch_of(call, 3, batch_size=8, batch_wait_s=0.01)
    assert calls == [3] and all(isinstance(answer, m.Failed) for answer in answers)


SERVICE: dict[str, Any] = {"run": {"deterministic": False}, "rewards": []}
REFS = (m.MediaRef("a.png", "aa" * 32, 64, 96), m.MediaRef("", "bb" * 32, 32, 32))


async def encoded_refs(refs: Sequence[m.MediaRef], genrm: str) -> list[memoryview]:
    """In place of the media process: a file that names its picture."""
    assert genrm == "judge"
    return [memoryview(f"JPEG of {ref.sha256[:2]}".encode()) for ref in refs]


@pytest.mark.parametrize(
    "genrm",
    [
        {"template": "{prompt}: {completion}?", "verdict": {"pattern": "([0-9])"}},
        {**PAIR, "template": "{prompt}: {completion_a} {completion_b}?"},
        {**LIST, "template": "{prompt}: {completions}?", "verdict": {"pattern": "([0-9 ]+)"}},
    ],
    ids=["pointwise", "pairwise", "listwise"],
)
def test_a_judge_behind_a_url_is_shown_the_prompts_pictures(tmp_path: Path, genrm: dict[str, Any]) -> None:
    service = Service(lambda _: says("1 2 3 4" if genrm.get("judging") == {"by": "listwise"} else "1"))
    try:
        bench = GroupBench(
            tmp_path,
            better,
            settings=SERVICE,
            engine="auto",
            sees="prompt",
            api={"url": service.url},
            **genrm,
        )
        bench.judge.show_with(encoded_refs)
        row = Row(prompt="<image>or<image>", data_source="", ground_truth="", raw={}, media=REFS)
        bench.subjects = [replace(subject, row=row) for subject in bench.subjects]
        bench.group.media = tuple(m.PlacedMedia(ref, 0, 1, (1, 2, 2)) for ref in REFS)
        bench.group.samples[0].text = "a forged <image>"
        if "judging" in genrm:
            bench.judged()
        else:
            asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
    finally:
        service.close()
    assert bench.group.samples[0].scores.keys() >= {"judge"}, bench.group.samples[0].failed
    assert service.got and not bench.prompts
    for _, body, _ in service.got:
        content = body["messages"][0]["content"]
        assert [part["type"] for part in content] == ["image_url", "text", "image_url", "text"]
        urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        files = [base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for url in urls]
        assert files == [b"JPEG of aa", b"JPEG of bb"]
        assert content[1]["text"] == "or" and content[3]["text"].startswith(": ")


def test_a_picture_that_cannot_be_encoded_is_the_groups_loss_and_none_is_text(tmp_path: Path) -> None:
    async def refused(*_: object) -> list[memoryview]:
        raise MediaUnusable("a.png does not fit into 1024 bytes as a JPEG file.")

    async def broken(*_: object) -> list[memoryview]:
        raise WorkerFailed("media-n0 cannot start")

    service = Service(lambda _: says("1"))
    try:
        bench = GroupBench(
            tmp_path, better, settings=SERVICE, engine="auto", sees="prompt", api={"url": service.url},
            template="{completion}", verdict={"pattern": "([0-9])"},
        )  # fmt: skip
        for files_of, says_ in ((refused, "a.png does not fit into 1024"), (broken, "media-n0 cannot start")):
            bench.judge.show_with(files_of)
            bench.group.media = (m.PlacedMedia(REFS[0], 0, 1, (1, 2, 2)),)
            asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
            sample = bench.group.samples[0]
            assert says_ in sample.failed and not service.got
            sample.failed = ""
        bench.group.media = ()
        asyncio.run(bench.scorer.score(bench.subjects[0], ROLES))
    finally:
        service.close()
    assert service.got[0][1]["messages"][0]["content"] == "bb"
