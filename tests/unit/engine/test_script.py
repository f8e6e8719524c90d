"""The scripted model, and that it is light."""

import subprocess
import sys

import pytest

from tests.tiny_models import make_scripted_model
from yatt.engine.script import read_script, scripted_completion, scripted_logprobs
from yatt.errors import ConfigError


def completion(folder, **more):
    script = read_script(folder, (2,))
    facts = {"policy_version": 1, "prompt_ids": [5, 6], "seed": 3, "max_tokens": 50, "ignore_eos": True}
    return scripted_completion(script, **(facts | more))


def test_a_completions_logprobs_are_those_of_the_probe(tmp_path):
    ids, logprobs, reason = completion(make_scripted_model(tmp_path))
    assert (len(ids), reason) == (50, "length")
    assert scripted_logprobs(1, [5, 6, *ids])[1:] == logprobs
    assert all(logprob < 0 for logprob in logprobs)


def test_everything_it_depends_on_changes_it(tmp_path):
    folder = make_scripted_model(tmp_path)
    changes = [{}, {"policy_version": 2}, {"seed": 4}, {"prompt_ids": [5, 7]}]
    assert len({tuple(completion(folder, **change)[0]) for change in changes}) == 4


def test_mean_tokens_sets_the_length(tmp_path):
    short = make_scripted_model(tmp_path / "short", mean_tokens=2)
    lengths = [len(completion(short, seed=seed, ignore_eos=False)[0]) for seed in range(200)]
    assert 1.5 < sum(lengths) / 200 < 2.5


@pytest.mark.parametrize("cut", [1, 2, 19])
def test_a_completion_of_a_given_length_keeps_it_when_it_is_continued(tmp_path, cut):
    folder = make_scripted_model(tmp_path, lengths={"200": 20, "201": 2, "202": 30})
    whole, _, reason = next(
        found for seed in range(99) if (found := completion(folder, seed=seed))[0][0] == 200
    )
    assert (len(whole), whole[-1], reason) == (20, 2, "stop")
    assert not {200, 201, 202, 2} & set(whole[1:-1])
    later = completion(folder, policy_version=9, seed=7, prompt_ids=[5, 6, *whole[:cut]])
    assert (cut + len(later[0]), later[0][-1], later[2]) == (20, 2, "stop")
    firsts = [completion(folder, seed=seed)[0][0] for seed in range(300)]
    assert all(60 < firsts.count(key) < 140 for key in (200, 201, 202))


def test_a_typo_in_the_script_is_refused(tmp_path):
    folder = make_scripted_model(tmp_path, mean_token=3)
    with pytest.raises(ConfigError, match=r"scripted.json: .*mean_token"):
        read_script(folder, (2,))


@pytest.mark.parametrize("module", ["yatt.engine.scripted", "yatt.rollout.__main__", "yatt.reward.__main__"])
def test_importing_it_imports_nothing_heavy(module):
    heavy = {"torch", "vllm", "transformers", "numpy", "megatron"}
    command = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
