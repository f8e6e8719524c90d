"""GenRMs that think: one question is two requests, of which only the second is a verdict."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model, make_seeing_scripted_model
from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_group_scoring import LIST, ONLY_JUDGE, PAIR, ROLES, GroupBench, better, ranking
from tests.unit.control.test_scoring import Bench, good, judge_says
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.config.sections.judges import ThinkSection
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.recording import EndedGroup, judged_record
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.core.samples.placeholders import with_placeholders
from yatt.core.samples.prompts import sample_seed
from yatt.core.samples.reasons import cause_of
from yatt.engine.protocol import EngineOptions
from yatt.engine.scripted import ScriptedEngine
from yatt.errors import ConfigError, WorkerFailed
from yatt.judging.reading import parse_verdict
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m

END = "\n</think>\n\n"
THINK = {"budget": 12, "end": END}
SINGLE = {
    "template": "{completion}?", "max_tokens": 7,
    "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}}, "think": THINK,
}  # fmt: skip


class ThinkingBench(GroupBench):
    """A `GroupBench` whose engine thinks by one function of the question, and answers by another.

    Attributes:
        asked: all requests.
        reason: the finish reason of thoughts; None: of the engine.
    """

    def __init__(
        self, folder: Path, thinks: Callable[[str], list[int] | str], says: Callable[[str], str], **genrm: Any
    ) -> None:
        super().__init__(folder, says, settings=genrm.pop("settings", ONLY_JUDGE), **genrm)
        self.thinks, self.asked, self.read = thinks, list[m.SampleRequest](), list[str]()
        self.questions = list[str]()
        self.reason: str | None = None
        self.judge._complete, self.judge._call_reward = self._answer, self._reads

    async def _reads(self, order: Any) -> m.Message:
        self.read.append(order.completion)
        return await self._call(order)

    async def _answer(self, role: str, sample: m.SampleRequest) -> m.Completed:
        self.asked.append(sample)
        prompt = self.tokenizer.decode(m.unpack_ids(sample.prompt_ids))
        reason = "stop"
        if END in prompt:
            question = max(
                (each for each in self.questions if prompt.startswith(each)), key=len, default=prompt
            )
            ids = self.tokenizer.encode_plain(self.says(question))
        else:
            self.questions.append(prompt)
            given = self.thinks(prompt)
            ids = self.tokenizer.encode_plain(given) if isinstance(given, str) else given
            if len(ids) > sample.max_tokens:
                ids, reason = ids[: sample.max_tokens], "length"
            reason = self.reason or reason
        return m.Completed(
            request_id=sample.request_id, token_ids=m.pack_ids(ids), logprobs=m.pack_floats([0.0] * len(ids)),
            watched=m.pack_floats([-1.0] * len(ids) * len(sample.watched)),
            finish_reason=reason, policy_version=0, error="no room" if reason == "error" else "",
        )  # fmt: skip

    def thoughts(self) -> list[m.SampleRequest]:
        return [each for each in self.asked if not self.is_verdict(each)]

    def verdicts(self) -> list[m.SampleRequest]:
        return [each for each in self.asked if self.is_verdict(each)]

    def is_verdict(self, sample: m.SampleRequest) -> bool:
        return END in self.tokenizer.decode(m.unpack_ids(sample.prompt_ids))

    def first(self) -> Any:
        """Scores the first sample alone."""
        self.subjects[0] = replace(self.subjects[0], judged=[])
        asyncio.run(self.scorer.score(self.subjects[0], ROLES))
        return self.group.samples[0]


def test_the_second_request_continues_the_first_token_for_token(tmp_path: Path) -> None:
    """The thought's tokens are none that its text would be tokenised to."""
    unnatural = [GroupBench(tmp_path / "t", better, **PAIR).tokenizer.encode_plain(each)[0] for each in "one"]
    bench = ThinkingBench(tmp_path, lambda _: [*unnatural, 2], lambda _: "Y", **SINGLE)
    assert bench.tokenizer.encode_plain("one") != unnatural and bench.tokenizer.decode(unnatural) == "one"
    assert bench.first().scores == {"judge": 1.0}
    thought, verdict = bench.asked
    end = bench.tokenizer.encode_plain(END)
    assert m.unpack_ids(verdict.prompt_ids) == [*m.unpack_ids(thought.prompt_ids), *unnatural, *end]
    assert (thought.max_tokens, verdict.max_tokens) == (12, 7)
    assert (thought.stop, verdict.stop) == (("</think>",), ()) and thought.request_id != verdict.request_id
    seed = sample_seed(bench.config.run.seed, 4, "0", 0)
    assert thought.seed == seed != verdict.seed, "the first is that of a judge that does not think"
    assert verdict.seed == sample_seed(seed, 0, "verdict")


