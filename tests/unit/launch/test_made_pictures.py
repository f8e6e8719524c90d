"""A run's data with pictures: made once, found again, and nothing of it where the model takes text only."""

import datetime
import decimal
import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.tiny_models import make_scripted_model, make_seeing_scripted_model
from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.parquet_rows import ArrowRows, copy_to_arrow
from yatt.config.load import parse_resolved, resolved_text
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.resolve.data_files import with_made_data
from yatt.paths import RunPaths

NUM_ROWS = 6


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40 + number, 30), (number * 40, 0, 0)).save(file, "PNG")
    return file.getvalue()


def geometry(folder: Path) -> Path:
    """A file as verl's preprocessing of geo3k writes it, in row groups of two."""
    rows = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": f"<image>Find x{number}. Think in <think> tags."}],
            "images": [{"bytes": png(number), "path": None}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "answer": str(number)},
        }
        for number in range(NUM_ROWS)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet", row_group_size=2)
    return folder / "train.parquet"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_of(tmp_path, geometry(tmp_path), make_seeing_scripted_model(tmp_path / "model"))


def config_of(folder: Path, rows: Path, model: str, **data: Any) -> RunConfig:
    sizes = dict.fromkeys(("total_iterations", "train_batch_size", "mini_batch_size"), 1)
    return parse_resolved(json.dumps({
        "run": {"dir": str(folder / "run")}, "model": {"path": model}, "optimizer": {"lr": 0.1},
        "data": {"train_files": [str(rows)]} | data, "trainer": sizes, "rollout": {"engine": "scripted"},
        "rewards": [{"name": "exact", "path": "builtin:exact"}],
    }))  # fmt: skip


def contents(folder: Path) -> dict[str, int]:
    return {
        str(each.relative_to(folder)): each.stat().st_mtime_ns for each in folder.rglob("*") if each.is_file()
    }


def test_a_file_of_verl_becomes_rows_with_references(config: RunConfig, tmp_path: Path) -> None:
    made = with_made_data(config)
    assert made.data.media_store == str(tmp_path / "run.data" / "media")
    (file,) = made.data.train_files
    assert Path(file).parent == tmp_path / "run.data"
    rows = [row for row, _ in read_data_rows(made.data.train_files, made.data)]
    assert [row.ground_truth for row in rows] == [str(number) for number in range(NUM_ROWS)]
    assert [row.media[0].width for row in rows] == [40 + number for number in range(NUM_ROWS)]
    assert rows[3].raw["extra_info"] == {"split": "train", "index": 3, "answer": "3"}
    assert "ability" not in rows[3].raw, "nobody needs it"
    check_inputs(made)
    RunPaths(tmp_path / "run").config.parent.mkdir(parents=True)
    RunPaths(tmp_path / "run").config.write_text(resolved_text(made))
    before = contents(tmp_path / "run.data")
    assert len(before) == NUM_ROWS + 1
    assert with_made_data(config) == made
    assert with_made_data(made) == made, "a config that was made before is not made again"
    assert contents(tmp_path / "run.data") == before


def test_other_limits_make_another_file(config: RunConfig) -> None:
    files = {
        with_made_data(replace(config, media=replace(config.media, most_per_prompt=number))).data.train_files
        for number in (1, 2)
    }
    assert len(files) == 2
    with pytest.raises(ConfigError, match=r"6 rows have pictures that cannot be used:\n.*row 1: picture 1"):
        with_made_data(replace(config, media=replace(config.media, most_pixels=100)))


def test_a_text_model_reads_the_same_file_as_text(tmp_path: Path) -> None:
    rows = geometry(tmp_path)
    config = config_of(tmp_path, rows, make_scripted_model(tmp_path / "text"))
    assert with_made_data(config) == config
    assert not (tmp_path / "run.data").exists()
    row, _ = next(read_data_rows(config.data.train_files, config.data))
    assert (row.media, row.prompt[0]["content"][:7]) == ((), "<image>")


def test_a_function_over_rows_gets_references_and_may_leave_some_out(
    config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "map.py").write_text(
        "def map_row(row):\n"
        "    number = row['extra_info']['index']\n"
        "    if number % 2:\n"
        "        row['images'], row['prompt'] = [], 'without a picture'\n"
        "    return row\n"
    )
    made = with_made_data(replace(config, data=replace(config.data, map=str(tmp_path / "map.py"))))
    rows = [row for row, _ in read_data_rows(made.data.train_files, made.data)]
    assert [len(row.media) for row in rows] == [1, 0, 1, 0, 1, 0]
    check_inputs(made)
    assert with_made_data(made) == made


