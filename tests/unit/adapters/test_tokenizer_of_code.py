"""The program of docs/models.md makes a tokenizer.json that has tiktoken's tokens."""

import base64
import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT
from yatt.adapters.inputs.tokenizer import Tokenizer

tiktoken = pytest.importorskip("tiktoken")
PAGE = ROOT / "docs" / "models.md"
TEXTS = [
    "The model's answer isn't 12345, it's <b>two</b>!", "问题 one 模型回答 two", "HTTPServer getURL Ünïcode",
    "a  b\n\n  c\t\td \r\n", "", "don'T I'LL 'S", "x = {1: [2, 3]}  # end\n", "abc你好def,世界! 42000",
    "ما هذا؟ हिन्दी 日本語テスト 한국어",
]  # fmt: skip
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
"""As in Kimi-K2's tokenization_kimi.py."""


def ranks_of(texts: list[str], count: int) -> dict[bytes, int]:
    """Bytes, and the most frequent pairs of tokens, again and again."""
    ranks = {bytes([value]): value for value in range(256)}
    words = [[bytes([value]) for value in word.encode()] for text in texts * 3 for word in text.split()]
    while len(ranks) < count:
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in itertools.pairwise(word):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        ranks[best] = len(ranks)
        for word in words:
            at = 0
            while at + 1 < len(word):
                if word[at] + word[at + 1] == best:
                    word[at : at + 2] = [best]
                at += 1
    return ranks


def test_the_program_makes_the_tokens_of_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(TEXTS, 330)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    named = {"330": "[BOS]", "331": "[EOS]", "332": "<|im_end|>"}
    settings = {
        "added_tokens_decoder": {number: {"content": text} for number, text in named.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "vocab_size": 340}))
    (code,) = re.findall(r"```python make_tokenizer.py\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    (program := tmp_path / "make_tokenizer.py").write_text(code)
    monkeypatch.setattr(sys, "argv", ["make_tokenizer.py", str(tmp_path)])
    runpy.run_path(str(program))
    special = {named.get(str(rank), f"<|reserved_token_{rank}|>"): rank for rank in range(330, 340)}
    expected = tiktoken.Encoding("k", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    ours = Tokenizer(str(tmp_path))
    for text in [*TEXTS, "so<|im_end|>it"]:
        ids = expected.encode(text, allowed_special="all")
        assert ours.encode(text) == ids and ours.decode(ids, skip_special=False) == text
    assert ours.encode("<|reserved_token_339|>") == [339]
    assert "auto_map" not in (tmp_path / "tokenizer_config.json").read_text(), "no code is asked for"
