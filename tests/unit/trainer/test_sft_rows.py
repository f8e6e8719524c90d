"""Rows of `yatt sft`: text, chats, and what is refused."""

import json
import re

import pytest
import transformers

from tests.tiny_models import make_scripted_model
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_as
from yatt.config.sections.sft import SftConfig, sft_rules
from yatt.errors import ConfigError
from yatt.trainer.sft_rows import read_examples

CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_scripted_model(tmp_path_factory.mktemp("model"))


def examples(tmp_path, folder, *rows, limit=0):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [each[:2] for each in read_examples(path, Tokenizer(folder), folder, limit)]


def test_text_is_encoded_as_it_is(tmp_path, folder):
    tokenizer = Tokenizer(folder)
    ((prompt, completion),) = examples(tmp_path, folder, {"prompt": "ab", "completion": "cd"})
    assert prompt == tokenizer.encode("ab") and completion == tokenizer.encode_rendered("cd")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"prompt": CHAT[:1], "completion": "2"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    ],
)
def test_a_chat_is_what_the_template_renders_up_to_the_end_of_the_turn(tmp_path, folder, row):
    ((prompt, completion),) = examples(tmp_path, folder, row)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    whole = reference.apply_chat_template(CHAT, tokenize=False)
    begun = reference.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    together = reference.decode(prompt + completion, clean_up_tokenization_spaces=False)
    assert reference.decode(prompt, clean_up_tokenization_spaces=False) == begun
    assert (
        whole.startswith(together.removesuffix(reference.eos_token))
        and completion[-1] == reference.eos_token_id
    )
    assert completion.count(reference.eos_token_id) == 1


def test_control_tokens_that_a_message_spells_are_text(tmp_path, folder):
    end = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    spelled = transformers.AutoTokenizer.from_pretrained(folder).eos_token
    rows = {"messages": [CHAT[0], {"role": "assistant", "content": f"2{spelled}3"}]}
    ((_, completion),) = examples(tmp_path, folder, rows)
    assert completion.count(end) == 1 and completion[-1] == end


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, "row 1 needs 'prompt' and 'completion' as text; "),
        ({"messages": CHAT[:1]}, "row 1 needs"),
        ({"messages": CHAT[::-1]}, "row 1 needs"),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, "row 1 needs"),
        ({"prompt": 7, "completion": "x"}, "row 1 needs"),
        ({"prompt": "", "completion": "x"}, "row 1: its prompt or its completion is empty"),
        ({"prompt": "a b c d e f 1 2 3 4", "completion": "g h i"}, "row 1 has "),
    ],
)
def test_a_row_of_another_form_or_size_is_named(tmp_path, folder, row, says):
    with pytest.raises(ConfigError, match=re.escape(f"rows.jsonl: {says}")):
        examples(tmp_path, folder, row, limit=3)


def test_a_file_that_is_no_data_is_one_sentence(tmp_path, folder):
    path = tmp_path / "rows.jsonl"
    for data, says in ((b"", "no rows"), (b"\x1f\x8b\x08" + bytes(9), "compressed"), (b"[1]\n", "row 1")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=says):
            read_examples(path, Tokenizer(folder), folder, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("new.num_key_value_heads=3", "new.num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ("new.head_dim=33", "new.head_dim: 33 is odd"),
    ],
)
def test_sizes_of_a_new_model_are_checked(tmp_path, change, says):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    file = tmp_path / "sft.yaml"
    rows = tmp_path / "rows.jsonl"
    file.write_text(f"{{output: o, train_file: {rows}, max_steps: 1, lr: 0.1, new: {{characters: abc}}}}")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_as(SftConfig, [file], [change], sft_rules)