@pytest.mark.parametrize(
    "form", [{"choices": ["Y", "N"]}, {"json_schema": '{"type": "object", "properties": {"score": {}}}'}]
)
def test_only_the_verdict_is_bound_and_watched(tmp_path: Path, form: dict[str, Any]) -> None:
    is_soft = "choices" in form
    verdict = {**form, **({"scores": {"Y": 1, "N": 0}, "read": "soft"} if is_soft else {})}
    genrm = {**SINGLE, "verdict": verdict, "stop": ["."]}
    bench = ThinkingBench(tmp_path, lambda _: "so Y", lambda _: "Y" if is_soft else '{"score": 1}', **genrm)
    sample = bench.first()
    thought, second = bench.asked
    assert not thought.structure and not thought.watched and thought.stop == ("</think>",)
    assert second.structure and bool(second.watched) == is_soft and second.stop == (".",)
    if is_soft:
        assert sample.extras["judge/confidence"] == pytest.approx(0.5), "of the verdict's place alone"
        assert sample.scores == {"judge": 0.5}


def test_a_control_token_ends_a_thought(tmp_path: Path) -> None:
    """It stands in the request, since no text could name it; after the thought it is written once."""
    think = {"budget": 12, "end": "<|im_start|>\n"}
    bench = ThinkingBench(tmp_path, lambda _: "", lambda _: "Y", **{**SINGLE, "think": think})
    hm, yes = (bench.tokenizer.encode_plain(each) for each in ("hm", "Y"))
    said = iter([[*hm, 1], yes])
    bench.judge._complete = lambda role, sample: answered(bench, sample, next(said))
    assert bench.first().scores == {"judge": 1.0}
    thought, verdict = bench.asked
    assert thought.stop_ids == (1,) and thought.stop == ("<|im_start|>",) and verdict.stop_ids == ()
    line_break = bench.tokenizer.encode_plain("\n")
    ids = [*m.unpack_ids(thought.prompt_ids), *hm, 1, *line_break]
    assert m.unpack_ids(verdict.prompt_ids) == ids


async def answered(bench: ThinkingBench, sample: m.SampleRequest, ids: list[int]) -> m.Completed:
    bench.asked.append(sample)
    return completion(sample, ids)


@pytest.mark.parametrize(("says", "score"), [("N", 0.0), ("?", None)])
def test_what_a_thought_quotes_is_no_verdict(tmp_path: Path, says: str, score: float | None) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "Y? Y.", lambda _: says, **SINGLE, retries=0)
    sample = bench.first()
    assert bench.read == [says], "the pattern is given the answer only"
    assert sample.verdicts == {"judge": says, "judge/thought": "Y? Y."}
    assert sample.scores.get("judge") == score
    if score is None:
        assert sample.failed == (
            "genrm 'judge', prompt 4, sample 0: no readable verdict in '?', after the thought 'Y? Y.'; the "
            "question was 'bb?'"
        )
        assert cause_of(sample.failed) == "genrm 'judge', no readable verdict, after the thought"


