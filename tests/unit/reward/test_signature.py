"""A function that could not be called is refused before a run starts, with the parameter's name."""

import functools
import json
from pathlib import Path

import pytest

from yatt.config.load import load_run_config
from yatt.config.schema import GenRMSection, RewardSection, VerdictSection
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_function
from yatt.reward.signature import GENRM, TRL, VERL, VERL_LISTS, check_parameters

RUN = """
run: {dir: /shared/run}
model: {path: /models/qwen3}
optimizer: {lr: 1.0e-6}
trainer: {total_iterations: 10, train_batch_size: 8, mini_batch_size: 4}
"""


@functools.wraps(json.dumps)
def renamed(data_source, solution_str, ground_truth, extra_info):
    return 1.0


class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None, *, threshold=0.5):
        return threshold


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda data_source, solution_str, ground_truth, extra_info=None: 1.0, VERL),
        (lambda data_source, solution_str, ground_truth, extra_info=None, **kwargs: 1.0, VERL),
        (lambda data_source, solution_str, ground_truth, extra_info, factor: 1.0, (*VERL, "factor")),
        (lambda *_, **kwargs: 1.0, VERL),
        (lambda prompts, completions, **columns: [], (*TRL, "question")),
        (lambda prompts, completions, ground_truth, data_source: [], TRL),
        (functools.partial(lambda factor, **kwargs: factor, 2.0), VERL),
        (Scorer(), VERL),
        (renamed, VERL),
        (max, VERL),
    ],
)
def test_a_function_that_can_be_called_passes(function, given) -> None:
    check_parameters(function, given, "rewards[mine].function: f of mine.py")


@pytest.mark.parametrize(
    ("function", "given", "says"),
    [
        (lambda solution_str, ground_truth: 1.0, VERL, "has no parameter data_source"),
        (lambda data_source, solution_str, ground_truth: 1.0, VERL, "has no parameter extra_info"),
        (lambda data_source, solution, ground_truth, extra_info: 1.0, VERL, "has no parameter solution_str"),
        (lambda data_source, solution_str, ground_truth, extra_info, beta: 1.0, VERL,
         "needs a parameter beta"),
        (lambda data_source, /, solution_str, ground_truth, extra_info, **_: 1.0, VERL,
         "needs a parameter data_source"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 1.0, VERL_LISTS,
         "has no parameter data_sources"),
        (lambda prompts, completions: [], TRL, "has no parameter ground_truth"),
        (lambda completions, answers, **columns: [], (*TRL, "answer"), "needs a parameter answers"),
        (lambda data_source, solution_str, ground_truth, extra_info: 1.0, GENRM, "has no parameter prompt"),
        (lambda data_source, solution_str, ground_truth, extra_info, prompt, judge, **_: 1.0, GENRM,
         "needs a parameter judge"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_by_parameter(function, given, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parameters(function, given, "rewards[mine].function: f of mine.py")
    assert says in str(caught.value)
    assert f"it is called with {', '.join(given)}" in str(caught.value)


def test_calls_follow_the_section(tmp_path: Path) -> None:
    path, data = tmp_path / "mine.py", tmp_path / "train.jsonl"
    path.write_text(
        "def good(data_source, solution_str, ground_truth, extra_info, beta): return beta\n"
        "def trl(prompts, completions, ground_truth, data_source, question): return []\n"
        "async def judge(data_source, solution_str, ground_truth, extra_info, prompt): return 1.0\n"
    )
    data.write_text(json.dumps({"prompt": "a", "question": "b"}) + "\n")
    (tmp_path / "run.yaml").write_text(
        f"{RUN}data: {{train_files: [{data}]}}\nrewards: [{{name: e, path: 'builtin:exact'}}]\n"
    )
    config = load_run_config([tmp_path / "run.yaml"], [])
    check_function(config, RewardSection(name="a", path=str(path), function="good", kwargs={"beta": 2}))
    check_function(config, RewardSection(name="a", path=str(path), function="trl", style="trl"))
    with pytest.raises(ConfigError, match=r"rewards\[a\].function: good of .*mine.py needs a parameter beta"):
        check_function(config, RewardSection(name="a", path=str(path), function="good"))
    with pytest.raises(ConfigError, match=r"good of .* has no parameter data_sources"):
        check_function(
            config,
            RewardSection(name="a", path=str(path), function="good", scope="batch", kwargs={"beta": 2}),
        )
    data.write_text(json.dumps({"prompt": "a", "query": "b"}) + "\n")
    with pytest.raises(ConfigError, match=r"trl of .* has no parameter query"):
        check_function(config, RewardSection(name="a", path=str(path), function="trl", style="trl"))
    genrm = GenRMSection(
        name="j", model="/m", path=str(path), function="judge", verdict=VerdictSection(pattern="(.)")
    )
    with pytest.raises(ConfigError, match=r"genrms\[j\].function: judge of .* has no parameter client"):
        check_function(config, genrm)
