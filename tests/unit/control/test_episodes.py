"""Episodes of several turns: real episodes, router and table of engines, no processes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runs import HANG_S, RunFile
from tests.tiny_models import make_seeing_scripted_model
from tests.unit.control.engine_stand_in import Engines, completion
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.encoded_prompt import encode_observation
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes, rollout_sampling
from yatt.control.rollouts.groups.groups import PromptGroup, SampleState, new_group
from yatt.control.rollouts.router import Router
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.core.samples.placeholders import placed_in, with_placeholders
from yatt.core.samples.rewards import Shaping
from yatt.errors import ConfigError, WorkerFailed
from yatt.models.pictures.tokens import picture_tokens
from yatt.paths import RunPaths
from yatt.records import message as m

ANSWER = "6+6="
CallStep = Callable[[m.Step], Awaitable[m.Message]]


async def answers_once(step: m.Step) -> m.Message:
    return m.Stepped(is_end=True) if len(step.turns) > 1 else m.Stepped(observation=ANSWER)


class Bench:
    """One sample of one prompt. Everything is real but the engine and the reward process."""

    def __init__(self, folder: Path, call_step: CallStep = answers_once, **settings: Any) -> None:
        file = RunFile(folder, {"launch": {"nodes": 1}, **settings}).write()
        config = load_run_config([file], [f"environment.path={folder / 'env.py'}"])
        self.node = Node(
            config=config, paths=RunPaths(folder), placement=placement_of(config),
            attempt=1, index=0, host="",
            device="cpu",
        )  # fmt: skip
        self.steps: list[m.Step] = []
        self.engines = Engines(lambda _, sample: completion(sample, [5, 6], version=3))
        self.local = LocalEngines(self.engines, config)  # type: ignore[arg-type]
        self.engines.completed = self.local.completed
        self.tokenizer = Tokenizer(config.model.path)
        router = Router(self.node, self.local, Peers(), Progress(int))

        async def noted(step: m.Step) -> m.Message:
            self.steps.append(step)
            return await call_step(step)

        self.episodes = Episodes(self.node, self.tokenizer, router, noted, rollout_sampling(config))
        self.group = new_group(4, 2, "1+1=", self.tokenizer.encode_plain("1+1="), 1)

    def subject(self) -> Subject:
        row = Row(prompt="1+1=", ground_truth="2", data_source="sums", raw={})
        return Subject(group=self.group, sample=self.group.samples[0], row=row, ref=m.RowRef(0, 0, 0))

    async def extend(self, may_sample: Callable[[], bool] = lambda: True) -> SampleState:
        if not self.local.is_awake("engine.1"):
            await self.local.add("engine.1", ROLLOUT, self.node.slabs[0], 3)
        subject = self.subject()
        await asyncio.wait_for(self.episodes.extend(subject, may_sample), HANG_S)
        return subject.sample

    def prompts(self) -> list[bytes]:
        return [body.prompt_ids for _, body, _ in self.engines.sent if isinstance(body, m.SampleRequest)]


def test_two_turns_with_an_answer_between_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sample = asyncio.run(bench.extend())
    observed = m.pack_ids(bench.tokenizer.encode_plain(ANSWER))
    assert [turn.token_ids for turn in sample.turns] == [m.pack_ids([5, 6]), observed, m.pack_ids([5, 6])]
    assert [turn.is_sampled for turn in sample.turns] == [True, False, True]
    assert sample.finish_reason == "stop"
    first = bench.group.prompt
    assert bench.prompts() == [first, first + m.pack_ids([5, 6]) + observed]
    assert [step.turns[-1][0] for step in bench.steps] == ["assistant", "assistant"]
    assert bench.steps[1].turns[1] == ("user", ANSWER)
    (fact,) = bench.group.facts({}, Shaping(max_tokens=64))
    assert (fact.num_completion_tokens, fact.num_observation_tokens, fact.num_turns) == (
        4,
        len(observed) // 4,
        2,
    )
    (rollout,) = bench.group.rollouts().values()
    assert rollout.turns == (m.Turn(first), *sample.turns)


def test_the_policys_text_is_without_the_answers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sample = asyncio.run(bench.extend())
    said = bench.tokenizer.decode([5, 6])
    assert bench.episodes.text_of(sample) == f"{said}\n\n{said}"
    turns = bench.episodes.with_turns(bench.subject()).turns
    assert turns == (("assistant", said), ("user", ANSWER), ("assistant", said))


def test_the_last_turn_is_not_answered(tmp_path: Path) -> None:
    async def always(_: m.Step) -> m.Message:
        return m.Stepped(observation=ANSWER)

    bench = Bench(tmp_path, always, environment={"max_turns": 3}, rollout={"max_response_tokens": 64})
    sample = asyncio.run(bench.extend())
    assert sample.num_turns == 3 and len(bench.steps) == 2 and sample.finish_reason == "stop"


def test_an_episode_ends_when_no_room_is_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rollout={"max_response_tokens": 2 + len(ANSWER)})
    sample = asyncio.run(bench.extend())
    assert sample.finish_reason == "length" and sample.num_turns == 1
    assert sample.num_response_tokens <= 2 + len(ANSWER)


def test_an_interrupted_episode_continues_where_it_was_and_after_a_checkpoint(tmp_path: Path) -> None:
    whole = asyncio.run(Bench(tmp_path / "whole").extend())
    bench = Bench(tmp_path / "parts")

    async def in_parts() -> SampleState:
        bench.engines.answer = lambda _, sample: completion(sample, [5], "abort", version=2)
        sample = await bench.extend()
        assert not sample.finish_reason and not sample.is_turn_over
        bench.engines.answer = lambda _, sample: completion(sample, [6], version=3)
        permits = iter([True, False])  # the turn, then no other one
        await bench.extend(lambda: next(permits))
        saved = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.group), type=PromptGroup)
        bench.group = saved
        assert saved.samples[0].turns[-1].token_ids == m.pack_ids(bench.tokenizer.encode_plain(ANSWER))
        bench.engines.answer = lambda _, sample: completion(sample, [5, 6], version=3)
        return await bench.extend()

    got = asyncio.run(in_parts())
    assert [turn.token_ids for turn in got.turns] == [turn.token_ids for turn in whole.turns]
    assert got.turns[0].policy_versions == ((2, 0, 1), (3, 1, 2))
    assert got.oldest_version(9) == 2
    assert len(bench.steps) == 2, "no answer is asked for twice"


def test_a_failure_of_the_users_code_fails_the_sample_and_is_the_users(tmp_path: Path) -> None:
    async def fails(_: m.Step) -> m.Message:
        return m.Failed(error="env.py:3: no", exit_code=2)

    sample = asyncio.run(Bench(tmp_path, fails).extend())
    assert sample.failed == "environment, prompt 4, sample 0: env.py:3: no" and sample.is_users_failure


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_failure_of_machines_is_not_the_users(tmp_path: Path, deterministic: bool) -> None:
    async def lost(_: m.Step) -> m.Message:
        return m.Failed(error="ended its process each time")

    bench = Bench(tmp_path, lost, run={"deterministic": deterministic})
    if deterministic:
        with pytest.raises(WorkerFailed, match="a lost sample would change the results"):
            asyncio.run(bench.extend())
        return
    sample = asyncio.run(bench.extend())
    assert sample.failed and not sample.is_users_failure


def test_a_stop_text_across_a_pause_ends_the_completion_where_an_engine_would(tmp_path: Path) -> None:
    """One part was sampled before the pause: no engine sees the whole of it."""
    bench = Bench(tmp_path, rollout={"stop": ["+6"]})
    plus, six, four = (bench.tokenizer.encode_plain(each)[0] for each in ("+", "6", "4"))
    parts = iter([([four, plus], "abort"), ([six, four, four], "length")])

    def part(_: str, sample: m.SampleRequest) -> m.Completed:
        ids, reason = next(parts)
        return msgspec.structs.replace(completion(sample, ids, version=3), finish_reason=reason)

    bench.engines.answer = part
    subject = bench.subject()

    async def both() -> SampleState:
        await bench.local.add("engine.1", ROLLOUT, bench.node.slabs[0], 3)
        await bench.episodes.extend(subject, lambda: True)
        assert not subject.sample.is_turn_over
        await bench.episodes.extend(subject, lambda: False)
        await bench.episodes.extend(subject, lambda: len(bench.prompts()) < 2)
        return subject.sample

    sample = asyncio.run(asyncio.wait_for(both(), HANG_S))
    (turn, *_) = sample.turns
    assert m.unpack_ids(turn.token_ids) == [four, plus, six]
    assert (turn.finish_reason, len(turn.logprobs) // 4) == ("stop", 3)
    assert turn.policy_versions[-1][-1] == 3


PICTURE = m.MediaRef("", "a" * 64, 96, 64)
SEEN = 6
"""Tokens of the picture: 3 x 2 squares of 32 pixels."""


class SeeingBench(Bench):
    """A model that takes pictures, whose environment answers with one."""

    def __init__(self, folder: Path, *, text: str = "see <image> now", **settings: Any) -> None:
        async def shows(_: m.Step) -> m.Message:
            return m.Stepped(observation=text, media=(PICTURE,))

        model = make_seeing_scripted_model(folder / "seeing")
        super().__init__(folder, shows, **{"model": {"path": model}, **settings})
        ids, media = with_placeholders([40, 3, 5, 4, 41], [PICTURE], picture_tokens(model))
        self.group = new_group(4, 2, "1+1=", ids, 1, media)
        self.engines.answer = lambda _, asked: completion(asked, [60, 61][: asked.max_tokens], version=3)


def test_an_answers_pictures_are_tokens_of_its_turn_and_go_to_the_engine_with_the_prompts(
    tmp_path: Path,
) -> None:
    settings = {"environment": {"max_turns": 3, "images": True}, "rollout": {"max_response_tokens": 90}}
    bench = SeeingBench(tmp_path, **settings)
    sample = asyncio.run(bench.extend())
    assert [turn.is_sampled for turn in sample.turns] == [True, False, True, False, True]
    before, after = (bench.tokenizer.encode_plain(part) for part in ("see ", " now"))
    for turn in sample.turns[1::2]:
        (placed,) = turn.media
        expected = [*before, 3, *[5] * SEEN, 4, *after]
        assert m.unpack_ids(turn.token_ids) == expected
        assert (placed.ref, placed.start, placed.num_tokens) == (PICTURE, len(before) + 1, SEEN)
    requests = [body for _, body, _ in bench.engines.sent if isinstance(body, m.SampleRequest)]
    assert [len(request.media) for request in requests] == [1, 2, 3]
    for request in requests:
        ids = m.unpack_ids(request.prompt_ids)
        shown = {place for each in request.media for place in range(each.start, each.start + each.num_tokens)}
        assert shown == {place for place, token in enumerate(ids) if token == 5}
    (rollout,) = bench.group.rollouts().values()
    assert placed_in(rollout.turns) == requests[-1].media
    assert bench.steps[-1].turns[1] == ("user", "see <image> now")
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.group), type=PromptGroup)
    assert saved.samples[0].turns == sample.turns


@pytest.mark.parametrize("room", range(2, 40))
def test_neither_text_nor_picture_of_an_answer_is_shown_without_room_for_both(
    tmp_path: Path, room: int
) -> None:
    settings = {"environment": {"max_turns": 3, "images": True}, "rollout": {"max_response_tokens": room}}
    bench = SeeingBench(tmp_path, **settings)
    sample = asyncio.run(bench.extend())
    length = len(bench.tokenizer.encode_plain("see ")) + SEEN + 2 + len(bench.tokenizer.encode_plain(" now"))
    fits = [turns for turns in (1, 2) if 2 * turns + length * turns < room]
    assert [len(turn.media) for turn in sample.turns[1::2]] == [1] * len(fits)
    assert sample.num_response_tokens <= room and len(sample.observations) == len(fits)
    assert sample.finish_reason == ("length" if len(fits) < 2 else "stop")


def test_more_pictures_than_engines_take_end_the_episode_as_cut(tmp_path: Path) -> None:
    settings = {
        "environment": {"max_turns": 4, "images": True}, "rollout": {"max_response_tokens": 90},
        "media": {"most_per_prompt": 2},
    }  # fmt: skip
    sample = asyncio.run(SeeingBench(tmp_path, **settings).extend())
    assert (sample.num_turns, sample.finish_reason, sample.failed) == (2, "length", "")


def test_an_answer_that_the_model_cannot_take_fails_the_sample_and_is_the_users(tmp_path: Path) -> None:
    bench = SeeingBench(
        tmp_path, text="no mark", environment={"images": True}, rollout={"max_response_tokens": 90}
    )
    sample = asyncio.run(bench.extend())
    assert sample.is_users_failure
    assert sample.failed.endswith("its answer cannot be encoded: it has 0 placeholders for 1 pictures")


def test_a_chat_template_shows_an_answers_picture_and_text_forges_none(tmp_path: Path) -> None:
    model = make_seeing_scripted_model(tmp_path / "seeing")
    tokenizer, tokens = Tokenizer(model), picture_tokens(model)
    ids = encode_observation("<|image_pad|> is <image>!", tokens, tokenizer, "user")
    assert ids.count(5) == 1 and tokenizer.decode(ids, skip_special=False) == (
        "<|im_end|>\n<|im_start|>user\n<|image_pad|> is <|vision_start|><|image_pad|><|vision_end|>!"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_does_not_show_an_answer_is_refused(tmp_path: Path) -> None:
    """The policy would not see it, and nobody would know."""
    model = Path(make_seeing_scripted_model(tmp_path / "seeing"))
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    template = settings["chat_template"].replace("messages %}", "messages if m['role'] != 'tool' %}", 1)
    file.write_text(json.dumps(settings | {"chat_template": template}))
    tokenizer = Tokenizer(str(model))
    assert tokenizer.encode_answer("user", "hello")
    with pytest.raises(ConfigError, match="does not show messages of the role tool; write another role"):
        tokenizer.encode_answer("tool", "hello")
    with pytest.raises(ConfigError, match="does not show messages of the role tool"):
        encode_observation("see <image>", picture_tokens(str(model)), tokenizer, "tool")
