"""Scores of one completion: what a failing function, an unreadable verdict or a lost machine costs."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, RunFile, until
from tests.tiny_models import make_scripted_model, make_seeing_scripted_model
from tests.unit.adapters.test_judge_api import Service
from tests.unit.control.engine_stand_in import completion
from yatt.adapters.inputs.dataset import Row
from yatt.config.load import load_run_config
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.groups.groups import SampleState, new_group
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import MOST_MEASURES, Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.samples.placeholders import with_placeholders
from yatt.core.samples.prompts import is_in_share
from yatt.core.samples.reasons import cause_of
from yatt.errors import WorkerFailed
from yatt.judging.reading import parse_verdict
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m

ROLES = ("rollout", "genrm:judge")
SEEN = {"path": "maze.py", "images": True}
"""An environment with pictures, which nobody calls here."""

HANGS: list[int] = [-1]
"""A verdict that does not come until it is aborted."""


class Bench:
    """A scorer whose GenRM completes `verdicts` one by one, and whose reward process answers `answer`."""

    def __init__(
        self, folder: Path, verdicts: list[m.Completed | list[int] | Exception],
        answer: Callable[[m.Score], m.Message], **genrm: Any,
    ) -> None:  # fmt: skip
        make = make_seeing_scripted_model if "sees" in genrm else partial(make_scripted_model, mean_tokens=3)
        judge = make(folder / "judge")
        (Path(judge) / "model.safetensors").write_bytes(b"")
        section = {
            "name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
            "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}}, "max_model_tokens": 64, **genrm,
        }  # fmt: skip
        run = RunFile(
            folder,
            {
                "genrms": [section],
                "launch": {"nodes": 1},
                "run": {"deterministic": "api" not in section},
                **({"environment": SEEN} if section.get("sees") == "all" else {}),
            },
        )
        self.config = load_run_config([run.write()], [])
        self.role = "rollout" if section["model"] == "policy" else "genrm:judge"
        self.open: dict[str, asyncio.Future[m.Completed]] = {}
        self.verdicts, self.answer, self.asked = list(verdicts), answer, list[m.SampleRequest]()
        judge = Judge(self.config, self._complete, self._abort, self._call, num_nodes=1, say=print)
        self.scorer = Scorer(self.config, judge, score_sources(self.config, judge, self._call))
        group = new_group(4, 0, "1 + 1 =", [1, 2], 1)
        self.sample: SampleState = group.samples[0]
        self.sample.text, self.sample.finish_reason = " 2", "stop"
        row = Row(prompt="1 + 1 =", data_source="sum", ground_truth="2", raw={})
        self.subject = Subject(
            group=group, sample=self.sample, row=row, ref=m.RowRef(0, 0, 0), counters=Counter()
        )

    async def _complete(self, role: str, sample: m.SampleRequest) -> m.Completed:
        assert role == self.role
        self.asked.append(sample)
        given = self.verdicts.pop(0)
        if given == HANGS:
            self.open[sample.request_id] = asyncio.get_running_loop().create_future()
            return await self.open[sample.request_id]
        if isinstance(given, Exception):
            raise given
        return given if isinstance(given, m.Completed) else completion(sample, given)

    async def _abort(self, role: str, request_ids: tuple[str, ...]) -> None:
        assert role == self.role
        for request_id in request_ids:
            self.open.pop(request_id).set_result(
                m.Completed(
                    request_id=request_id,
                    token_ids=b"",
                    logprobs=b"",
                    finish_reason=ABORTED,
                    policy_version=0,
                )
            )

    async def _call(self, order: m.Score) -> m.Message:
        if order.reward != "judge":
            return self.answer(order)
        score = parse_verdict(order.completion, self.config.genrms[0].verdict)
        return m.Failed(error="no verdict", exit_code=2) if score is None else m.Scored(score=score)

    def score(self) -> SampleState:
        asyncio.run(self.scorer.score(self.subject, ROLES))
        return self.sample


def good(_: m.Score) -> m.Message:
    return m.Scored(score=0.25, extra={"length": 2.0})


def judge_says(folder: Path, text: str, make: Callable[[Path], str] = make_scripted_model) -> list[int]:
    """Token ids that the judge's tokenizer decodes to this text."""
    from yatt.adapters.inputs.text_parts import TextPart
    from yatt.adapters.inputs.tokenizer import Tokenizer

    tokenizer = Tokenizer(make(folder / "tokenizer"))
    ids = tokenizer.encode_parts([TextPart(text, False)], adds_special=False)
    assert tokenizer.decode(ids) == text
    return ids


