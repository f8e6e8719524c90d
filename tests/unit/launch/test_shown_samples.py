"""`yatt check --samples N` shows what the policy and the judges get, token for token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.checks.shown_samples import shown_samples


def run_of(tmp_path: Path, **data: object) -> RunFile:
    make_scripted_model(tmp_path / "policy")
    make_scripted_model(tmp_path / "judge")
    judge = {
        "name": "j", "model": str(tmp_path / "judge"), "engine": "scripted", "chat": False, "max_tokens": 4,
        "template": "Q: {prompt} T: {ground_truth} A: {completion}.", "verdict": {"pattern": "([0-9])"},
    }  # fmt: skip
    (tmp_path / "train.jsonl").write_text('{"prompt": "0 plus 3 is", "answer": "3"}\n{"prompt": "12"}\n')
    return RunFile(tmp_path, {"genrms": [judge], "data": {"ground_truth_key": "answer", **data}})


def test_prompts_questions_and_lengths(tmp_path: Path) -> None:
    prompt, question, lengths = shown_samples(load_run_config([run_of(tmp_path).write()], []), 1)
    ids = Tokenizer(str(tmp_path / "policy")).encode("0 plus 3 is")
    place = f"{tmp_path}/train.jsonl: row 1"
    assert prompt == f"{place}: prompt of {len(ids)} tokens:\n  | 0 plus 3 is"
    asked = "Q: 0 plus 3 is T: 3 A: 3."
    num_asked = len(Tokenizer(str(tmp_path / "judge")).encode(asked))
    assert question == f"{place}: question of {num_asked} tokens to genrms[j]:\n  | {asked}"
    assert lengths.startswith("lengths of the first 2 prompts, in tokens: p50")
    assert f"longest {len(ids)}; 0.0% are longer than data.max_prompt_tokens (32)" in lengths


def test_a_turn_that_ends_with_a_token_that_ends_no_completion_is_told(tmp_path: Path, capsys) -> None:
    """As in base models with a chat template: completions would run on to the length limit."""
    config = load_run_config([run_of(tmp_path).write()], [])
    fast = Fast.from_file(str(tmp_path / "policy" / "tokenizer.json"))
    other = next(token for token in fast.get_added_tokens_decoder().values() if token.special).content
    number = fast.token_to_id(other)
    template = tmp_path / "policy" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}" + other + "{% endfor %}")
    ends = tmp_path / "policy" / "generation_config.json"
    for eos, is_told in ((number, False), (number + 1, True)):
        ends.write_text(json.dumps({"eos_token_id": eos}))
        for name in ("config.json", "tokenizer_config.json"):
            file = tmp_path / "policy" / name
            content = {k: v for k, v in json.loads(file.read_text()).items() if not k.startswith("eos_token")}
            file.write_text(json.dumps(content))
        check_inputs(replace(config, genrms=()))
        assert (f"ends a turn with '{other}' (token {number})" in capsys.readouterr().err) == is_told


def test_the_share_that_is_skipped(tmp_path: Path) -> None:
    lengths = shown_samples(load_run_config([run_of(tmp_path, max_prompt_tokens=2).write()], []), 1)[-1]
    assert "50.0% are longer than data.max_prompt_tokens (2) and are skipped" in lengths


def test_a_template_that_does_not_take_a_row_is_a_sentence(tmp_path: Path) -> None:
    config = load_run_config([run_of(tmp_path).write()], [])
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "0"}], "answer": "1"}\n')
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    with pytest.raises(ConfigError, match="only tools"):
        shown_samples(config, 1)
