"""Positions and places of pictures in micro-batches, against transformers and by counting."""

import itertools
import random

import numpy as np
import pytest
import torch

from tests.packages import trainer_module
from tests.tiny_vision import KINDS, config_of
from yatt.core.samples.placeholders import placed_in
from yatt.records.message import MediaRef, PlacedMedia, Turn, pack_ids
from yatt.trainer.attention.media_batch import positions_of

MERGE = 2


def placed(name: str, start: int, height: int, width: int) -> PlacedMedia:
    grid = 1, MERGE * height, MERGE * width
    return PlacedMedia(MediaRef(name, name, 1, 1), start, height * width, grid)


def drawn(draw: random.Random) -> tuple[int, list[PlacedMedia]]:
    """A length, and pictures in it; some stand side by side, at the beginning or at the end."""
    media, place = list[PlacedMedia](), draw.choice((0, 1, 5))
    for number in range(draw.randrange(4)):
        each = placed(str(number), place, draw.randrange(1, 6), draw.randrange(1, 6))
        media.append(each)
        place += each.num_tokens + draw.choice((0, 1, 4))
    return max(place, 1), media


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "internvl"])
def test_positions_are_those_of_transformers(kind: str) -> None:
    import transformers

    model = transformers.AutoModelForImageTextToText.from_config(config_of(kind)).model
    draw = random.Random(3)
    for _ in range(200):
        num_tokens, media = drawn(draw)
        types = torch.zeros(1, num_tokens, dtype=torch.int)
        for each in media:
            types[0, each.start : each.start + each.num_tokens] = 1
        if any(a.start + a.num_tokens == b.start for a, b in itertools.pairwise(media)):
            continue  # transformers takes them for one picture; a template always writes marks between
        expected, _ = model.get_rope_index(
            torch.zeros(1, num_tokens, dtype=torch.long), mm_token_type_ids=types,
            image_grid_thw=torch.tensor([each.grid for each in media]) if media else None,
        )  # fmt: skip
        assert positions_of(num_tokens, media, MERGE).tolist() == expected[:, 0].tolist()
        shorter = positions_of(num_tokens - 1, media, MERGE)
        assert shorter.tolist() == expected[:, 0, :-1].tolist(), "the last token is only a label"


def test_positions_with_one_axis_do_not_depend_on_pictures() -> None:
    num_tokens, media = drawn(random.Random(3))
    assert positions_of(num_tokens, media, 0).tolist() == [[*range(num_tokens)]] * 3


def test_places_count_from_the_first_token_of_all_turns() -> None:
    turns = [
        Turn(pack_ids(range(9)), media=(placed("a", 2, 1, 3),)),
        Turn(pack_ids(range(4)), is_sampled=True),
        Turn(pack_ids(range(8)), media=(placed("b", 1, 1, 2), placed("a", 4, 1, 3))),
    ]
    assert [(each.ref.path, each.start) for each in placed_in(turns)] == [("a", 2), ("b", 14), ("a", 17)]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_each_place_has_the_feature_of_its_picture(cp_size: int) -> None:
    """Every token is known by its sample and its number there."""
    batches = trainer_module("attention.batches")
    shown = [[placed("a", 3, 2, 3), placed("b", 10, 1, 4)], [], [placed("a", 1, 2, 3), placed("b", 16, 1, 4)]]
    lengths, features = (18, 9, 20), {"a": range(6), "b": range(6, 10)}
    expected = {
        1000 * number + each.start + token: features[each.ref.path][token]
        for number, media in enumerate(shown) for each in media for token in range(each.num_tokens)
    }  # fmt: skip
    del expected[2019]  # the last token is only a label
    samples = [
        batches.TrainSample(
            ids=1000 * number + np.arange(length), is_sampled=np.arange(length) == length - 1,
            sampler_logprobs=np.zeros(1, np.float32), start=number, media=tuple(media),
        )
        for number, (length, media) in enumerate(zip(lengths, shown, strict=True))
    ]  # fmt: skip
    found = dict[int, int]()
    for cp_rank in range(cp_size):
        cut = batches.SequenceLayout(align=2 * cp_size, cp_size=cp_size, cp_rank=cp_rank, merge_size=MERGE)
        micro = batches.micro_batch(samples, [np.ones(1, np.float32)] * 3, cut, torch.device("cpu"))
        media = micro.packed.media
        assert [each.sha256 for each in media.pictures] == ["a", "b"], "each once"
        assert media.positions_3S.shape == (3, int(micro.packed.cu_seqlens_q[-1])), "of the whole stream"
        tokens = micro.tokens[0, media.places_M].tolist()
        assert not found.keys() & set(tokens)
        found |= dict(zip(tokens, media.order_M.tolist(), strict=True))
    assert found == expected