def test_function_and_genrm_both_score(tmp_path: Path) -> None:
    sample = Bench(tmp_path, [judge_says(tmp_path, "Y")], good).score()
    assert sample.scores == {"digits": 0.25, "judge": 1.0}
    assert sample.extras == {"digits/length": 2.0}
    assert sample.verdicts == {"judge": "Y"} and not sample.failed


def test_names_of_numbers_are_bounded_so_that_a_sample_is_no_curve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = iter(range(1000))
    bench = Bench(
        tmp_path, [], lambda _: m.Scored(score=1.0, extra={"same": 1.0, f"of {next(numbers)}": 2.0})
    )
    seen: set[str] = set()
    for _ in range(100):
        bench.sample.extras = {}
        asyncio.run(bench.scorer.score_one("digits", bench.subject))
        assert "digits/same" in bench.sample.extras
        seen |= bench.sample.extras.keys()
    assert len(seen) == MOST_MEASURES and "of 0" in str(seen) and "of 70" not in str(seen)
    assert caplog.text.count("those of more are left out") == 1


def test_an_unreadable_verdict_is_asked_again_warmer_and_with_another_seed(tmp_path: Path) -> None:
    words = [judge_says(tmp_path, text) for text in ("?", "N")]
    bench = Bench(tmp_path, words, good, retries=1, temperature=0.0, retry_temperature=0.6)
    assert bench.score().scores["judge"] == 0.0
    assert [each.temperature for each in bench.asked] == [0.0, 0.6]
    assert bench.asked[0].seed != bench.asked[1].seed
    assert bench.subject.counters == {"genrm/judge/asked": 2, "genrm/judge/unparsable": 1}


@pytest.mark.parametrize("on_unparsable", ["drop_group", "score"])
def test_after_the_retries_the_group_is_dropped_or_the_named_score_is_used(
    tmp_path: Path, on_unparsable: str
) -> None:
    unreadable = judge_says(tmp_path, "?")
    bench = Bench(
        tmp_path, [unreadable] * 2, good, retries=1, on_unparsable=on_unparsable, unparsable_score=0.5
    )
    sample = bench.score()
    if on_unparsable == "score":
        assert sample.scores["judge"] == 0.5 and not sample.failed
    else:
        assert sample.failed == (
            "genrm 'judge', prompt 4, sample 0: no readable verdict in '?'; the question was '1 + 1 = 2'"
        )
        assert sample.is_users_failure


def test_an_answer_with_only_reasoning_is_counted_and_told(tmp_path: Path) -> None:
    """Of a service, which sends it apart from the text."""
    message = {"role": "assistant", "content": None, "reasoning_content": "It is a 7, I think."}
    content = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    service = Service(lambda _: (200, {}, content))
    try:
        bench = Bench(tmp_path, [], good, api={"url": service.url}, engine="auto", retries=0)
        sample = bench.score()
    finally:
        service.close()
    assert "no readable verdict in '', beside which there was reasoning; the question was" in sample.failed
    assert cause_of(sample.failed) == "genrm 'judge', no readable verdict, beside which there was reasoning"
    assert bench.subject.counters == {
        "genrm/judge/asked": 1, "genrm/judge/unparsable": 1, "genrm/judge/only_reasoning": 1,
    }  # fmt: skip


def test_a_verdict_that_was_cut_is_none(tmp_path: Path) -> None:
    cut = completion(sample_of("x"), judge_says(tmp_path, "Y"), "length")
    bench = Bench(tmp_path, [cut], good, retries=0)
    said = (
        "no readable verdict in 'Y', which was cut (genrms[judge].max_tokens is 512); the question was '1 + 1"
    )
    assert said in bench.score().failed
    assert bench.subject.counters["genrm/judge/truncated"] == 1


def sample_of(name: str) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=name, prompt_ids=b"", seed=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1
    )


def test_a_score_of_weight_0_that_fails_costs_nothing_and_is_counted(tmp_path: Path) -> None:
    def fails(_: m.Score) -> m.Message:
        return m.Failed(error="compute_score failed", exit_code=2)

    bench = Bench(tmp_path, [judge_says(tmp_path, "Y")], fails)
    bench.scorer.weights["digits"] = 0.0
    sample = bench.score()
    assert not sample.failed and sample.scores == {"judge": 1.0}
    assert sample.unmeasured == {"digits": "reward 'digits', prompt 4, sample 0: compute_score failed"}
    assert bench.subject.counters["reward/digits/unmeasured"] == 1


def test_a_failed_function_stops_before_the_genrm_is_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [], lambda _: m.Failed(error="ValueError: half ?", exit_code=2))
    sample = bench.score()
    assert sample.failed == "reward 'digits', prompt 4, sample 0: ValueError: half ?"
    assert sample.is_users_failure and not bench.asked


def test_a_genrm_that_machines_lost_ends_a_deterministic_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [WorkerFailed("its engine ended")], good)
    with pytest.raises(WorkerFailed, match=r"its engine ended.*a lost sample would change the results"):
        bench.score()


