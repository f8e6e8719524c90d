"""Small pictures on a report's page: made by a process with limits, bounded, escaped; else grey boxes."""

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.obs_runs import make_run, metrics
from tests.pictures import encoded, hostile_files, picture, pixels
from tests.runs import ROOT
from yatt.cli.commands import look
from yatt.obs.metrics import STEP
from yatt.obs.page.report import write_report
from yatt.obs.page.thumbnails import MOST_THUMBNAILS, Thumbnail, Thumbnails


def sample(*media: object, step: int = 1) -> dict:
    return {STEP: step, "kind": "sample", "prompt": "p", "completion": "c", "media": list(media)}


def found_in(page: str) -> dict[str, Image.Image]:
    """The pictures of a page, by their alternative texts."""
    shown = re.findall(r'<img alt="([^"]*)" src="data:image/jpeg;base64,([A-Za-z0-9+/=]+)">', page)
    assert len(shown) == page.count("<img")
    return {alt: Image.open(io.BytesIO(base64.b64decode(data))) for alt, data in shown}


def test_a_report_has_small_pictures_and_grey_boxes_with_the_reason(tmp_path: Path) -> None:
    root, store = tmp_path / "pictures", tmp_path / "store"
    root.mkdir()
    (root / 'a"<b>.png').write_bytes(encoded(picture(300, 200, 1), "PNG"))
    (root / "cut.png").write_bytes(hostile_files()["cut.png"])
    (root / "bomb.png").write_bytes(hostile_files()["larger-bomb.png"])
    (tmp_path / "secret.png").write_bytes(encoded(picture(8, 8), "PNG"))
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    data = encoded(picture(40, 64, 2), "WEBP", lossless=True)
    digest = hashlib.sha256(data).hexdigest()
    (store / digest[:2]).mkdir(parents=True)
    (store / digest[:2] / digest).write_bytes(data)
    names = ['a"<b>.png', digest, "cut.png", "bomb.png", "out.png", "../secret.png", "gone.png", "1" * 64]
    paths = make_run(
        tmp_path, rows=metrics(1), samples=[sample(*names, 7)],
        data={"train_files": ["unused.jsonl"], "media_root": str(root), "media_store": str(store)},
    )  # fmt: skip
    page = look.report(paths.root, tmp_path / "page.html").read_text()
    shown = found_in(page)
    assert shown.keys() == {"a&#34;&lt;b&gt;.png", digest}
    large, small = shown["a&#34;&lt;b&gt;.png"], shown[digest]
    assert (large.size, small.size) == ((96, 64), (40, 64)), "96 pixels at most, and none is enlarged"
    assert np.abs(np.asarray(large).astype(int) - pixels(96, 64, 1)).mean() < 5
    boxes = dict(re.findall(r'<span class="thumb" title="([^"]*)">([^<]*)</span>', page))
    assert boxes.keys() == {*names[2:]}
    for name, says in (
        ("cut.png", "is damaged or truncated"), ("bomb.png", "pixels"), ("out.png", "leads out of"),
        ("../secret.png", "is not a path below"), ("gone.png", "No such file"), ("1" * 64, "No such file"),
    ):  # fmt: skip
        assert says in boxes[name], boxes
    assert re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1] == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    )
    assert "a&#34;&lt;b&gt;.png, " in page and "<b>.png" not in page


CRASH = """
import os, signal, sys

def fate(event, arguments):
    if event == "open" and str(arguments[0]).endswith("crash.png"):
        os.kill(os.getpid(), signal.SIGSEGV)

sys.addaudithook(fate)
"""


def test_a_picture_that_ends_the_process_costs_the_pictures_and_not_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(CRASH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/code:{ROOT}")
    for name in ("crash.png", "good.png"):
        (tmp_path / name).write_bytes(encoded(picture(30, 20), "PNG"))
    data = {"train_files": ["unused.jsonl"], "media_root": str(tmp_path)}
    paths = make_run(tmp_path, rows=metrics(1), samples=[sample("good.png", "crash.png")], data=data)
    page = look.report(paths.root, tmp_path / "page.html").read_text()
    assert not found_in(page) and page.count('<span class="thumb"') == 2
    assert "making a small picture of crash.png ended the process" in page and "SIGSEGV" in page


def made(names: Sequence[str]) -> dict[str, Thumbnail]:
    return {name: Thumbnail("QUJD") for name in names}


def test_a_page_has_a_bounded_number_of_them_newest_first(tmp_path: Path) -> None:
    asked = list[str]()

    def make(names: Sequence[str]) -> dict[str, Thumbnail]:
        asked.extend(names)
        return made(names)

    places = [(step, number) for step in (1, 2, 3) for number in range(20)]
    samples = [sample(f"{step}-{number}.png", "same.png", step=step) for step, number in places]
    page = write_report(make_run(tmp_path, samples=samples), None, make_thumbnails=make).read_text()
    assert page.count("<img") == MOST_THUMBNAILS
    assert asked[:2] == ["3-0.png", "same.png"] and len(asked) == len(set(asked)) == 32 + 1
    assert "1-0.png" in page and "1-0.png" not in asked, "the others are named"


def test_without_a_maker_and_without_pictures_nothing_is_drawn() -> None:
    assert Thumbnails([], made).drawn(sample()) == ""
    one = sample("a.png")
    drawn = Thumbnails([one], None).drawn(one)
    assert drawn.split() == ["<div", 'class="label">pictures</div>', "<pre>a.png</pre>"]
