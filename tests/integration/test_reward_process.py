"""The reward process over a real ipc socket, with functions as users write them."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HANG_S
from tests.tiny_models import make_scripted_model
from tests.worker_process import worker_with_server, write_run
from yatt.errors import EXIT_USER_MISTAKE
from yatt.judging.outside import packed_group, unpacked_questions, unpacked_scores, way_name
from yatt.judging.protocol import Answer, JudgedGroup
from yatt.records import message as m

FUNCTIONS = """
import asyncio, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str), "note": "text"}

async def patient(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.5)
    return extra_info["value"]

begun = []

async def together(data_source, solution_str, ground_truth, extra_info=None):
    begun.append(extra_info)
    while len(begun) < 50:
        await asyncio.sleep(0.01)
    return 1.0

async def endless(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(60)

async def deaf(data_source, solution_str, ground_truth, extra_info=None):
    while True:
        try:
            await asyncio.sleep(0.1)
        except BaseException:
            pass

async def covering(data_source, solution_str, ground_truth, extra_info=None):
    try:
        await asyncio.sleep(60)
        return 1.0
    except BaseException:
        return 0.0

async def quitting(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(0)

async def cancelled(data_source, solution_str, ground_truth, extra_info=None):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task

def typed(data_source, solution_str, ground_truth, extra_info=None):
    facts = extra_info["finish_reason"], extra_info["num_prompt_tokens"], extra_info["num_completion_tokens"]
    assert facts == ("stop", 3, 1) and extra_info["max_response_tokens"] == 1024, extra_info
    assert extra_info["value"] == 0.25
    return float(ground_truth == {"numbers": [1, 2.5, None], "deep": {"yes": True}})

def ranked(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) == len(columns["ground_truth"])
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [None if not length else sorted(lengths).index(length) for length in lengths]

def listed(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    assert {len(each) for each in (data_sources, ground_truths, extra_infos)} == {len(solution_strs)}
    if "short" in solution_strs:
        return [1.0]
    return [{"score": float(text == truth) + bonus, "length": len(text)}
            for text, truth in zip(solution_strs, ground_truths)]

def broken(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / len(solution_str)

def leaving(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(3)

def wordless(data_source, solution_str, ground_truth, extra_info=None):
    return None

def halved(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("half \\ud800")
    return {"score": 1, "half \\ud800": 2, 5: 6}

class Unprintable(Exception):
    def __str__(self):
        return self.text

def unprintable(data_source, solution_str, ground_truth, extra_info=None):
    raise Unprintable

def trl_style(prompts, completions, answer, **columns):
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer)]

async def step(text, episode):
    if text == "raise":
        return 1 / 0
    if text == "rest":
        await asyncio.sleep(60)
    if text == "number":
        return 5
    if text == str(episode.ground_truth):
        return None
    return f"{episode.kwargs['hint']} {len(episode.turns)} {episode.prompt}{episode.extra_info['value']}"

async def judged(data_source, solution_str, ground_truth, extra_info, prompt, client):
    first = await client.complete("is it right? " + solution_str)
    second = await client.complete("sure? " + prompt, max_tokens=3, temperature=1.0)
    return float(first == "yes") + 0.5 * float(second == "yes")

async def judged_stubbornly(data_source, solution_str, ground_truth, extra_info, prompt, client):
    while True:
        try:
            await client.complete(extra_info.get("text", "sure?"))
        except Exception as error:
            if solution_str == "once":
                return 0.0

async def judged_slowly(data_source, solution_str, ground_truth, extra_info, prompt, client):
    first = await client.complete("is it right? " + solution_str)
    if solution_str == "rest":
        await asyncio.sleep(60)
    return float(first == "yes")

class Own:
    def questions(self, group):
        if group.prompt == "fails":
            return 1 / 0
        text = f"{group.row['extra_info']['value']} {group.completions[0]}"
        return [Question(key="one", fields={"text": text}, about=(0,))]

    def read(self, group, answers):
        return GroupScores(scores=tuple(answers["one"].value for _ in group.completions))

def own(genrm):
    from yatt.judging.protocol import GroupScores, Question
    globals().update(GroupScores=GroupScores, Question=Question)
    return Own()
"""
NAMES = ["patient", "endless", "broken", "leaving", "wordless", "typed", "quitting", "cancelled", "halved"]
NAMES += ["unprintable"]
QUICK = ["deaf", "covering"]


ROW = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"value": 0.25}}


def order(reward: str, completion: str = "4", **row: object) -> m.Score:
    """On a row that stands alone in the data file."""
    text = json.dumps({"prompt": "2 + 2 = ", **ROW, **row})
    at = DATA.stat().st_size if DATA.exists() else 0
    with DATA.open("a") as file:
        file.write(text + "\n")
    return m.Score(
        reward=reward, prompt="2 + 2 = ", completion=completion, row=m.RowRef(0, at, len(text.encode())),
        finish_reason="stop", num_prompt_tokens=3, num_completion_tokens=1,
    )  # fmt: skip


DATA = Path()


@pytest.fixture
def run(tmp_path):
    global DATA
    DATA = tmp_path / "rows.jsonl"
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    rewards = [{"name": "plain", "path": str(file), "kwargs": {"bonus": 0.5}}]
    rewards += [{"name": each, "path": str(file), "function": each, "timeout_s": 5.0} for each in NAMES]
    rewards += [{"name": each, "path": str(file), "function": each, "timeout_s": 0.5} for each in QUICK]
    rewards += [{"name": "together", "path": str(file), "function": "together", "timeout_s": HANG_S}]
    rewards += [{"name": "chat", "path": str(file), "function": "trl_style", "style": "trl"}]
    rewards += [{"name": "gsm8k", "path": "builtin:gsm8k"}]
    rewards += [{"name": "ranked", "path": str(file), "function": "ranked", "style": "trl"}]
    rewards += [{"name": "listed", "path": str(file), "function": "listed", "scope": "batch",
                 "kwargs": {"bonus": 0.5}}]  # fmt: skip
    judge = make_scripted_model(tmp_path / "judge")
    genrm = {"name": "judge", "model": judge, "path": str(file), "function": "judged", "max_tokens": 9}
    pointwise = {"name": "template", "model": judge, "template": "{completion}",
                 "verdict": {"pattern": "score: (.*)"}}  # fmt: skip
    answering = {"path": str(file), "timeout_s": 0.5, "kwargs": {"hint": "try"}}
    slow = genrm | {"name": "slow", "function": "judged_slowly", "timeout_s": 0.5}
    stubborn = genrm | {"name": "stubborn", "function": "judged_stubbornly", "timeout_s": 2.0}
    mine = pointwise | {"name": "own", "path": str(file), "function": "own", "judging": {"by": "own"}}
    mine |= {"template": "{text}", "timeout_s": 5.0}
    data = {"train_files": [str(DATA)]}
    return write_run(
        tmp_path,
        {
            "rewards": rewards,
            "genrms": [genrm, pointwise, slow, stubborn, mine],
            "data": data,
            "environment": answering,
        },
    )


def over_rewards(run, scene, handler=None):
    async def play():
        async with worker_with_server(run, "yatt.reward", handler=handler) as server:
            await scene(server)

    asyncio.run(play())


def test_functions_are_called_in_their_style(run):
    async def scene(server):
        scored = await server.order(order("plain"))
        assert scored == m.Scored(score=1.5, extra={"length": 1.0})
        assert (await server.order(order("patient"))).score == 0.25
        messages = [{"role": "user", "content": "2 + 2 = "}]
        row = {"prompt": messages, "answer": "4"}
        chats = (order("chat", **row), order("chat", completion="5", **row))
        assert scores(await server.order(m.ScoreMany(reward="chat", items=chats))) == [1.0, 0.0]
        assert (await server.order(order("gsm8k", completion="so\n#### 4"))).score == 1.0
        assert await server.order(m.Stop()) == m.Done()
        assert await server.ended() == 0

    over_rewards(run, scene)


def scores(answer: m.Message) -> list[float | None]:
    assert isinstance(answer, m.ScoredMany), answer
    return [each.score if each.applies else None for each in answer.scores]


def test_functions_of_groups_and_batches_get_lists(run):
    messages = [{"role": "user", "content": "2 + 2 = "}]
    row = {"prompt": messages, "answer": "4"}

    async def scene(server):
        group = tuple(order("ranked", completion=text, **row) for text in ("ccc", "a", "", "bb"))
        assert scores(await server.order(m.ScoreMany(reward="ranked", items=group))) == [3.0, 1.0, None, 2.0]
        batch = tuple(order("listed", completion=text) for text in ("4", "5"))
        answer = await server.order(m.ScoreMany(reward="listed", items=batch))
        assert scores(answer) == [1.5, 0.5] and answer.scores[0].extra == {"length": 1.0}
        many = tuple(order("listed", completion="4") for _ in range(300))
        assert scores(await server.order(m.ScoreMany(reward="listed", items=many), 30.0)) == [1.5] * 300
        wrong = (*batch, order("listed", completion="short"))
        failed = await server.order(m.ScoreMany(reward="listed", items=wrong))
        assert failed.user and "it must give a list of 3 numbers for 3 completions, not [1.0]" in failed.error
        assert "and 2 more" in failed.error

    over_rewards(run, scene)


def test_the_environment_answers_a_turn_or_ends_the_episode(run):
    row = order("plain").row

    def step(text: str) -> m.Step:
        turns = (("assistant", "5"), ("user", "no"), ("assistant", text))
        return m.Step(prompt="2 + 2 = ", turns=turns, row=row)

    async def scene(server):
        assert await server.order(step("3")) == m.Stepped(observation="try 3 2 + 2 = 0.25")
        assert await server.order(step("4")) == m.Stepped(is_end=True)
        for text, says in (
            ("raise", "on the sums sample with prompt '2 + 2 = ': ZeroDivisionError: division by zero"),
            (
                "number",
                "or an object with 'text' and 'images', not int",
            ),
            ("rest", "step took longer than its timeout_s 0.5"),
        ):
            failed = await server.order(step(text), 5.0)
            assert says in failed.error and failed.user

    over_rewards(run, scene)


def test_a_ground_truth_and_what_else_a_row_has_arrive_unchanged(run):
    truth = {"numbers": [1, 2.5, None], "deep": {"yes": True}}

    async def scene(server):
        assert (await server.order(order("typed", reward_model={"ground_truth": truth}))).score == 1.0
        number = order("plain", completion="4", reward_model={"ground_truth": 4})
        assert (await server.order(number)).score == 0.5, "4 is not '4'"

    over_rewards(run, scene)


def test_a_row_that_is_gone_fails_its_sample_without_blaming_the_user(run):
    async def scene(server):
        asked = order("plain")
        DATA.write_text("")
        failed = await server.order(asked)
        assert "a row of the data file cannot be read any more" in failed.error and not failed.user

    over_rewards(run, scene)


def test_a_verdict_is_read_where_it_can_be_killed(run):
    async def scene(server):
        assert (await server.order(order("template", completion="hm. score: 7"))).score == 7.0
        assert (await server.order(order("template", completion="none"))) == m.Failed(
            error="no verdict", exit_code=2
        )

    over_rewards(run, scene)


def test_a_way_of_judging_gives_questions_about_its_row_and_scores(run):
    group = JudgedGroup(prompt="p", ground_truth="", data_source="", completions=("4", "5"), indexes=(0, 1))

    def asked(prompt="p", answers=None):
        payload = packed_group(replace(group, prompt=prompt), answers)
        return m.JudgeGroup(reward=way_name("own"), payload=payload, row=order("own").row)

    async def scene(server):
        (question,) = unpacked_questions((await server.order(asked())).payload)
        assert (question.key, question.fields, question.about) == ("one", {"text": "0.25 4"}, (0,))
        scored = await server.order(asked(answers={"one": Answer(votes=(0.25, 0.75))}))
        assert unpacked_scores(scored.payload).scores == (0.5, 0.5)
        failed = await server.order(asked("fails"))
        assert failed.user and "/rewards.py:own failed at " in failed.error
        assert "ZeroDivisionError" in failed.error
        assert (await server.order(order("template", completion="score: 7"))).score == 7.0

    over_rewards(run, scene)


def test_asynchronous_functions_run_at_once(run):
    async def scene(server):
        answers = await asyncio.gather(*(server.order(order("together")) for _ in range(50)))
        assert {type(each) for each in answers} == {m.Scored}

    over_rewards(run, scene)


def test_a_failure_is_one_sentence_with_the_line_and_the_sample(run, tmp_path):
    async def scene(server):
        failed = await server.order(order("broken", completion=""))
        line = 1 + FUNCTIONS.splitlines().index("    return 1 / len(solution_str)")
        file = tmp_path / "rewards.py"
        assert failed.error == (
            f"{file}:broken failed at {file}:{line} on the sums sample with prompt '2 + 2 = ': "
            "ZeroDivisionError: division by zero"
        )
        assert "its score is None, not a number" in (await server.order(order("wordless"))).error
        assert "SystemExit: 3" in (await server.order(order("leaving"))).error
        assert "SystemExit: 0" in (await server.order(order("quitting"))).error
        assert "CancelledError" in (await server.order(order("cancelled"), 5.0)).error
        assert "no reward function is named 'nobody'" in (await server.order(order("nobody"))).error
        assert (await server.order(order("plain"))).score == 1.5

    over_rewards(run, scene)


def test_an_endless_asynchronous_function_fails_its_sample_and_holds_nobody_up(run):
    async def scene(server):
        endless = [asyncio.create_task(server.order(order("endless"))) for _ in range(40)]
        assert (await server.order(order("patient"))).score == 0.25
        failed = await asyncio.gather(*endless)
        assert all("took longer than its timeout_s 5, on the sums sample" in each.error for each in failed)
        assert await server.order(m.Stop()) == m.Done()
        assert await server.ended() == 0

    over_rewards(run, scene)


def test_a_function_that_catches_its_cancellation_fails_its_sample_and_is_told_of(run):
    async def scene(server):
        deaf = [asyncio.create_task(server.order(order("deaf"), 10.0)) for _ in range(3)]
        patient = asyncio.create_task(server.order(order("patient")))
        covered = await server.order(order("covering"))
        assert "covering took longer than its timeout_s 0.5, on the sums sample" in covered.error
        assert covered.user, "0.0 after the limit is no score"
        for failed in await asyncio.gather(*deaf):
            assert (
                "deaf took longer than its timeout_s 0.5 and goes on after it was cancelled" in failed.error
            )
            assert failed.user
        assert (await patient).score == 0.25
        told = [await server.next_told() for _ in range(3)]
        assert told == [m.RewardsStuck(calls=count, limit_s=0.5) for count in (1, 2, 3)]
        assert (await server.order(order("plain"))).score == 1.5

    over_rewards(run, scene)


def test_a_genrm_function_asks_through_the_controller(run):
    asked = []

    async def answer(sender, ask):
        asked.append(ask)
        return m.Answered(text="yes" if ask.text.startswith("is it right") else "no", finish_reason="stop")

    async def scene(server):
        assert (await server.order(order("judge"))).score == 1.0
        again = await server.order(order("judge"))
        assert again.score == 1.0

    over_rewards(run, scene, answer)
    assert [(ask.text, ask.max_tokens, ask.temperature) for ask in asked[:2]] == [
        ("is it right? 4", 9, 0.0),
        ("sure? 2 + 2 = ", 3, 1.0),
    ]
    assert [ask.seed for ask in asked[:2]] == [ask.seed for ask in asked[2:]]
    assert asked[0].seed != asked[1].seed


def test_half_a_character_in_what_a_function_gives_or_raises_blames_no_machine(run):
    async def scene(server):
        assert await server.order(order("halved")) == m.Scored(score=1.0, extra={"half ?": 2.0, "5": 6.0})
        failed = await server.order(order("halved", completion="raise"))
        assert failed.user and "ValueError: half ?" in failed.error

    over_rewards(run, scene)


BAD_ARGUMENTS = [
    ({"max_tokens": 4.5}, "max_tokens is 4.5; write an int, 1 or more"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 2**70}, "max_tokens is 1180591620717411303424"),
    ({"temperature": float("nan")}, "temperature is nan; write a number from 0 to 100"),
    ({"temperature": "0.5"}, "temperature is '0.5'"),
    ({"temperature": -1}, "temperature is -1"),
    ({"text": b"bytes"}, "text must be a str, not bytes"),
    ({"text": "half \ud800"}, "text has half a character (a lone surrogate, at 5)"),
]


def test_a_wrong_argument_of_complete_is_named_as_the_functions_mistake(run, tmp_path):
    async def answer(sender, ask):
        assert ask.max_tokens == 3 and ask.temperature == 1.0
        return m.Answered(text="yes", finish_reason="stop")

    code = "\nasync def judged(extra_info, client, **_):\n"
    code += "    arguments = {'text': 'sure?', **eval(extra_info['arguments'], {'nan': float('nan')})}\n"
    code += "    return float(await client.complete(**arguments) == 'yes')\n"

    async def scene(server):
        for arguments, says in BAD_ARGUMENTS:
            row = {"extra_info": {"arguments": repr(arguments)}}
            failed = await server.order(order("judge", **row), 10.0)
            assert failed.user and f"ValueError: client.complete: {says}" in failed.error, failed
        row = {"extra_info": {"arguments": "{'max_tokens': 3, 'temperature': 1}"}}
        assert (await server.order(order("judge", **row), 10.0)).score == 1.0

    (tmp_path / "rewards.py").write_text(FUNCTIONS + code)
    over_rewards(run, scene, answer)


def test_a_genrms_function_has_a_limit_and_waiting_for_the_genrm_does_not_count(run):
    async def answer(sender, ask):
        await asyncio.sleep(1.5)
        return m.Answered(text="yes", finish_reason="stop")

    async def scene(server):
        assert (await server.order(order("slow"))).score == 1.0
        failed = await server.order(order("slow", completion="rest"))
        assert "took longer than its timeout_s 0.5" in failed.error

    over_rewards(run, scene, answer)


def test_a_function_that_asks_its_genrm_without_end_fails_its_sample(run, tmp_path):
    async def answer(sender, ask):
        return m.Answered(text="maybe", finish_reason="stop")

    code = (
        "\nasync def judged(client, **_):\n    while await client.complete('sure?') != 'yes':\n        pass\n"
    )

    async def scene(server):
        failed = await server.order(order("judge"), 100.0)
        assert failed.user and "client.complete was called 1000 times for this sample" in failed.error

    (tmp_path / "rewards.py").write_text(FUNCTIONS + code)
    over_rewards(run, scene, answer)


def test_a_function_that_never_gives_in_meets_its_limit_and_holds_nobody_up(run):
    async def answer(sender, ask):
        return m.Answered(text="maybe", finish_reason="stop")

    async def scene(server):
        without_end = asyncio.create_task(server.order(order("stubborn"), 100.0))
        wrong = asyncio.create_task(server.order(order("stubborn", extra_info={"text": 5}), 100.0))
        assert (await server.order(order("patient"), 10.0)).score == 0.25
        assert "took longer than its timeout_s 2" in (await wrong).error
        failed = await without_end
        assert failed.user and "client.complete was called 1000 times" in failed.error
        assert (await server.order(order("patient"), 10.0)).score == 0.25

    over_rewards(run, scene, answer)


def test_a_judge_that_takes_a_lost_genrm_for_a_verdict_is_not_believed(run):
    async def answer(sender, ask):
        return m.Failed(error="no engine")

    async def scene(server):
        failed = await server.order(order("stubborn", completion="once"))
        assert failed == m.Failed(error="GenRM 'stubborn' could not answer: no engine")

    over_rewards(run, scene, answer)


def test_an_exception_without_words_is_the_users_mistake(run):
    async def scene(server):
        failed = await server.order(order("unprintable"))
        assert failed.user and "Unprintable, whose text cannot be had (AttributeError)" in failed.error

    over_rewards(run, scene)


def test_a_row_that_hangs_costs_its_call_a_repeat_and_no_other_call_anything(run):
    async def scene(server):
        good, hanging = order("patient"), order("patient", extra_info={"value": 0.5})
        whole = DATA.read_bytes()
        DATA.unlink()
        os.mkfifo(DATA)
        failed = await server.order(hanging)
        assert failed.waits and not failed.user and "was not read within 0.5 s" in failed.error
        DATA.rename(DATA.with_suffix(".fifo"))
        DATA.write_bytes(whole)
        os.close(os.open(DATA.with_suffix(".fifo"), os.O_WRONLY | os.O_NONBLOCK))  # what hangs ends
        answers = [await asked_again(server, each) for each in (good, hanging)]
        assert [answer.score for answer in answers] == [0.25, 0.5]

    async def asked_again(server, body):
        """As a controller does while it is told to wait."""
        for _ in range(20):
            answer = await server.order(body)
            if not (isinstance(answer, m.Failed) and answer.waits):
                return answer
        raise AssertionError(answer)

    over_rewards(run, scene)


def test_a_genrm_that_cannot_answer_fails_the_sample(run):
    async def answer(sender, ask):
        return m.Failed(error="no engine")

    async def scene(server):
        failed = await server.order(order("judge"))
        assert "GenRM 'judge' could not answer: no engine" in failed.error

    over_rewards(run, scene, answer)


def test_a_missing_function_ends_the_process_as_the_users_mistake(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def other(): pass\n")
    run = write_run(tmp_path, {"rewards": [{"name": "mine", "path": str(file)}]})

    async def play():
        with pytest.raises(
            AssertionError, match=r"has no function 'compute_score' \(it has: other\)"
        ) as caught:
            async with worker_with_server(run, "yatt.reward") as server:
                assert await server.ended() == EXIT_USER_MISTAKE
        assert "exit_code=2" in str(caught.value)

    asyncio.run(play())