def test_a_cut_thought_is_counted_and_asked_for_a_verdict(tmp_path: Path) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "one plus two is " * 9, lambda _: "Y", **SINGLE)
    assert bench.first().scores == {"judge": 1.0}
    thought, verdict = bench.asked
    assert len(verdict.prompt_ids) // 4 == len(thought.prompt_ids) // 4 + 12 + len(
        bench.tokenizer.encode_plain(END)
    )
    counts = {"genrm/judge/asked": 1, "genrm/judge/thought_cut": 1}
    assert bench.counters == counts
    judged = bench.subjects[0].judged
    assert judged is not None and judged[0].is_thought_cut and judged[0].thought.startswith("one plus two")
    assert judged[0].answer == "Y" and judged[0].verdict == m.Scored(score=1.0)


def test_or_it_is_unreadable_and_asked_again(tmp_path: Path) -> None:
    texts = iter(["one plus two is " * 9, "one"])
    think = {**THINK, "on_cut": "unreadable"}
    bench = ThinkingBench(tmp_path, lambda _: next(texts), lambda _: "Y", **{**SINGLE, "think": think})
    assert bench.first().scores == {"judge": 1.0}
    assert len(bench.thoughts()) == 2 and len(bench.verdicts()) == 1
    assert len({each.seed for each in bench.asked}) == 3
    assert [each.temperature for each in bench.asked] == [0.0, 0.6, 0.6]
    counts = {"genrm/judge/asked": 2, "genrm/judge/thought_cut": 1, "genrm/judge/truncated": 1}
    assert bench.counters == counts
    other = ThinkingBench(
        tmp_path / "b", lambda _: "o" * 99, lambda _: "Y", retries=0, **{**SINGLE, "think": think}
    )
    failed = other.first().failed
    assert "no readable verdict in '', after the thought 'oooooooooooo', which was cut" in failed
    cause = "no readable verdict, after the thought, which was cut (genrms[judge].think.budget is 12)"
    assert cause_of(failed) == f"genrm 'judge', {cause}"
    assert not other.verdicts() and not other.read


def test_a_verdict_that_is_cut_after_a_thought_is_told_by_its_own_limit(tmp_path: Path) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "hm", lambda _: "Y", retries=0, **SINGLE)
    answer = bench._answer

    async def cut(role: str, sample: m.SampleRequest) -> m.Completed:
        done = await answer(role, sample)
        return msgspec.structs.replace(done, finish_reason="length") if bench.is_verdict(sample) else done

    bench.judge._complete = cut
    failed = bench.first().failed
    assert "in 'Y', which was cut (genrms[judge].max_tokens is 7), after the thought 'hm'; the que" in failed
    assert bench.counters["genrm/judge/thought_cut"] == 0 and bench.counters["genrm/judge/truncated"] == 1


@pytest.mark.parametrize(("limit", "room"), [(40, 12), (29, 7), (23, 1), (22, 0)])
def test_the_thought_gives_way_to_the_verdict(tmp_path: Path, limit: int, room: int) -> None:
    """The question has 4 tokens, the end 11, the verdict 7."""
    bench = ThinkingBench(
        tmp_path,
        lambda _: "o" * 30,
        lambda _: "Y",
        **{**SINGLE, "template": "{completion}??"},
        max_model_tokens=limit,
    )
    end = len(bench.tokenizer.encode_plain(END))
    bench.group.samples[0].text = "?" * (22 - 7 - end - 2)
    assert bench.first().scores == {"judge": 1.0}
    assert [each.max_tokens for each in bench.thoughts()] == ([room] if room else [])
    (verdict,) = bench.verdicts()
    assert verdict.max_tokens == 7 and len(verdict.prompt_ids) // 4 == 22 - 7 + room <= limit - 7
    assert bench.counters["genrm/judge/thought_cut"] == 1
    assert len({each.request_id for each in bench.asked}) == len(bench.asked)


