"""Files that others wrote."""

import json
from pathlib import Path

import pytest

from yatt.errors import ConfigError
from yatt.plain_files import read_json_object

HALF = '{"bos_token": ["<\\ud83d>"]}'


def test_half_a_character_in_a_models_file_is_refused_and_a_whole_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    for text in (HALF, '{"\\udc00": 1}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"half a character \(a lone surrogate, \\ud.*delete it"):
            read_json_object(file)
    for text in ('{"a": "\\ud83d\\ude00"}', '{"a": "\\\\ud83d"}'):
        file.write_text(text)
        assert read_json_object(file) == json.loads(text)
