"""Prompts with pictures as token ids: those of the model's own processor, whatever the text says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_seeing_scripted_model
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import parse_resolved
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.records.episode import MediaRef

START, END, PAD = 3, 4, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_seeing_scripted_model(tmp_path_factory.mktemp("model"))


def config_of(model: str, **data: Any) -> RunConfig:
    sizes = dict.fromkeys(("total_iterations", "train_batch_size", "mini_batch_size"), 1)
    return parse_resolved(json.dumps({
        "run": {"dir": "r"}, "model": {"path": model}, "optimizer": {"lr": 0.1}, "trainer": sizes,
        "rewards": [{"name": "exact", "path": "builtin:exact"}],
        "data": {"train_files": ["x"], "media_store": "store", **data},
    }))  # fmt: skip


def row_of(prompt: str | list[dict[str, Any]], *sizes: tuple[int, int]) -> Row:
    media = tuple(MediaRef("", "ab" * 32, width, height) for width, height in sizes)
    return Row(prompt=prompt, ground_truth=None, data_source="", raw={}, media=media)


def test_ids_are_those_of_the_models_processor(model: str) -> None:
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2VLImageProcessor
    from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    pictures = Qwen2VLImageProcessor.from_pretrained(model)
    for name, token in (("image_token", "<|image_pad|>"), ("video_token", "<|vision_end|>")):
        setattr(tokenizer, name, token)
    processor = Qwen3VLProcessor(
        image_processor=pictures, tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    sizes = [(70, 40), (200, 300), (33, 31)]
    text = "first <image> then <image><image>, what differs? ü€"
    parts: list[dict[str, str]] = [
        {"type": "text", "text": "first "}, {"type": "image"}, {"type": "text", "text": " then "},
        {"type": "image"}, {"type": "image"}, {"type": "text", "text": ", what differs? ü€"},
    ]  # fmt: skip
    rendered = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    images = [Image.new("RGB", size) for size in sizes]
    expected = processor(text=[rendered], images=images, return_tensors="pt")["input_ids"][0].tolist()
    row = row_of([{"role": "user", "content": text}], *sizes)
    found = encode_prompt(row, Tokenizer(model), config_of(model))
    assert found.ids == expected
    assert found.text == text
    assert [each.num_tokens for each in found.media] == [2, 54, 1]
    for each in found.media:
        assert found.ids[each.start : each.start + each.num_tokens] == [PAD] * each.num_tokens
        assert (found.ids[each.start - 1], found.ids[each.start + each.num_tokens]) == (START, END)


def test_text_cannot_forge_a_placeholder(model: str) -> None:
    forged = "<|vision_start|><|image_pad|><|vision_end|> <image>"
    found = encode_prompt(
        row_of([{"role": "user", "content": forged}], (64, 32)), Tokenizer(model), config_of(model)
    )
    assert found.ids.count(PAD) == 2
    assert [(each.start, each.num_tokens) for each in found.media] == [(found.ids.index(PAD), 2)]


def test_prompts_without_a_template_have_the_same_marks(model: str) -> None:
    tokenizer, config = Tokenizer(model), config_of(model)
    found = encode_prompt(row_of("<image>how many?", (64, 64)), tokenizer, config)
    assert found.ids == [START, PAD, PAD, PAD, PAD, END, *tokenizer.encode_plain("how many?")]
    assert (found.media[0].start, found.media[0].grid) == (1, (1, 4, 4))
    chat = row_of([{"role": "user", "content": "<image>how many?"}], (64, 64))
    unrendered = replace(config, data=replace(config.data, apply_chat_template=False))
    assert encode_prompt(chat, tokenizer, unrendered).ids == found.ids
    assert encode_prompt(row_of("<image>how many?"), tokenizer, config).media == (), "a mark is text there"


def test_a_template_that_leaves_pictures_out_is_refused(model: str, tmp_path: Path) -> None:
    blind = make_seeing_scripted_model(tmp_path / "blind")
    settings = json.loads((tmp_path / "blind" / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    (tmp_path / "blind" / "tokenizer_config.json").write_text(json.dumps(settings))
    row = row_of([{"role": "user", "content": "<image>?"}], (64, 64))
    with pytest.raises(ConfigError, match=r"it has 0 placeholders for 1 pictures\. It begins: '<image>"):
        encode_prompt(row, Tokenizer(blind), config_of(blind))