@pytest.mark.parametrize("way", ["pairs", "list", "rubric"])
def test_every_way_of_judging_thinks(tmp_path: Path, way: str) -> None:
    rubric = {
        "template": "{completion}; {criterion}", "verdict": SINGLE["verdict"],
        "judging": {"by": "rubric", "criteria": [{"name": "long", "text": "over two"}]},
    }  # fmt: skip
    genrm = {"pairs": PAIR, "list": LIST, "rubric": rubric}[way]
    says = {"pairs": better, "list": ranking, "rubric": lambda text: "Y" if len(text) > 12 else "N"}[way]
    bench = ThinkingBench(tmp_path, lambda _: "1 2 = Y N", says, **genrm, think=THINK, max_tokens=20)
    plain = GroupBench(tmp_path / "plain", says, settings=ONLY_JUDGE, **genrm)
    scores = []
    for each in (bench, plain):
        for subject in each.subjects if way == "rubric" else ():
            asyncio.run(each.scorer.score(subject, ROLES))
        scores.append(each.judged())
    assert scores[0] == scores[1] and len(set(scores[0])) > 1 and min(scores[0]) >= 0
    assert len(bench.thoughts()) == len(bench.verdicts()) == len(plain.prompts)
    assert not bench.counters["genrm/judge/unparsable"] and not bench.counters["genrm/judge/thought_cut"]


def test_votes_think_each_by_themselves(tmp_path: Path) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "hm", lambda _: "Y", votes=3, temperature=0.5, **SINGLE)
    assert bench.first().scores == {"judge": 1.0}
    assert len({each.seed for each in bench.asked}) == len(bench.asked) == 6


def test_a_thought_that_is_refused_is_the_answer(tmp_path: Path) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "", lambda _: "Y", **SINGLE)
    bench.reason = "error"
    assert bench.first().failed == "genrm 'judge', prompt 4, sample 0: no room"
    assert len(bench.asked) == 1


