"""Patterns, data sets of the hub (a local one, by the real library), `data.map`, and weights of sources."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from tests.obs_runs import make_run
from yatt.config.load import load_resolved, load_run_config, resolved_text
from yatt.errors import ConfigError
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.data_files import made_folder, with_made_data


def rows_in(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def config_of(tmp_path: Path):
    config = load_resolved(make_run(tmp_path).config)

    def made(*, is_new=True, **data):
        if is_new and (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / "unused")
        return completed_config(replace(config, data=replace(config.data, **data)))

    for name, count in (("a", 3), ("b", 2)):
        lines = (json.dumps({"question": f"{name}{i}", "n": i}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return made


def test_a_pattern_becomes_its_files_in_order_with_its_weight(tmp_path, config_of):
    pattern = f"{tmp_path}/*.jsonl"
    config = config_of(train_files=(pattern,), val_files=(f"{tmp_path}/b*.jsonl",), weights={pattern: 0.5})
    files = (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    assert config.data.train_files == files and config.data.val_files == files[1:]
    assert config.data.weights == dict.fromkeys(files, 0.5)
    assert with_made_data(config) == config and not Path(f"{config.run.dir}.data").exists()


def test_a_file_of_two_entries_is_one_file_with_one_weight(tmp_path, config_of):
    both, first = (f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl")
    config = config_of(train_files=(both, first), val_files=(both, first), weights={first: 2.0})
    assert config.data.train_files == config.data.val_files == (first, f"{tmp_path}/b.jsonl")
    assert config.data.weights == {first: 2.0}
    with pytest.raises(
        ConfigError, match=r"data\.weights: .*/a\.jsonl has the weights 2 and 0\.5, by two entries"
    ):
        config_of(train_files=(both, first), weights={first: 2.0, both: 0.5})


def test_a_pattern_names_no_folder(tmp_path, config_of):
    (tmp_path / "parts" / "more.d").mkdir(parents=True)
    inner = tmp_path / "parts" / "more.d" / "c.jsonl"
    inner.write_text('{"question": "x"}\n')
    assert config_of(train_files=(f"{tmp_path}/parts/**",)).data.train_files == (str(inner),)
    with pytest.raises(ConfigError, match="no file fits the pattern"):
        config_of(train_files=(f"{tmp_path}/parts/*",))


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path, config_of):
    odd = tmp_path / "a[1].jsonl"
    odd.write_text('{"question": "x"}\n')
    assert config_of(train_files=(str(odd),)).data.train_files == (str(odd),)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{}/none-*.jsonl", "data.train_files: no file fits the pattern"),
        ("hf:openai/gsm8k", "write hf:REPOSITORY[@REVISION][:CONFIG]:SPLIT"),
        ("hf:a/b/c:train", "write hf:REPOSITORY"),
    ],
)
def test_an_entry_that_names_nothing_is_refused(tmp_path, config_of, entry, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        config_of(train_files=(entry.format(tmp_path),))


MAP = """
def map_row(row):
    if row["n"] == 1:
        return None
    return [{"prompt": row["question"] + suffix} for suffix in ("?", "!")]
