"""Prepared pictures in an engine's process: mapped files of its node, checked against the request."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import make_seeing_scripted_model
from yatt.engine.media import prepared_pictures
from yatt.engine.protocol import EngineOptions
from yatt.engine.scripted import ScriptedEngine
from yatt.errors import WorkerFailed
from yatt.media.kept import KeptFiles
from yatt.records import message as m

GRID = (1, 2, 2)
A, B = "a" * 64, "b" * 64


def request(*digests: str, grid: tuple[int, int, int] = GRID) -> m.SampleRequest:
    media = tuple(m.PlacedMedia(m.MediaRef("", "ff" * 32, 64, 64), 0, 1, grid, each) for each in digests)
    return m.SampleRequest(
        request_id="0", prompt_ids=m.pack_ids([5, 40]), seed=1, temperature=1.0, top_p=1.0, top_k=-1,
        max_tokens=12, ignore_eos=True, media=media,
    )  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    files = KeptFiles(tmp_path / "media", 1 << 20)
    with files.order(1):
        for digest, value in ((A, 1), (B, 2)):
            with files.claimed_file(1, digest):
                files.keep_file(1, digest, GRID, np.full((4, 12), value, np.uint8))
    return EngineOptions(
        model=make_seeing_scripted_model(tmp_path / "model", mean_tokens=9), dtype="float32", device="cpu",
        eos_ids=(2,), max_model_tokens=64, media_folder=str(tmp_path / "media"),
    )  # fmt: skip


def completed(options: EngineOptions, sample: m.SampleRequest) -> list[int]:
    engine = ScriptedEngine(options)
    engine.start()
    engine.add(sample)
    while engine.is_busy:
        if found := engine.step():
            return m.unpack_ids(found[0].token_ids)
    raise AssertionError("it completes the request")


def test_pictures_are_mapped_in_the_order_of_the_request(options: EngineOptions) -> None:
    found = prepared_pictures(request(B, A), options)
    assert [int(each.patches[0, 0]) for each in found] == [2, 1]
    assert prepared_pictures(request(), options) == []


@pytest.mark.parametrize("digest", ["c" * 64, "", "../secret"])
def test_a_file_that_is_not_there_sends_the_request_again(options: EngineOptions, digest: str) -> None:
    with pytest.raises(WorkerFailed, match="a prepared picture cannot be read"):
        prepared_pictures(request(A, digest), options)


def test_a_file_of_another_grid_or_of_another_picture_is_not_used(options: EngineOptions) -> None:
    with pytest.raises(WorkerFailed, match=r"has the grid \(1, 2, 2\), not \(1, 1, 4\)"):
        prepared_pictures(request(A, grid=(1, 1, 4)), options)
    folder = Path(options.media_folder)
    (folder / A).write_bytes((folder / B).read_bytes())
    with pytest.raises(WorkerFailed, match="is damaged: head and length do not agree"):
        prepared_pictures(request(A), options)


def test_a_completion_depends_on_every_patch(options: EngineOptions, tmp_path: Path) -> None:
    first = completed(options, request(A))
    assert completed(options, request(A)) == first
    assert completed(options, request(B)) != first
    assert completed(options, request(A, B)) != completed(options, request(B, A))
    patches = np.full((4, 12), 1, np.uint8)
    patches[3, 11] = 0
    files = KeptFiles(tmp_path / "third", 1 << 20)
    with files.order(1), files.claimed_file(1, A):
        files.keep_file(1, A, GRID, patches)
    assert completed(replace(options, media_folder=str(tmp_path / "third")), request(A)) != first
