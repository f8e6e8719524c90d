"""Sequences of the sync probe, and where their picture is."""

import json
import random
from pathlib import Path

import pytest

from tests.tiny_processors import FAMILIES, write_processor
from yatt.adapters.node_local.prepared_media import noise_picture
from yatt.models.pictures.probe import ProbeTokens, probe_media, read_probe_tokens
from yatt.models.pictures.tokens import picture_tokens

VOCAB = 40


def test_text_is_drawn_as_ever() -> None:
    draw = random.Random("probe/0/3")
    expected = [[draw.randrange(VOCAB) for _ in range(5)] for _ in range(2)]
    assert ProbeTokens(VOCAB, None).sequences(random.Random("probe/0/3"), 2, 5, 100) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_sees_gets_one_more_with_a_picture(tmp_path: Path, family: str) -> None:
    folder = write_processor(tmp_path, family)
    config = json.loads((folder / "config.json").read_text()) | {"text_config": {"vocab_size": VOCAB}}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_probe_tokens(str(folder), has_pictures=False) == ProbeTokens(VOCAB, None)
    probe, tokens = read_probe_tokens(str(folder), has_pictures=True), picture_tokens(str(folder))
    rows, number = probe.sequences(random.Random(1), 2, 30, 100), 4 if family == "internvl" else 24
    assert len(rows) == 3 and max(map(len, rows)) == len(rows[-1]) == 30 + 2 + number
    assert [probe_media(row, tokens) for row in rows[:2]] == [(), ()], "text has no placeholder"
    (placed,) = probe_media(rows[-1], tokens)
    end = placed.start + placed.num_tokens
    assert rows[-1][placed.start - 1 : end + 1] == [3, *[5] * number, 4]
    assert rows[-1].count(5) == placed.num_tokens == tokens.placeholder_ids(placed.grid).count(5)
    noise = noise_picture(tokens)
    assert noise.grid == placed.grid and noise.patches.shape == (4 * number, 3 * tokens.patch**2)
    assert len(set(map(bytes, noise.patches))) == 4 * number


def test_it_is_left_out_where_it_does_not_fit_and_where_nothing_is_compared(tmp_path: Path) -> None:
    tokens = picture_tokens(str(write_processor(tmp_path)))
    probe = ProbeTokens(VOCAB, tokens)
    lengths = {
        most: [*map(len, probe.sequences(random.Random(1), 2, 10, most))] for most in (25, 26, 35, 36, 99)
    }
    assert lengths == {
        25: [10, 10], 26: [10, 10, 26], 35: [10, 10, 35], 36: [10, 10, 36], 99: [10, 10, 36],
    }  # fmt: skip
    assert probe.sequences(random.Random(1), 0, 10, 100) == []
