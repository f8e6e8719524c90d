"""`yatt check --samples N` shows what the policy and the judges get, token for token."""

from pathlib import Path

import pytest

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from yatt.adapters.tokenizer import Tokenizer
from yatt.config.load import load
from yatt.errors import ConfigError
from yatt.launch.shown_samples import shown_samples


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
    prompt, question, lengths = shown_samples(load([run_of(tmp_path).write()], []), 1)
    ids = Tokenizer(str(tmp_path / "policy")).encode("0 plus 3 is")
    place = f"{tmp_path}/train.jsonl: row 1"
    assert prompt == f"{place}: prompt of {len(ids)} tokens:\n  | 0 plus 3 is"
    asked = "Q: 0 plus 3 is T: 3 A: 3."
    num_asked = len(Tokenizer(str(tmp_path / "judge")).encode(asked))
    assert question == f"{place}: question of {num_asked} tokens to genrms[j]:\n  | {asked}"
    assert lengths.startswith("lengths of the first 2 prompts, in tokens: p50")
    assert f"longest {len(ids)}; 0.0% are longer than data.max_prompt_tokens (32)" in lengths


def test_the_share_that_is_skipped(tmp_path: Path) -> None:
    lengths = shown_samples(load([run_of(tmp_path, max_prompt_tokens=2).write()], []), 1)[-1]
    assert "50.0% are longer than data.max_prompt_tokens (2) and are skipped" in lengths


def test_a_template_that_does_not_take_a_row_is_a_sentence(tmp_path: Path) -> None:
    config = load([run_of(tmp_path).write()], [])
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "0"}], "answer": "1"}\n')
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    with pytest.raises(ConfigError, match="only tools"):
        shown_samples(config, 1)