@pytest.mark.parametrize("votes", [1, 3])
def test_an_interrupted_question_is_no_failure_and_is_asked_again(tmp_path: Path, votes: int) -> None:
    said = judge_says(tmp_path, "Y")
    bench = Bench(
        tmp_path, [*[said] * (votes - 1), HANGS, *[said] * votes], good, votes=votes, temperature=0.5
    )

    async def scene() -> None:
        scoring = asyncio.ensure_future(bench.scorer.score(bench.subject, ROLES))
        while not bench.open:
            await asyncio.sleep(0.01)
        await bench.scorer.interrupt()
        await asyncio.wait_for(scoring, HANG_S)
        assert bench.sample.scores == {"digits": 0.25} and not bench.sample.failed
        await bench.scorer.interrupt()  # nothing is open: it changes nothing
        await bench.scorer.score(bench.subject, ROLES)

    asyncio.run(scene())
    assert bench.sample.scores == {"digits": 0.25, "judge": 1.0}
    assert len({sample.request_id for sample in bench.asked}) == len(bench.asked) == 2 * votes


def test_the_policy_as_judge_is_asked_while_it_samples_and_cut_with_it(tmp_path: Path) -> None:
    policy = {"model": "policy", "engine": "auto"}
    bench = Bench(tmp_path, [HANGS, judge_says(tmp_path, "Y")], good, **policy)
    assert bench.scorer.names(("rollout",)) == bench.scorer.names() == ("digits", "judge")
    assert bench.scorer.names(("genrm:other",)) == ("digits",), "while another GenRM has the GPUs"

    async def scene() -> None:
        scoring = asyncio.ensure_future(bench.scorer.score(bench.subject, ("rollout",)))
        while not bench.open:
            await asyncio.sleep(0.01)
        await bench.scorer.interrupt()
        await asyncio.wait_for(scoring, HANG_S)
        assert bench.sample.scores == {"digits": 0.25} and not bench.sample.failed
        await bench.scorer.score(bench.subject, ("rollout",))

    asyncio.run(scene())
    assert bench.sample.scores == {"digits": 0.25, "judge": 1.0}


@pytest.mark.parametrize("is_held_out", [False, True])
def test_an_audit_looks_at_its_share_of_the_groups_and_at_every_held_out_row(
    tmp_path: Path, is_held_out: bool
) -> None:
    yes, numbers = judge_says(tmp_path, "Y"), range(12)
    bench = Bench(tmp_path, [yes] * len(numbers), good, share=0.5, weight=0)
    seed, looked_at = bench.config.run.seed, []
    for number in numbers:
        group = new_group(number, 0, "1 + 1 =", [1, 2], 1)
        (sample,) = group.samples
        sample.text, sample.finish_reason = " 2", "stop"
        subject = replace(bench.subject, group=group, sample=sample, is_held_out=is_held_out)
        asyncio.run(bench.scorer.score(subject, ROLES))
        assert not sample.failed and sample.scores["digits"] == 0.25
        assert sample.unmeasured.keys() ^ sample.scores.keys() == {"digits", "judge"}
        looked_at += [number] if "judge" in sample.scores else []
    expected = [n for n in numbers if is_held_out or is_in_share(seed, n, 0.5)]
    assert looked_at == expected and len(bench.asked) == len(expected)
    assert is_held_out or 0 < len(expected) < len(numbers)


def test_a_question_without_tokens_is_refused_with_the_cure(tmp_path: Path) -> None:
    """An empty completion in a template that has nothing else: no engine takes an empty prompt."""
    bench = Bench(tmp_path, [], good, template="{completion}", chat=False)
    bench.sample.text = ""
    failed = bench.score().failed
    assert "the question to GenRM 'judge' has no tokens; write words into its template" in failed
    assert not bench.asked


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_genrm_that_sees_gets_the_prompts_pictures_by_its_own_tokens(tmp_path: Path, is_chat: bool) -> None:
    refs = [m.MediaRef("a.png", "aa" * 32, 64, 96), m.MediaRef("", "bb" * 32, 32, 32)]
    template = "{prompt} said {completion}"
    bench = Bench(tmp_path, [], good, sees="prompt", template=template, max_model_tokens=300, chat=is_chat)
    yes = judge_says(tmp_path, "Y", make_seeing_scripted_model)
    bench.verdicts = [yes, yes]
    _, media = with_placeholders([9, 5, 5], refs, picture_tokens(bench.config.genrms[0].model))
    bench.subject.group.media = tuple(media)
    row = Row(prompt="<image> or <image>?", data_source="", ground_truth="", raw={}, media=tuple(refs))
    bench.subject = replace(bench.subject, row=row)
    bench.sample.text = "the <image> first"
    scored = bench.score()
    assert scored.scores.get("judge") == 1.0, scored.failed
    (asked,) = bench.asked
    assert [each.ref for each in asked.media] == refs
    ids = m.unpack_ids(asked.prompt_ids)
    places = [range(each.start, each.start + each.num_tokens) for each in asked.media]
    assert [place for place, token in enumerate(ids) if token == 5] == [p for each in places for p in each]
    assert [len(each) for each in places] == [6, 1], "a completion cannot forge a picture"
    bench.subject.group.media = ()
    bench.sample.scores = {}
    asyncio.run(bench.scorer.score(bench.subject, ROLES))
    assert bench.asked[1].media == ()


