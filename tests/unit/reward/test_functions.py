"""Loading and built-ins."""

import asyncio
from dataclasses import replace

import pytest

from yatt.config.schema import GenRMSection, RewardSection
from yatt.errors import ConfigError
from yatt.reward.functions import ScoredSample, call_reward, exact, gsm8k, load_genrm_function, load_reward
from yatt.reward.results import Result


def refused(match, **section):
    with pytest.raises(ConfigError, match=match):
        load_reward(RewardSection(name="mine", **section))


def test_a_missing_file_is_named(tmp_path):
    refused(r"rewards\[mine\].path: no file .*nothing.py", path=str(tmp_path / "nothing.py"))


def test_an_unknown_builtin_names_the_known_ones():
    refused(r"no built-in 'gsm'; there are exact, gsm8k", path="builtin:gsm")


def test_a_syntax_error_is_placed(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    refused(r"bad.py:2: invalid syntax", path=str(tmp_path / "bad.py"))


def test_an_import_error_is_placed(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\nimport not_there_at_all\n")
    refused(
        r"bad.py:2: ModuleNotFoundError: No module named 'not_there_at_all'", path=str(tmp_path / "bad.py")
    )


def test_a_file_that_ends_the_process_is_a_mistake(tmp_path):
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(0)\n")
    refused(r"bad.py:2: loading the file ends the process \(SystemExit: 0\)", path=str(tmp_path / "bad.py"))


CALLABLES = """
import functools

def plain(data_source, solution_str, ground_truth, extra_info=None, k=1.0):
    return k

async def awaited(data_source, solution_str, ground_truth, extra_info=None, k=1.0):
    return k

class Plain:
    def __call__(self, **sample):
        return 3.0

class Awaited:
    async def __call__(self, **sample):
        return 3.0

part, awaited_part = functools.partial(plain, k=2.0), functools.partial(awaited, k=2.0)
thing, awaited_thing = Plain(), Awaited()
awaited_thing_part = functools.partial(Awaited(), k=5.0)
wrapped = lambda **sample: awaited(**sample)
"""
SAMPLE = ScoredSample(
    prompt="p", completion="c", data_source="d", ground_truth=None, extra_info=None, row={}, facts={}
)


def loaded(tmp_path, function, **section):
    (tmp_path / "calls.py").write_text(CALLABLES)
    return load_reward(
        RewardSection(name="mine", path=str(tmp_path / "calls.py"), function=function, **section)
    )


@pytest.mark.parametrize(
    ("function", "is_async", "score"),
    [
        ("plain", False, 1.0), ("part", False, 2.0), ("thing", False, 3.0),
        ("awaited", True, 1.0), ("awaited_part", True, 2.0), ("awaited_thing", True, 3.0),
        ("awaited_thing_part", True, 3.0),
    ],
)  # fmt: skip
def test_whatever_can_be_called_is_a_reward_function(tmp_path, function, is_async, score):
    mine = loaded(tmp_path, function)
    assert mine.place == f"{tmp_path / 'calls.py'}:{function}" and mine.is_async is is_async
    assert asyncio.run(call_reward(mine, [SAMPLE], client=None)) == [Result(score)]


RUNS = {
    "run": "asyncio.run(judge(solution_str))",
    "new loop": "close(asyncio.new_event_loop(), solution_str)",
    "thread's loop": "asyncio.get_event_loop().run_until_complete(judge(solution_str))",
    "closed": "close(asyncio.get_event_loop(), solution_str)",
    "fails": "asyncio.run(fail())",
}
ASYNC = """
import asyncio

async def judge(text):
    await asyncio.sleep(0.001)
    return float(len(text))

async def fail():
    raise ValueError("of its own")

def close(loop, text):
    try:
        return loop.run_until_complete(judge(text))
    finally:
        loop.close()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {how}
"""


@pytest.mark.parametrize("how", RUNS)
def test_a_plain_function_may_run_coroutines_itself(tmp_path, how):
    """As in verl and TRL, where no event loop runs; the process's own loop goes on beside and afterwards."""
    (tmp_path / "own.py").write_text(ASYNC.format(how=RUNS[how]))
    function = load_reward(RewardSection(name="mine", path=str(tmp_path / "own.py")))

    async def calls() -> list[object]:
        ours = asyncio.get_running_loop()
        beside = asyncio.ensure_future(asyncio.sleep(0.01, "went on"))
        found: list[object] = []
        for text in ("four", "sixsix"):
            try:
                (result,) = await call_reward(function, [replace(SAMPLE, completion=text)], client=None)
                found.append(result.score)
            except ValueError as error:
                found.append(str(error))
            assert asyncio.get_running_loop() is ours is asyncio.get_event_loop()
        return [*found, await beside]

    expected = ["of its own"] * 2 if how == "fails" else [4.0, 6.0]
    assert asyncio.run(calls()) == [*expected, "went on"]


def test_a_plain_function_that_gives_a_coroutine_is_told_to_be_async(tmp_path):
    with pytest.raises(ValueError, match="write it as `async def`"):
        asyncio.run(call_reward(loaded(tmp_path, "wrapped"), [SAMPLE], client=None))


def test_a_file_beside_it_can_be_imported(tmp_path):
    (tmp_path / "beside_the_reward.py").write_text("value = 2.0\n")
    (tmp_path / "good.py").write_text(
        "import beside_the_reward\ndef compute_score(**_): return beside_the_reward.value\n"
    )
    assert load_reward(RewardSection(name="mine", path=str(tmp_path / "good.py"))).call() == 2.0


def test_a_genrm_function_must_be_async(tmp_path):
    (tmp_path / "judge.py").write_text("def compute_score(): pass\n")
    genrm = GenRMSection(name="judge", model="m", path=str(tmp_path / "judge.py"))
    with pytest.raises(ConfigError, match="must be `async def`"):
        load_genrm_function(genrm)


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ("#### 4", "4", 1.0),
        ("#### 3\nno, #### 1,234.00.", "1234", 1.0),
        ("#### $5", "so it is\n#### 5", 1.0),
        ("4", "4", 0.0),
        ("#### five", "5", 0.0),
        ("#### 1234567.5", "1234567", 0.0),
    ],
)
def test_gsm8k_compares_final_answers_as_numbers(completion, truth, score):
    assert gsm8k("gsm8k", completion, truth) == score


def test_exact_ignores_blanks_around():
    assert exact("x", " yes\n", "yes") == 1.0
    assert exact("x", "yes!", "yes") == 0.0