"""


def test_rows_are_mapped_once_and_again_if_source_or_function_change(
    tmp_path, config_of, capsys, monkeypatch
):
    monkeypatch.setattr(
        sys, "dont_write_bytecode", False
    )  # as it is for users: no old function may be cached
    function = tmp_path / "rows.py"
    function.write_text(MAP)
    config = config_of(train_files=(f"{tmp_path}/[ab].jsonl",), map=str(function), weights={})
    made = with_made_data(config)
    first, second = made.data.train_files
    assert Path(first).parent == Path(f"{config.run.dir}.data")
    assert [row["prompt"] for row in rows_in(first)] == ["a0?", "a0!", "a2?", "a2!"]
    assert [row["prompt"] for row in rows_in(second)] == ["b0?", "b0!"]
    assert capsys.readouterr().err.count("yatt: making ") == 2
    assert with_made_data(config) == made and with_made_data(made) == made
    for name in "ab":  # copied again: the same rows
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
    assert with_made_data(config) == made and capsys.readouterr().err == ""
    function.write_text(MAP.replace('"!"', '"."'))
    other = with_made_data(config).data.train_files
    assert other != made.data.train_files and rows_in(other[1])[1]["prompt"] == "b0."
    assert not (tmp_path / "__pycache__").exists()


def test_rows_are_mapped_again_if_what_the_function_imports_has_changed(tmp_path, config_of):
    (tmp_path / "rows.py").write_text(
        "from ends import END\ndef map_row(row): return {'prompt': row['question'] + END}\n"
    )
    helper = tmp_path / "ends.py"
    config = config_of(train_files=(f"{tmp_path}/b.jsonl",), map=str(tmp_path / "rows.py"), weights={})
    for end in ("?", "!"):
        helper.write_text(f"END = {end!r}\n")
        (path,) = with_made_data(config).data.train_files
        assert [row["prompt"] for row in rows_in(path)] == [f"b0{end}", f"b1{end}"]


def test_mapped_rows_are_not_mapped_again_however_their_folder_is_written(tmp_path, config_of, monkeypatch):
    (tmp_path / "rows.py").write_text(MAP)
    config = config_of(train_files=(f"{tmp_path}/a.jsonl",), map=f"{tmp_path}/rows.py")
    made = with_made_data(config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    relative = made_folder(f"{os.path.relpath(config.run.dir)}/")
    assert with_made_data(made, tmp_path / "of-eval", [relative]) == made
    (path,) = made.data.train_files
    linked = replace(
        made, data=replace(made.data, train_files=(path.replace("/run.data", "/link/run.data"),))
    )
    assert with_made_data(linked) == linked


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "def map_row(row):\n    return row if row['n'] < 2 else 1 / 0\n",
            r"rows.py:2: map_row failed on .*a.jsonl: row 3: Zero",
        ),
        ("def map_row(row):\n    return 'x'\n", "returned str for .*a.jsonl: row 1; return a dict"),
        ("def map_row(row):\n    return {'x': float('nan')}\n", "what JSON does not have"),
        ("def map_row(row):\n    return {'x': object()}\n", "what JSON does not have"),
        ("def map_row(row):\n    return {'x': chr(0xD800)}\n", "what JSON does not have"),
        ("def map_row(row):\n    return None\n", "left out every row"),
        ("def other(row):\n    return row\n", "has no function 'map_row'"),
        ("def map_row(row:\n", r"rows.py:1"),
        ("import os\nos._exit(3)\n", r"the process ended \(exit code 3\)"),
        ("def map_row(row):\n    raise SystemExit(0)\n", "SystemExit"),
        (None, "rows.py cannot be read"),
    ],
)
def test_a_function_that_fails_is_one_sentence_and_leaves_no_file(tmp_path, config_of, code, says):
    function = tmp_path / "rows.py"
    if code is not None:
        function.write_text(code)
    config = config_of(train_files=(f"{tmp_path}/a.jsonl",), map=str(function))
    with pytest.raises(ConfigError, match=says):
        with_made_data(config)
    folder = Path(f"{config.run.dir}.data")
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_data_set_is_fetched_once(tmp_path, config_of, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "repository"
    repository.mkdir()
    for split, count in (("train", 4), ("test", 2)):
        lines = (json.dumps({"prompt": f"{split} {i}", "answer": {"value": i}}) + "\n" for i in range(count))
        (repository / f"{split}.jsonl").write_text("".join(lines))
    entry = f"hf:{repository}:train"
    config = config_of(train_files=(entry,), val_files=(f"hf:{repository}:test",), weights={entry: 2.0})
    made = with_made_data(config)
    (path,) = made.data.train_files
    import pyarrow.parquet as parquet

    assert parquet.read_table(path).to_pylist()[3] == {"prompt": "train 3", "answer": {"value": 3}}
    assert made.data.weights == {path: 2.0} and len(parquet.read_table(made.data.val_files[0])) == 2
    (repository / "train.jsonl").unlink()
    assert with_made_data(config) == made
    with pytest.raises(ConfigError, match=r"hf:/.*none:train: cannot be fetched"):
        with_made_data(config_of(train_files=(f"hf:{tmp_path}/none:train",)))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    with HubServer("group/sums") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # of engines, for all tests
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield hub


def split(**rows: str) -> dict[str, bytes]:
    """Files of a data set: the row of each split."""
    return {f"{name}.jsonl": json.dumps({"prompt": row}).encode() + b"\n" for name, row in rows.items()}


def fetched(config) -> list[str]:
    """The first prompt of each training file."""
    import pyarrow.parquet as parquet

    return [parquet.read_table(path).to_pylist()[0]["prompt"] for path in config.data.train_files]


@pytest.mark.slow
def test_a_new_start_takes_the_hubs_newest_commit_and_says_which(tmp_path, config_of, hub, capsys):
    first = hub.commit(split(train="one", test="held out"))
    newest = config_of(train_files=("hf:group/sums:train",))
    pinned = config_of(train_files=(f"hf:group/sums@{first}:train",))
    assert fetched(with_made_data(newest)) == fetched(with_made_data(pinned)) == ["one"]
    assert f"data.train_files: hf:group/sums:train is commit {first[:12]}" in capsys.readouterr().err
    second = hub.commit(split(train="two", test="held out"))
    assert fetched(with_made_data(newest)) == ["two"], "the folder of a removed run has the old rows"
    assert f"is commit {second[:12]}" in capsys.readouterr().err
    hub.asked.clear()
    assert fetched(with_made_data(pinned)) == ["one"] and hub.asked == []


@pytest.mark.slow
def test_the_same_run_file_goes_on_with_the_commit_that_it_has_begun_with(config_of, hub):
    hub.commit(split(train="one"))
    config = with_made_data(config_of(train_files=("hf:group/sums:train",)))
    Path(config.run.dir).mkdir()
    (Path(config.run.dir) / "config.yaml").write_text(resolved_text(config))
    hub.commit(split(train="two"))
    again = config_of(train_files=("hf:group/sums:train",), is_new=False)
    assert with_made_data(again).data == config.data, "rows are known by their numbers"


@pytest.mark.slow
def test_a_data_set_in_the_librarys_cache_needs_no_hub(tmp_path, config_of, hub, monkeypatch):
    hub.commit(split(train="one"))
    config = config_of(train_files=("hf:group/sums:train",))
    assert fetched(with_made_data(config)) == ["one"]
    shutil.rmtree(made_folder(config.run.dir))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetched(with_made_data(config)) == ["one"]


@pytest.mark.slow
def test_entries_that_look_alike_are_files_of_their_own(config_of, hub):
    hub.commit(split(train="one", test="held out"))
    entries = ("hf:group/sums:train", "hf:group/sums:train+test", "hf:group/sums@main:train")
    made = with_made_data(config_of(train_files=entries)).data.train_files
    assert len(set(made)) == 3


@pytest.mark.slow
def test_a_hub_that_is_away_costs_the_question_only(config_of, hub, capsys):
    commit = hub.commit(split(train="one"))
    config = config_of(train_files=("hf:group/sums:train",))
    made = with_made_data(config)
    hub.commits.clear()
    assert with_made_data(config) == made
    said = capsys.readouterr().err
    assert (
        f"is commit {commit[:12]}" in said and "the hub was not asked for a newer one: hf:group/sums" in said
    )
    with pytest.raises(ConfigError, match=r"hf:group/none:train: cannot be fetched"):
        with_made_data(config_of(train_files=("hf:group/none:train",)))


def test_weights_name_entries_and_are_not_all_zero(tmp_path):
    file = Path("configs/quickstart.yaml")
    with pytest.raises(ConfigError, match=r"weights: 'other\.jsonl' is no entry of train_files"):
        load_run_config([file], ["data.weights={other.jsonl: 2.0}"])
    entry = "runs/quickstart/data/train.jsonl"
    with pytest.raises(ConfigError, match="weights: all are 0"):
        load_run_config([file], [f"data.weights={{{entry}: 0}}"])
    with pytest.raises(ConfigError, match=re.escape(f"data.weights.{entry} is -1")):
        load_run_config([file], [f"data.weights={{{entry}: -1}}"])
