"""Where pictures come from: a folder and an object store give the same rows, bytes and refusals."""

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import BUCKET
from tests.tiny_models import make_seeing_scripted_model
from tests.unit.launch.test_made_pictures import config_of
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.checkpoint.store.store import open_store
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.data_files import with_made_data
from yatt.media.fetch import MediaSources
from yatt.records.media import MediaItem

pytestmark = pytest.mark.filterwarnings("ignore")


def png(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


@pytest.fixture(params=["folder", "s3"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunConfig, Callable[[str, bytes], None]]:
    """A run with two pictures, and what puts another file to them."""
    rows = [{"prompt": "<image>?", "images": [f"deep/{name}.png"]} for name in "ab"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root, options = str(tmp_path / "root"), dict[str, str]()
    if request.param == "s3":
        root, options = (
            f"s3://{BUCKET}/{tmp_path.name}",
            {"endpoint_url": request.getfixturevalue("s3_endpoint")},
        )
    store = open_store(root, options)
    store.write("deep/a.png", png((40, 30)))
    store.write("deep/b.png", png((20, 70)))
    model = make_seeing_scripted_model(tmp_path / "model")
    config = config_of(tmp_path, tmp_path / "rows.jsonl", model, media_root=root, ground_truth_key="")
    config = completed_config(replace(config, media=replace(config.media, storage_options=options)))
    return config, store.write


def test_rows_are_made_checked_and_read(scene: tuple[RunConfig, Callable[[str, bytes], None]]) -> None:
    config, put = scene
    made = with_made_data(config)
    check_inputs(made)
    rows = [row for row, _ in read_data_rows(made.data.train_files, made.data)]
    assert [(row.media[0].width, row.media[0].height) for row in rows] == [(40, 30), (20, 70)]
    data, options = made.data, made.media.storage_options
    sources = MediaSources(data.media_root, data.media_store, options, 60.0)
    ref = rows[1].media[0]
    with sources.opened_source(MediaItem(ref.path, ref.sha256)) as source:
        assert source.content(ref.sha256) == png((20, 70))
        assert source.content_digest() == hashlib.sha256(png((20, 70))).hexdigest()
    put("deep/b.png", png((21, 70)))
    with (
        sources.opened_source(MediaItem(ref.path, ref.sha256)) as source,
        pytest.raises(MediaRefused, match="its SHA-256 differs"),
    ):
        source.content(ref.sha256)
    with pytest.raises(ConfigError, match=r"row 2: deep/b\.png has 21 x 70 pixels, and had 20 x 70"):
        check_inputs(made)


def test_what_is_not_there_is_named(
    scene: tuple[RunConfig, Callable[[str, bytes], None]], tmp_path: Path
) -> None:
    config, put = scene
    rows = [{"prompt": "<image>?", "images": [name]} for name in ("deep/none.png", "deep/a.png", "../x.png")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    put("deep/a.png", b"<html>not found</html>")
    with pytest.raises(ConfigError) as found:
        with_made_data(config)
    says = str(found.value)
    assert "row 1: picture 1: deep/none.png does not exist below data.media_root" in says
    assert "row 2: picture 1: deep/a.png" in says
    assert "row 3: picture 1: ../x.png is not a path below data.media_root" in says
