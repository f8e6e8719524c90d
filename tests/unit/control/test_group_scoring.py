"""Scores that need a whole group: functions of groups and batches, GenRMs that compare."""

import asyncio
import base64
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
from yatt.config.sections.scoring import RewardSection
from yatt.control.gpus.prepared_requests import MediaUnusable
from yatt.control.rollouts.groups.groups import PromptGroup, new_group
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Batches, Scorer
from yatt.control.rollouts.scoring.subject import Subject
from yatt.errors import ConfigError, WorkerFailed
from yatt.records import message as m
from yatt.reward.__main__ import read_verdict

ROLES = ("genrm:judge",)
TEXTS = ["bb", "aaaa", "c", "ddd"]
"""A longer one is better."""

PAIR = {
    "judging": "pairwise", "template": "1:{completion_a}; 2:{completion_b}; best:",
    "verdict": {"pattern": "^([12=])$", "scores": {"1": 1.0, "2": 0.0, "=": 0.5}},
}  # fmt: skip
LIST = {"judging": "listwise", "template": "{completions}; ranking:", "verdict": {"pattern": "^(.*)$"}}


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
        self.scorer = Scorer(self.config, self.judge, self._call)
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
            return read_verdict(order.completion, self.config.genrms[0].verdict, order.num_ranked)
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
    bench = GroupBench(tmp_path, better, settings=settings, pairs=pairs, scores_by=by, **PAIR)
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
    once = GroupBench(tmp_path, lambda _: "1", settings=ONLY_JUDGE, swap_positions=False, **PAIR)
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
    from yatt.core.samples.verdict import check_template

    with pytest.raises((ConfigError, ValueError)) as caught:
        bench = GroupBench(tmp_path, better, settings=ONLY_JUDGE, **genrm)
        section = bench.config.genrms[0]
        check_template(section.template, "genrms[0].template", section.judging)
    assert says in str(caught.value)


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
    service = Service(lambda _: says("1 2 3 4" if genrm.get("judging") == "listwise" else "1"))
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
