"""Pictures in token ids: one token a feature, at the place of the template's placeholder."""

import random
from dataclasses import dataclass

import pytest

from yatt.core.samples.placeholders import with_placeholders
from yatt.records.episode import MediaRef

PAD, BEFORE, AFTER = 9, 7, 8


@dataclass(frozen=True)
class Squares:
    """A family with patches of 10 pixels, one token a patch, in brackets."""

    image_token_id: int = PAD
    mark_ids: tuple[int, ...] = (PAD,)

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        if width < 10 or height < 10:
            raise ValueError(f"{width} x {height} pixels are too few")
        return 1, height // 10, width // 10

    def placeholder_ids(self, grid: tuple[int, int, int]) -> list[int]:
        return [BEFORE, *[PAD] * (grid[1] * grid[2]), AFTER]


def picture(width: int, height: int) -> MediaRef:
    return MediaRef("", f"{width}x{height}", width, height)


def test_each_placeholder_becomes_the_tokens_of_its_picture() -> None:
    pictures = [picture(20, 10), picture(10, 30)]
    ids, placed = with_placeholders([1, PAD, 2, PAD], pictures, Squares())
    assert ids == [1, BEFORE, PAD, PAD, AFTER, 2, BEFORE, PAD, PAD, PAD, AFTER]
    assert [(each.ref, each.start, each.num_tokens, each.grid) for each in placed] == [
        (pictures[0], 2, 2, (1, 1, 2)),
        (pictures[1], 7, 3, (1, 3, 1)),
    ]


def test_places_are_those_of_placeholder_tokens_and_nothing_else_is_changed() -> None:
    draw = random.Random(4)
    for _ in range(500):
        text = [draw.randrange(7) for _ in range(draw.randrange(12))]
        pictures = [picture(draw.randrange(10, 60), draw.randrange(10, 60)) for _ in range(draw.randrange(4))]
        ids = list(text)
        for _ in pictures:
            ids.insert(draw.randrange(len(ids) + 1), PAD)
        found, placed = with_placeholders(ids, pictures, Squares())
        features = [index for each in placed for index in range(each.start, each.start + each.num_tokens)]
        assert features == [index for index, token in enumerate(found) if token == PAD]
        assert [token for token in found if token < BEFORE] == text
        assert [each.ref for each in placed] == pictures


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_another_number_of_placeholders_is_refused(marks: int) -> None:
    with pytest.raises(ValueError, match=f"it has {marks} placeholders for 2 pictures"):
        with_placeholders([1] + [PAD] * marks, [picture(10, 10)] * 2, Squares())


def test_a_shape_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="5 x 10 pixels are too few"):
        with_placeholders([PAD], [picture(5, 10)], Squares())
