"""Pictures in an environment's answers: what is taken, what is refused, and where they are kept."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.pictures import bomb, encoded, picture, turned
from tests.runs import RunFile
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.records.message import MediaRef
from yatt.reward.environment import Episode, StepAnswer, call_step, keep_images, load_environment

EPISODE = Episode(
    prompt="look", turns=(("assistant", "left"),), data_source="", ground_truth=None, extra_info=None, row={},
    kwargs={},
)  # fmt: skip


def config_of(folder: Path, *, images: bool = True) -> RunConfig:
    settings = [
        f"data.media_store={folder / 'media'}", f"environment.path={folder / 'env.py'}",
        f"environment.images={str(images).lower()}", "media.most_per_prompt=2", "media.most_pixels=10000",
    ]  # fmt: skip
    return load_run_config([RunFile(folder).write()], settings)


def answer_of(folder: Path, says: str) -> StepAnswer | None:
    (folder / "env.py").write_text(f"def step(text, episode):\n    return {says}\n")
    function = load_environment(config_of(folder).environment)
    return asyncio.run(call_step(function, EPISODE))


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("None", None),
        ("'a <image> in text'", StepAnswer("a <image> in text")),
        ("{'text': 'no picture'}", StepAnswer("no picture")),
        ("{'text': 'a quoted <image>', 'images': []}", StepAnswer("a quoted <image>")),
        ("{'text': 'none', 'images': None}", StepAnswer("none")),
        ("{'text': '<image>', 'images': [b'x']}", StepAnswer("<image>", (b"x",))),
    ],
)
def test_forms_of_an_answer(tmp_path: Path, says: str, expected: StepAnswer | None) -> None:
    assert answer_of(tmp_path, says) == expected


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        ("3", "an object with 'text' and 'images', not int"),
        ("{'text': 3}", "an object with 'text' and 'images', not an object with 'text'"),
        ("{'text': '', 'image': 1}", "not an object with 'text', 'image'"),
        ("{'text': '', 'images': b'x'}", "'images' of its answer must be a list, not bytes"),
        (
            "{'text': '<image> <image>', 'images': [b'x']}",
            "its answer has 2 marks <image> for 1 images",
        ),
        ("{'text': '', 'images': 0}", "'images' of its answer must be a list, not int"),
        ("{'text': 'x', 'images': [b'x']}", "its answer has 0 marks <image> for 1 images"),
    ],
)
def test_an_answer_of_another_form_is_refused_in_a_sentence(tmp_path: Path, says: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        answer_of(tmp_path, says)


def test_pictures_are_kept_once_by_their_content_with_the_size_in_which_they_are_shown(
    tmp_path: Path,
) -> None:
    photo = encoded(picture(96, 48), "JPEG", exif=turned(6))
    drawn = Image.new("L", (20, 10), 90)
    config = config_of(tmp_path)
    refs = keep_images(StepAnswer("", (photo, drawn)), config)
    assert refs[0] == MediaRef("", hashlib.sha256(photo).hexdigest(), 48, 96)
    assert (refs[1].width, refs[1].height) == (20, 10)
    kept = {file.name: file for file in (tmp_path / "media").rglob("*") if file.is_file()}
    assert kept.keys() == {ref.sha256 for ref in refs}
    assert all(hashlib.sha256(file.read_bytes()).hexdigest() == name for name, file in kept.items())
    inodes = {name: file.stat().st_ino for name, file in kept.items()}
    assert keep_images(StepAnswer("", (drawn, photo)), config) == refs[::-1]
    assert {name: file.stat().st_ino for name, file in kept.items()} == inodes, "the same bytes, made again"


class Unsavable:
    def save(self, file: Any, kind: str, **_: Any) -> None:
        raise OSError(f"cannot write mode F as {kind}")


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ((b"hello",), "image 1 of its answer is not a picture in PNG, JPEG, WebP, GIF or BMP"),
        (
            (encoded(picture(8, 8), "PNG"), "scene.png"),
            "image 2 of its answer must be a file's bytes or a picture",
        ),
        ((bomb(200, 200),), "image 1 of its answer has 200 x 200 pixels, more than media.most_pixels"),
        ((Unsavable(),), "image 1 of its answer cannot be saved as PNG .cannot write mode F as PNG"),
        ((b"",) * 3, "its answer has 3 images, more than media.most_per_prompt .2."),
    ],
)
def test_a_picture_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, images: tuple[Any, ...], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        keep_images(StepAnswer("", images), config_of(tmp_path))


def test_a_run_that_does_not_expect_pictures_says_which_key_is_missing(tmp_path: Path) -> None:
    answer = StepAnswer("<image>", (encoded(picture(8, 8), "PNG"),))
    with pytest.raises(ConfigError, match="its answer has images; write environment"):
        keep_images(answer, config_of(tmp_path, images=False))
    assert keep_images(replace(answer, images=()), config_of(tmp_path, images=False)) == ()
    assert not (tmp_path / "media").exists()


def test_a_store_that_cannot_be_written_is_no_mistake_of_the_function(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "media").write_text("a file where the folder should be")
    with pytest.raises(NotADirectoryError):
        keep_images(StepAnswer("", (encoded(picture(8, 8), "PNG"),)), config)
