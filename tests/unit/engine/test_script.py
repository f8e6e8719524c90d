"""The scripted model, and that it is light."""

import math
import subprocess
import sys

import pytest

from tests.tiny_models import make_scripted_model
from yatt.engine.script import Draw, read_script, scripted_completion, scripted_logprobs, scripted_watched
from yatt.errors import ConfigError


def completion(folder, **more):
    script = read_script(folder, (2,))
    facts = {"policy_version": 1, "prompt_ids": [5, 6], "seed": 3, "ignore_eos": True} | more
    ignore_eos = facts.pop("ignore_eos")
    return scripted_completion(script, Draw(**facts), max_tokens=50, ignore_eos=ignore_eos)


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


SURE, UNSURE = {"61": 0.8, "62": 0.2}, {"61": 0.3, "62": 0.6}


def watched(folder, temperature, seed, ids=(61, 62, 7)):
    """Which answer it was, and the probabilities of tokens wherever it has one."""
    script = read_script(folder, (2,))
    draw = Draw(policy_version=1, prompt_ids=[5, 6], seed=seed, temperature=temperature)
    token_ids, logprobs, _ = scripted_completion(script, draw, max_tokens=50, ignore_eos=False)
    rows = scripted_watched(script, draw, token_ids, ids)
    assert rows == scripted_watched(script, draw, token_ids, ids) and len(rows) == len(token_ids)
    own = [scripted_watched(script, draw, token_ids, (token,))[at][0] for at, token in enumerate(token_ids)]
    assert own == logprobs, "of its own tokens as they were sampled"
    return token_ids, [[math.exp(each) for each in row] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 0.001])
def test_a_scripted_judge_is_as_sure_of_its_answer_as_the_script_says(tmp_path, temperature):
    folder = make_scripted_model(tmp_path, answers=[[60, 61], [62]], chances=[SURE, UNSURE])
    found = [watched(folder, temperature, seed) for seed in range(16)]
    assert {tuple(ids) for ids, _ in found} == {(60, 61, 2), (62, 2)}
    for ids, rows in found:
        chances = (0.8, 0.2, 0.0) if 61 in ids else (0.3, 0.6, 0.1)
        power = 1 / (temperature or 1.0)
        ratio = [(each / max(chances)) ** power for each in chances]
        expected = [each / sum(ratio) for each in ratio]
        assert all(row == pytest.approx([*expected[:2], 0.0], abs=1e-9) for row in rows)


def test_without_chances_watched_tokens_have_the_hash_of_the_sampled_ones(tmp_path):
    folder = make_scripted_model(tmp_path)
    ids, rows = watched(folder, 1.0, 3)
    for at, row in enumerate(rows):
        context = [5, 6, *ids[:at]]
        assert [math.log(each) for each in row] == pytest.approx(
            [scripted_logprobs(1, [*context, token])[-1] for token in (61, 62, 7)]
        )


@pytest.mark.parametrize(
    "wrong",
    [[SURE], [SURE, {}], [SURE, {"61": 0.0}], [SURE, {"61": 0.8, "62": 0.3}], [SURE, {"61": -1}], [SURE] * 3],
)
def test_chances_that_are_none_are_refused(tmp_path, wrong):
    folder = make_scripted_model(tmp_path, answers=[[60], [62]], chances=wrong)
    with pytest.raises(ConfigError, match=r"scripted.json: chances: write one object for each answer"):
        read_script(folder, (2,))
    make_scripted_model(tmp_path, answers=[[60], [62]], chances=[SURE, UNSURE], lengths={"9": 2})
    with pytest.raises(ConfigError, match=r"scripted.json: chances"):
        read_script(folder, (2,))


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