@pytest.mark.parametrize("sees", ["prompt", "all"])
def test_a_genrm_that_sees_all_is_shown_the_environments_answers_and_a_policy_forges_none(
    tmp_path: Path, sees: str
) -> None:
    view, plan = m.MediaRef("", "bb" * 32, 32, 32), m.MediaRef("a.png", "aa" * 32, 64, 96)
    bench = Bench(tmp_path, [], good, sees=sees, template="{completion} of {prompt}", max_model_tokens=300)
    bench.verdicts = [judge_says(tmp_path, "Y", make_seeing_scripted_model)]
    bench.sample.turns = [
        m.Turn(m.pack_ids([9]), is_sampled=True),
        m.Turn(m.pack_ids([5, 8]), media=(m.PlacedMedia(view, 0, 1, (1, 2, 2)),)),
        m.Turn(m.pack_ids([9]), is_sampled=True),
    ]
    turns = (("assistant", "an <image> go"), ("user", "see <image>."), ("assistant", "done"))
    bench.sample.text = "an <image> go\n\ndone"
    bench.subject.group.media = (m.PlacedMedia(plan, 0, 6, (1, 6, 4)),)
    row = Row(prompt="<image>?", data_source="", ground_truth="", raw={}, media=(plan,))
    bench.subject = replace(bench.subject, turns=turns, row=row)
    scored = bench.score()
    assert scored.scores.get("judge") == 1.0, scored.failed
    (asked,) = bench.asked
    assert [each.ref for each in asked.media] == ([view, plan] if sees == "all" else [plan])
    text = judge_text(tmp_path, m.unpack_ids(asked.prompt_ids))
    said = "an <image> go\n\nsee .\n\ndone" if sees == "all" else bench.sample.text
    assert text == f"{said} of ?", "what a judge of all sees between the pictures"


def judge_text(folder: Path, ids: list[int]) -> str:
    from yatt.adapters.inputs.tokenizer import Tokenizer

    return Tokenizer(make_seeing_scripted_model(folder / "tokenizer")).decode(ids)


def test_a_picture_that_a_genrm_does_not_take_is_the_groups_loss(tmp_path: Path) -> None:
    fault = m.Completed(
        request_id="", token_ids=b"", logprobs=b"", finish_reason=m.MEDIA_FAULT, policy_version=0,
        error="a.png is truncated.",
    )  # fmt: skip
    for size, given, says in (
        ((64, 96), [fault], "a.png is truncated"),
        ((4000, 4), [], "no side may be more"),
    ):
        folder = tmp_path / str(size[1])
        folder.mkdir()
        bench = Bench(folder, list(given), good, sees="prompt", max_model_tokens=300)
        ref = m.MediaRef("a.png", "aa" * 32, *size)
        bench.subject.group.media = (m.PlacedMedia(ref, 0, 1, (1, 2, 2)),)
        sample = bench.score()
        assert "judge" not in sample.scores
        assert says in sample.failed


def test_a_question_that_leaves_no_room_is_refused_whatever_its_engine_takes(tmp_path: Path) -> None:
    """The policy's engines take longer texts than the limit of a judge that is the policy."""
    bench = Bench(tmp_path, [], good, model="policy", engine="auto", max_model_tokens=4)
    sample = bench.score()
    assert bench.asked == []
    assert "tokens, and genrms[judge].max_model_tokens is 4" in sample.failed


def test_after_an_interruption_no_other_judge_is_asked(tmp_path: Path) -> None:
    async def play() -> None:
        bench = Bench(tmp_path, [HANGS], good)
        others = dict(bench.scorer._sources)
        bench.scorer._sources = {"judge": others["judge"], "later": others["judge"]}
        scoring = asyncio.ensure_future(bench.scorer.score(bench.subject, ROLES))
        await until(lambda: bool(bench.open), "the question")
        await bench.scorer.interrupt()
        await scoring
        assert len(bench.asked) == 1 and not bench.sample.failed and not bench.sample.scores

    asyncio.run(play())