def test_text_without_pictures_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two <image>"}\n')
    config = config_of(tmp_path, tmp_path / "text.jsonl", make_seeing_scripted_model(tmp_path / "model"))
    made = with_made_data(config)
    assert made.data.train_files == config.data.train_files
    assert [row.media for row, _ in read_data_rows(made.data.train_files, made.data)] == [(), ()]


def test_pictures_that_change_after_the_data_was_made_are_found(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    lines = []
    for number in range(5):
        (tmp_path / "root" / f"{number}.png").write_bytes(png(number))
        lines.append(json.dumps({"prompt": "<image>?", "images": [f"{number}.png"]}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    model = make_seeing_scripted_model(tmp_path / "model")
    root = {"media_root": str(tmp_path / "root"), "ground_truth_key": ""}
    made = with_made_data(config_of(tmp_path, tmp_path / "rows.jsonl", model, **root))
    check_inputs(made)
    (tmp_path / "root" / "0.png").unlink()
    (tmp_path / "root" / "1.png").write_bytes(png(4))
    (tmp_path / "root" / "2.png").write_bytes(b"<html>")
    (tmp_path / "root" / "3.png").write_bytes(b"")
    with pytest.raises(ConfigError) as found:
        check_inputs(made)
    says = str(found.value)
    assert "4 pictures are not what they were when the data was made" in says
    assert "row 1: 0.png cannot be read (No such file or directory)" in says
    assert "1.png has 44 x 30 pixels, and had 41 x 30" in says
    assert "row 3: " in says and "row 4: " not in says


def test_engines_that_take_no_pictures_are_named_before_the_start(config: RunConfig) -> None:
    made = with_made_data(config)
    with pytest.raises(ConfigError, match=r"row 1 has pictures, which rollout\.engine=transformers does not"):
        check_inputs(replace(made, rollout=replace(made.rollout, engine="transformers")))


def test_any_bytes_in_the_column_end_in_a_row_or_in_a_sentence(tmp_path: Path) -> None:
    draw, model = random.Random(7), make_seeing_scripted_model(tmp_path / "model")
    whole = png(1)
    for number in range(3):
        contents = [
            b"", whole, whole[: draw.randrange(len(whole))], draw.randbytes(draw.randrange(200)),
            bytes([*whole[:20], *draw.randbytes(8), *whole[28:]]), b"<svg xmlns='x'/>", b"GIF89a",
        ]  # fmt: skip
        rows = [{"prompt": "<image>?", "images": [{"bytes": content, "path": None}]} for content in contents]
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        with pytest.raises(ConfigError) as found:
            with_made_data(config_of(tmp_path / str(number), file, model))
        says = str(found.value)
        assert "Traceback" not in says and says.count("\n") <= 9
        assert "row 1: picture 1 " in says.replace("picture 1: ", "picture 1 ")
        assert "row 2: " not in says


@pytest.mark.parametrize("line", [
    {"prompt": "<image>?", "görüntü": ["0.png"]}, {"prompt": "<image>?", "im/ages": ["0.png"]},
])  # fmt: skip
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_column_is_found_however_its_name_is_written(
    tmp_path: Path, line: dict[str, Any], is_ascii: bool
) -> None:
    key = next(name for name in line if name != "prompt")
    (tmp_path / "0.png").write_bytes(png(0))
    text = json.dumps(line, ensure_ascii=is_ascii)
    (tmp_path / "rows.jsonl").write_text(text.replace("im/ages", r"im\/ages"))
    model = make_seeing_scripted_model(tmp_path / "model")
    root = {"media_root": str(tmp_path), "ground_truth_key": "", "image_key": key}
    made = with_made_data(config_of(tmp_path, tmp_path / "rows.jsonl", model, **root))
    ((row, _),) = read_data_rows(made.data.train_files, made.data)
    assert (row.media[0].width, row.media[0].height) == (40, 30)


def test_a_name_that_no_column_at_the_top_can_have_is_refused(tmp_path: Path) -> None:
    for key in ("extra_info.images", "", 'im"ages'):
        with pytest.raises(ConfigError, match=r"image_key is .*; name a column at the top"):
            config_of(tmp_path, geometry(tmp_path), "model", image_key=key)


def test_a_column_that_no_file_has_is_told(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text('{"prompt": "one", "pictures": ["0.png"]}\n')
    data = replace(config.data, train_files=(str(tmp_path / "text.jsonl"),), ground_truth_key="")
    made = with_made_data(replace(config, data=data))
    check_inputs(made)
    assert (
        "text.jsonl has a column 'images' (data.image_key): all prompts are text" in capsys.readouterr().err
    )


def test_other_columns_keep_their_types(tmp_path: Path) -> None:
    day, number = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC), decimal.Decimal("1.50")
    truth = {"day": day, "number": number, "raw": b"\xff", "nan": float("nan")}
    rows = [{"prompt": "<image>?", "images": [png(0)], "ground_truth": truth}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    model = make_seeing_scripted_model(tmp_path / "model")
    made = with_made_data(
        config_of(tmp_path, tmp_path / "rows.parquet", model, ground_truth_key="ground_truth")
    )
    check_inputs(made)
    ((row, _),) = read_data_rows(made.data.train_files, made.data)
    assert math.isnan(row.ground_truth.pop("nan"))
    assert row.ground_truth == {"day": day, "number": number, "raw": b"\xff"}


def test_dictionaries_that_differ_between_row_groups_are_read(tmp_path: Path) -> None:
    words = [f"word {number}" for number in range(3000)]
    column = pyarrow.array(words).dictionary_encode()
    nested = pyarrow.array([[word] for word in words], pyarrow.list_(pyarrow.dictionary("int32", "string")))
    table = pyarrow.table({"prompt": column, "nested": nested, "images": [[png(0)]] * len(words)})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1500)
    model = make_seeing_scripted_model(tmp_path / "model")
    config = config_of(tmp_path, tmp_path / "rows.parquet", model, ground_truth_key="", prompt_key="nested")
    config = replace(config, environment=replace(config.environment, path="reads all columns"))
    assert copy_to_arrow(tmp_path / "rows.parquet", tmp_path / "copy.arrow", None) == len(words)
    rows = ArrowRows(tmp_path / "copy.arrow")
    assert [rows.row(number)["nested"] for number in (0, 1500, 2999)] == [
        [word] for word in (words[0], words[1500], words[2999])
    ]
    (made,) = with_made_data(config).data.train_files
    found = [(raw["prompt"], raw["nested"]) for raw, _ in raw_rows(Path(made))]
    assert found == [(word, [word]) for word in words]


def test_files_of_equal_rows_stay_two_files(tmp_path: Path) -> None:
    model = make_seeing_scripted_model(tmp_path / "model")
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    (tmp_path / "0.png").write_bytes(png(0))
    for path in paths:
        path.write_text(json.dumps({"prompt": "<image>?", "images": ["0.png"]}))
    (tmp_path / "map.py").write_text("def map_row(row):\n    return row\n")
    for more in ({}, {"map": str(tmp_path / "map.py")}):
        config = config_of(
            tmp_path, paths[0], model, media_root=str(tmp_path), ground_truth_key="",
            weights={str(paths[0]): 1.0, str(paths[1]): 2.0}, train_files=list(map(str, paths)), **more,
        )  # fmt: skip
        assert list(with_made_data(config).data.weights.values()) == [1.0, 2.0]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pyarrow.array(["<image>?"])
    table = pyarrow.Table.from_arrays(
        [column, column, pyarrow.array([[png(0)]])], ["prompt", "prompt", "images"]
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    model = make_seeing_scripted_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="2 columns have the name 'prompt'"):
        with_made_data(config_of(tmp_path, tmp_path / "rows.parquet", model, ground_truth_key=""))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    schema = pyarrow.schema({"prompt": pyarrow.string(), "images": pyarrow.list_(pyarrow.binary())})
    parquet.write_table(schema.empty_table(), tmp_path / "rows.parquet")
    model = make_seeing_scripted_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="no rows"):
        with_made_data(config_of(tmp_path, tmp_path / "rows.parquet", model))


def test_pictures_that_change_before_the_run_begins_are_taken_as_they_are(tmp_path: Path) -> None:
    """Also those of equal size, which a check of heads does not see."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>?", "images": ["0.png"]}))
    model = make_seeing_scripted_model(tmp_path / "model")
    config = config_of(
        tmp_path, tmp_path / "rows.jsonl", model, media_root=str(tmp_path), ground_truth_key=""
    )
    digests = []
    for colour in ("red", "blue"):
        Image.new("RGB", (40, 30), colour).save(tmp_path / "0.png")
        made = with_made_data(config)
        ((row, _),) = read_data_rows(made.data.train_files, made.data)
        digests.append(row.media[0].sha256)
    assert len(set(digests)) == 2


def test_a_folder_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>?", "images": ["0.png"]}))
    model = make_seeing_scripted_model(tmp_path / "model")
    root = {"media_root": str(tmp_path / "none"), "ground_truth_key": ""}
    with pytest.raises(ConfigError, match=r"data\.media_root: there is no folder .*/none"):
        with_made_data(config_of(tmp_path, tmp_path / "rows.jsonl", model, **root))


def test_a_text_model_that_does_not_show_pictures_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, geometry(tmp_path), make_scripted_model(tmp_path / "text"))
    check_inputs(with_made_data(config))
    assert "takes text only: pictures are not shown" in capsys.readouterr().err