def test_pictures_keep_their_places_before_a_thought(tmp_path: Path) -> None:
    refs = [m.MediaRef("a.png", "aa" * 32, 64, 96), m.MediaRef("", "bb" * 32, 32, 32)]
    bench = Bench(
        tmp_path, [], good, sees="prompt", template="{prompt} said {completion}", max_model_tokens=300,
        max_tokens=9, think=THINK,
    )  # fmt: skip
    thought, yes = (judge_says(tmp_path, each, make_seeing_scripted_model) for each in ("hm", "Y"))
    bench.verdicts = [[*thought, 5, 2], yes]  # it samples a placeholder, too
    _, media = with_placeholders([9, 5, 5], refs, picture_tokens(bench.config.genrms[0].model))
    bench.subject.group.media = tuple(media)
    row = Row(prompt="<image> or <image>?", data_source="", ground_truth="", raw={}, media=tuple(refs))
    bench.subject = replace(bench.subject, row=row)
    assert bench.score().scores.get("judge") == 1.0, bench.sample.failed
    first, second = bench.asked
    assert first.media == second.media and [each.ref for each in second.media] == refs
    ids = m.unpack_ids(second.prompt_ids)
    assert ids[: len(first.prompt_ids) // 4] == m.unpack_ids(first.prompt_ids)
    places = {place for each in second.media for place in range(each.start, each.start + each.num_tokens)}
    assert {place for place, token in enumerate(ids) if token == 5} - places == {
        len(first.prompt_ids) // 4 + len(thought)
    }, "a sampled placeholder is no picture"


def test_a_record_has_the_thought_apart_from_the_answer(tmp_path: Path) -> None:
    bench = ThinkingBench(tmp_path, lambda _: "because", lambda _: "so: Y", **SINGLE)
    bench.first()
    ended = EndedGroup(group=bench.group, row=None)
    judged = bench.subjects[0].judged
    assert judged is not None
    record = judged_record(ended, judged[0], bench.config.genrms[0].template)
    assert (record["thought"], record["is_thought_cut"], record["answer"]) == ("because", False, "so: Y")
    assert record["is_readable"] and record["score"] == 1.0


# ---- interruptions, on the scripted engine ------------------------------------------------------


class EngineBench:
    """A judge of one node, whose engine is the scripted one.

    Attributes:
        interrupt_at: number of the engine's step after which all questions are interrupted; a half: before.
        when: what was going on then.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, model = config, config.genrms[0].model
        options = EngineOptions(
            model=model, dtype="float32", device="cpu", eos_ids=(2,), max_model_tokens=64, max_num_seqs=4,
            kv_cache_bytes=1 << 20,
        )  # fmt: skip
        self.engine = ScriptedEngine(options)
        self.engine.start()
        self.steps, self.interrupt_at, self.when = 0, -1.0, ""
        self.cut = frozenset[str]()
        self.done: dict[str, m.Completed] = {}
        self.asked: list[m.SampleRequest] = []
        self.judge = Judge(self.config, self._complete, self._abort, self._call, num_nodes=1, say=print)
        self.scorer = Scorer(self.config, self.judge, score_sources(self.config, self.judge, self._call))

    async def _complete(self, _: str, sample: m.SampleRequest) -> m.Completed:
        assert sample.request_id not in self.cut, "its engine may sleep, and it would wait for it"
        self.asked.append(sample)
        self.engine.add(sample)
        while sample.request_id not in self.done:
            await self._moment(self.steps + 0.5)
            if sample.request_id in self.done:
                break
            self.steps += 1
            self.done |= {each.request_id: each for each in self.engine.step()}
            await self._moment(self.steps)
            await asyncio.sleep(0)
        return self.done.pop(sample.request_id)

    async def _moment(self, now: float) -> None:
        if now == self.interrupt_at:
            is_running = "in" if self.engine.is_busy else "after"
            self.when = f"{is_running} {'thought' if self.asked[-1].stop else 'verdict'}"
            self.cut = frozenset(self.judge._open._roles)
            await self.scorer.interrupt()

    async def _abort(self, role: str, request_ids: tuple[str, ...]) -> None:
        assert role == "genrm:judge"
        self.done |= {each.request_id: each for each in self.engine.abort(request_ids)}

    async def _call(self, order: Any) -> m.Message:
        score = parse_verdict(order.completion, self.config.genrms[0].verdict)
        return m.Failed(error="no verdict", exit_code=2) if score is None else m.Scored(score=score)

    async def outcome(self, interrupt_at: float = -1) -> Any:
        """Scores a sample, again if it is interrupted; returns what is said and recorded of the last
        judgement, and what it was asked."""
        group = new_group(4, 0, "p", [1, 2], 1)
        (sample,) = group.samples
        sample.text, sample.finish_reason = "some text", "stop"
        row, judged = Row(prompt="p", data_source="sum", ground_truth="2", raw={}), list[Judged]()
        subject = Subject(group=group, sample=sample, row=row, ref=m.RowRef(0, 0, 0), judged=judged)
        self.steps, self.interrupt_at, self.when = 0, interrupt_at, ""
        self.asked.clear()
        await self.scorer.score(subject, ROLES)
        if not (sample.scores or sample.failed):
            assert not self.engine.is_busy and not self.done
            assert not self.judge._open._roles and not self.judge._open._cut
            self.asked.clear()
            judged.clear()
            self.interrupt_at = -1
            await self.scorer.score(subject, ROLES)
        asked = [
            (each.prompt_ids, each.seed, each.temperature, each.max_tokens, each.stop) for each in self.asked
        ]
        untimed = [replace(each, span_s=(0.0, 0.0)) for each in judged]
        return sample.scores, sample.verdicts, sample.failed, untimed, asked


SETTINGS: list[dict[str, Any]] = [
    {}, {"think": {**THINK, "budget": 2}}, {"votes": 2, "temperature": 0.7, "retries": 2},
    {"think": {**THINK, "budget": 2, "on_cut": "unreadable"}, "retries": 3},
]  # fmt: skip


def walked_configs(folder: Path) -> Iterator[RunConfig]:
    """The run file with each of the settings; its GenRM's answers have verdicts, or have none."""
    tokenizer = Tokenizer(make_scripted_model(folder / "judge"))
    answers = [tokenizer.encode_plain(text) for text in ("is Y", "N", "one two Y", "three N N", "hm")]
    model = make_scripted_model(folder / "judge", answers=answers)
    (Path(model) / "model.safetensors").write_bytes(b"")
    section = {"name": "judge", "model": model, "engine": "scripted", "max_model_tokens": 64, **SINGLE}
    run = RunFile(folder, {"genrms": [section], "launch": {"nodes": 1}, "rewards": []})
    config = load_run_config([run.write()], [])
    for each in SETTINGS:
        think = ThinkSection(**each.get("think", THINK))
        yield replace(config, genrms=(replace(config.genrms[0], **{**each, "think": think}),))


def test_interrupted_at_any_moment_it_judges_as_if_it_were_not(tmp_path: Path) -> None:
    """A walk over every step of the engine, before and after it: also between both requests."""
    seen: Counter[str] = Counter()

    async def walk(config: RunConfig) -> None:
        bench = EngineBench(config)
        whole, last = await bench.outcome(), bench.steps
        assert whole[0] or whole[2]
        for half in range(2 * last + 2):
            found = await bench.outcome(half / 2)
            seen[bench.when] += 1
            assert found == whole, f"{config.genrms[0]}: at {half / 2}, {bench.when}"

    for config in walked_configs(tmp_path):
        asyncio.run(walk(config))
    assert all(seen[each] > 2 for each in ("in thought", "after thought", "in verdict")), seen


def test_an_aborted_request_that_nobody_interrupted_is_a_failure(tmp_path: Path) -> None:
    for which in (0, 1):
        bench = ThinkingBench(tmp_path / str(which), lambda _: "hm", lambda _: "Y", **SINGLE)
        answer, count = bench._answer, iter(range(9))

        async def aborted(role: str, sample: m.SampleRequest) -> m.Completed:
            done = await answer(role, sample)  # noqa: B023
            if next(count) == which:  # noqa: B023
                return m.Completed(
                    request_id=sample.request_id, token_ids=b"", logprobs=b"", finish_reason=ABORTED,
                    policy_version=0,
                )  # fmt: skip
            return done

        bench.judge._complete = aborted
        with pytest.raises(WorkerFailed, match="GenRM 'judge' was interrupted"):
            bench.first()


# ---- the run file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("genrm", "says"),
    [
        ({"api": {"url": "http://localhost:1/v1"}, "engine": "auto"}, "think: a service cannot continue"),
        ({"kind": "scalar", "template": "{completion}"}, "think: has no effect with kind: scalar; remove it"),
        ({"kind": "teacher"}, "think: has no effect with kind: teacher; remove it"),
        ({"path": "f.py"}, "think: is for questions by template"),
        ({"template": "{completion}", "think": {"end": "x"}}, "end: has no effect without budget"),
        ({"template": "{completion}", "think": {"on_cut": "unreadable"}}, "on_cut: has no effect without"),
    ],
)
def test_who_cannot_think_is_refused_by_the_key(tmp_path: Path, genrm: dict[str, Any], says: str) -> None:
    (tmp_path / "f.py").write_text("def compute_score(client, **_): ...")
    model = make_scripted_model(tmp_path / "judge")
    section: dict[str, Any] = {
        "name": "judge",
        "model": model,
        "engine": "scripted",
        "think": {"budget": 9},
        **genrm,
    }
    if "api" in genrm:
        section["template"] = "{completion}"
    run = RunFile(tmp_path, {"genrms": [section], "launch": {"nodes": 1}})
    with pytest.raises(ConfigError, match="genrms") as caught:
        load_run_config([run.write()], [])
    assert says in str(caught.value)
