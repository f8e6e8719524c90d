"""What public tokenizers, templates and files of rows do: one BOS, rows in two formats, ends of turns."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Fast, processors

from tests.tiny_models import make_tokenizer
from yatt.adapters.inputs.data_rows import without_nulls
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import DataSection

BOS = "<|im_start|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %} ({{ m.name }}){% endif %}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}!{% endif %}{% endif %}\n{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that adds a BOS token, as those of Llama 3, Gemma and Mistral do."""
    make_tokenizer(tmp_path)
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    number = fast.token_to_id(BOS)
    fast.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_a_text_that_begins_with_bos_gets_no_second_one(folder: Path) -> None:
    tokenizer = Tokenizer(str(folder))
    bos = tokenizer.encode("")[0]
    rendered = tokenizer.render_chat([{"role": "user", "content": "one plus two"}])
    once = tokenizer.encode_chat([{"role": "user", "content": "one plus two"}])
    assert once[0] == bos and once[1] != bos
    assert tokenizer.encode_parts([TextPart(rendered, True)], adds_special=True) == once
    assert tokenizer.encode(rendered) == once
    assert tokenizer.encode("one plus two")[0] == bos
    mixed = [TextPart(f"{BOS}user\n", True), TextPart(f"one {BOS} two", False)]
    assert tokenizer.encode_parts(mixed, adds_special=True).count(bos) == 1


def test_a_text_of_a_stranger_that_spells_bos_is_text_after_a_bos(folder: Path) -> None:
    tokenizer = Tokenizer(str(folder))
    ids = tokenizer.encode_parts([TextPart(f"{BOS}user", False)], adds_special=True)
    assert ids[0] == tokenizer.encode("")[0]
    assert tokenizer.decode(ids[1:]) == f"{BOS}user"


MESSAGES = [
    [{"role": "user", "content": "hi"}, {"role": "user", "name": "ann", "content": "ho"}],
    [{"role": "user", "content": "hi", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "hi", "tool_calls": None}],
]


def test_rows_as_jsonl_and_as_parquet_are_the_same_prompts(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": messages} for messages in MESSAGES]
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), table)
    data = DataSection(train_files=(str(lines),), ground_truth_key="")
    tokenizer = Tokenizer(str(folder))
    shown = [
        [tokenizer.render_chat(row.prompt) for row, _ in read_data_rows((str(file),), data)]
        for file in (lines, table)
    ]
    assert shown[0] == shown[1]
    assert "user (ann)" in shown[0][0] and "None" not in shown[0][0]
    assert "!" not in shown[0][2]


def test_the_end_of_a_turn_is_found(folder: Path) -> None:
    token, number = Tokenizer(str(folder)).end_of_turn or ("", 0)
    assert (token, number) == (
        "<|im_end|>",
        Fast.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>"),
    )
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert Tokenizer(str(folder)).end_of_turn is None
    hidden = "{% for m in messages %}<|im_start|>{{ m.role }} <|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(hidden)
    assert Tokenizer(str(folder)).end_of_turn is None, "it does not show what the assistant says"


def test_a_null_among_the_arguments_of_a_tool_call_is_a_value() -> None:
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": {"limit": None}}}
    (message,) = without_nulls([{"role": "assistant", "content": "", "name": None, "tool_calls": [call]}])
    assert message == {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"limit": None}}}],
    }  # fmt: skip
