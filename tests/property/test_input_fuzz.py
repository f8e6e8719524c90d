"""Mutated model folders and data files: each is refused by name or accepted, and what is accepted is read by
other people's libraries in the same way.

`YATT_FUZZ=2000 YATT_FUZZ_SEED=7 pytest tests/property/test_input_fuzz.py` runs the long form. Without a seed
each run draws its own, and a failure prints it.
"""

import gzip
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import HANG_S
from tests.seeds import seed_of
from tests.tiny_models import CHAT, VOCAB_SIZE, make_tokenizer
from yatt.adapters.inputs.dataset import RowFiles, check_rows
from yatt.adapters.processes.watched_trial import Stages
from yatt.config.load import load_run_config, resolved_text
from yatt.config.schema import DataSection, GenRMSection, RunConfig, VerdictSection
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_text
from yatt.launch.checks.judge_check import check_judge_folder
from yatt.launch.checks.model_check import check_length, check_model, checked_tensors
from yatt.launch.checks.policy_check import check_policy
from yatt.models.model import read_model
from yatt.models.tensors import hf_shapes

COUNT = int(os.environ.get("YATT_FUZZ", "100"))
SEED = seed_of("YATT_FUZZ_SEED")
SAMPLE = "the model answers 17 questions; grüße"
pytestmark = pytest.mark.timeout(900 + COUNT)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 64,
    "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "initializer_range": 0.02, "attention_bias": False, "use_sliding_window": False, "dtype": "float32",
}  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 1 << 31, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "a", "\0",
    "\ud800", "\x1b[2J", "../../../etc/passwd", "/dev/zero", "a" * 70_000, [], {}, [[]], [None], {"": {}},
    ["a", "b"], "{% for i in range(9) %}{% endfor %}", "{{", "{{ 1/0 }}", "{{ messages + 1 }}", "<|im_end|>",
)  # fmt: skip
BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b" ",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"9",
    b"-",
    b"\x7f",
    b"\x80",
)


def make_model(folder: Path) -> Path:
    """A Qwen3 in two files with an index, without torch."""
    from safetensors.numpy import save_file

    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "chat_template.jinja").write_text(CHAT)
    shapes = {n: s for row in read_model(str(folder)).rows for n, s in hf_shapes(row).items()}
    names, weight_map = sorted(shapes), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: np.ones(shapes[n], np.float32) for n in some}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def repeated(one: Callable[[random.Random, str], bool], seed: int) -> None:
    """Calls `one` with chance and a name for the mutation; it gives whether the mutation was accepted. All
    failures are collected, so that one run shows them."""
    chance, failures, accepted = random.Random(seed), [], 0
    for number in range(COUNT):
        what = f"seed {SEED}, number {number}"
        try:
            accepted += one(chance, what)
        except AssertionError as error:
            failures.append(str(error)[:1500])
        except Exception as error:  # noqa: BLE001 - reported at the end
            failures.append(f"{what}: {error!r}"[:1500])
    assert not failures, "\n\n".join([f"{len(failures)} failures", *failures[:40]])
    assert 0 < accepted < COUNT, "some damage is harmless, most is not"


@contextmanager
def limited(what: object) -> Iterator[None]:
    """A hang is a failure that names the mutation."""

    def ring(*_: object) -> None:
        raise AssertionError(f"hangs: {what}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(HANG_S))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def with_hostile_value(data: bytes, chance: random.Random) -> bytes:
    value = json.loads(data)
    paths = list(places(value))
    path = chance.choice([p for p in paths if len(p) <= 2] if chance.random() < 0.7 else paths)
    hostile = json.loads(json.dumps(chance.choice(HOSTILE)))
    if not path:
        return json.dumps(hostile).encode()
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = chance.randrange(4)
    if kind == 0 and isinstance(parent, dict):
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, dict):
        parent[path[-1] + chance.choice(("x", "\ud800", "\n"))] = parent.pop(path[-1])
    else:
        parent[path[-1]] = hostile
    text = json.dumps(value, ensure_ascii=chance.random() < 0.7)
    if chance.random() < 0.05:
        text = text.replace(":", ":" + "[" * 3000 + "]" * 3000 + ',"z":', 1)
    if chance.random() < 0.05:
        text = text.replace(": 2", ": " + "9" * 5000, 1)
    return text.encode(errors="surrogatepass")


def with_damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(9)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + data[at:]
    if kind == 2:
        return data[at:]
    if kind == 3:
        return b""
    if kind == 4:
        return data[:at] + chance.choice(BYTES) * chance.choice((1, 7, 5000)) + data[at:]
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 4, 64))):
        near = chance.randrange(min(len(data), 400)) if chance.random() < 0.5 else chance.randrange(len(data))
        damaged[near] = chance.choice((damaged[near] ^ 1 << chance.randrange(8), chance.choice(BYTES)[0]))
    return bytes(damaged)


def encoded_otherwise(data: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(6)
    if kind == 0:
        return gzip.compress(data, mtime=0)
    if kind == 1:
        return b"\x28\xb5\x2f\xfd" + data
    if kind == 2:
        return b"\xef\xbb\xbf" + data
    if kind == 3:
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    text = data.decode("latin-1")
    return text.encode("utf-16") if kind == 4 else text.replace("e", "é", 3).encode("latin-1")


def replaced(path: Path, data: bytes, chance: random.Random) -> None:
    """Something else of the same name."""
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.with_name("nothing"))
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    else:
        path.with_name("moved.bin").write_bytes(data)  # a link to the whole file: harmless
        path.symlink_to(path.with_name("moved.bin"))


def mutated(path: Path, chance: random.Random, *, is_json: bool) -> str:
    """Damages the file once; gives a name of the damage."""
    data, draw = path.read_bytes(), chance.random()
    if draw < 0.15:
        replaced(path, data, chance)
        return f"{path.name} is something else"
    if draw < 0.3:
        change, name = encoded_otherwise, "encoded"
    elif is_json and draw < 0.75:
        change, name = with_hostile_value, "hostile value"
    else:
        change, name = with_damaged_bytes, "bytes"
    path.write_bytes(change(data, chance))
    return f"{path.name}: {name}"


def refusal(work: Callable[[], object], what: str, *paths: Path) -> str:
    """The text of the refusal, which names a path; empty if there is none."""
    try:
        with limited(what):
            work()
    except ConfigError as error:
        said = str(error)
        assert any(str(path) in said for path in paths), (what, said[:2000])
        assert "Traceback" not in said and "\n  File" not in said, (what, said[:2000])
        return said
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return ""


def policy_checks(config: RunConfig, scratch: Path) -> None:
    """What preflight does with the policy's folder, in this process."""
    folder = config.model.path
    check_model(folder, "model.path")
    check_policy(config)
    check_length(folder, "model.path", config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    text_checks(config, scratch)


def text_checks(config: RunConfig, scratch: Path) -> None:
    faults, _ = check_text(Stages(scratch, 60), resolved_text(config))
    if faults:
        raise faults[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "whole")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    data = tmp_path / "prompts.jsonl"
    message = [{"role": "user", "content": SAMPLE}]
    data.write_text(json.dumps({"prompt": message, "data_source": "d"}) + "\n")
    written = {
        "run": {"dir": str(tmp_path / "run")},
        "launch": {"nodes": 1, "device": "cpu"},
        "data": {"train_files": [str(data)], "max_prompt_tokens": 128, "ground_truth_key": ""},
        "model": {"path": str(model), "dtype": "float32"},
        "rollout": {"n": 4, "max_response_tokens": 128},
        "rewards": [{"name": "exact", "path": "builtin:exact"}],
        "optimizer": {"lr": 0.001},
        "trainer": {"total_iterations": 1, "train_batch_size": 4, "mini_batch_size": 4,
                    "max_tokens_per_micro_batch": 512},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(written))
    return load_run_config([tmp_path / "run.yaml"], [])


def copy_of(model: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    return folder


NAMES = (
    "config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "model.safetensors.index.json", "chat_template.jinja", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)  # fmt: skip


def test_a_whole_folder_is_accepted(config: RunConfig, model: Path, tmp_path: Path) -> None:
    policy_checks(config, tmp_path)
    show_harmless(model, "whole")


def test_a_damaged_policy_is_refused_by_name_or_is_harmless(
    config: RunConfig, model: Path, tmp_path: Path
) -> None:
    def one(chance: random.Random, what: str) -> bool:
        folder = copy_of(model, tmp_path / "policy")
        file = folder / chance.choice(NAMES)
        what += f": {mutated(file, chance, is_json=file.suffix == '.json')}"
        changed = replace(config, model=replace(config.model, path=str(folder)))
        if refusal(lambda: policy_checks(changed, tmp_path), what, folder, tmp_path / "prompts.jsonl"):
            return False
        show_harmless(folder, what)
        return True

    repeated(one, SEED)


def show_harmless(folder: Path, what: str) -> None:
    """Reads the folder with the libraries that engines use, and compares."""
    from safetensors import safe_open
    from tokenizers import Tokenizer as Fast
    from transformers import AutoConfig, AutoTokenizer

    found, faults = checked_tensors(str(folder), "model.path")
    assert not faults, what
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            shapes |= {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
            some = next(iter(tensors.keys()))
            assert tensors.get_tensor(some).nbytes == found[some].size_bytes, what
    assert shapes == {name: place.shape for name, place in found.items()}, what
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise AssertionError(f"{what}: transformers refuses it: {error!r}") from error
    ours = read_model(str(folder)).shape
    assert (config.hidden_size, config.num_hidden_layers) == (ours.hidden_size, ours.num_layers), what
    assert (config.vocab_size, config.num_attention_heads) == (ours.vocab_size, ours.attention.num_heads), (
        what
    )
    assert tokenizer("hello").input_ids is not None
    assert Fast.from_file(str(folder / "tokenizer.json")).encode(SAMPLE).ids is not None, what


def test_a_damaged_judge_is_refused_by_name_or_can_be_read(
    config: RunConfig, model: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig

    judge = GenRMSection(
        name="j", model=str(tmp_path / "judge"), template="{prompt} {completion}", chat=True,
        max_model_tokens=512, verdict=VerdictSection(pattern="(.)"),
    )  # fmt: skip
    changed = replace(config, genrms=(judge,))

    def checks() -> None:
        check_judge_folder(judge, "genrms[0]")
        check_length(judge.model, "genrms[0].max_model_tokens", judge.max_model_tokens)
        text_checks(changed, tmp_path)

    def one(chance: random.Random, what: str) -> bool:
        folder = copy_of(model, tmp_path / "judge")
        file = folder / chance.choice(NAMES)
        what += f": {mutated(file, chance, is_json=file.suffix == '.json')}"
        if refusal(checks, what, folder):
            return False
        for weights in folder.glob("*.safetensors"):
            with safe_open(weights, "np") as tensors:
                assert list(tensors.keys()), what
        try:
            AutoConfig.from_pretrained(folder)
        except Exception as error:
            if "does not recognize this architecture" in str(error):
                return True  # an engine may know more types than transformers
            raise AssertionError(f"{what}: transformers refuses it: {error!r}") from error
        return True

    repeated(one, SEED + 1)


ROWS = [
    {"prompt": [{"role": "user", "content": f"question {i} grüße"}], "data_source": "d",
     "reward_model": {"ground_truth": str(i), "style": "rule"},
     "extra_info": {"index": i, "more": [1.5, None]}}
    for i in range(20)
]  # fmt: skip
DATA = DataSection(train_files=("x",))


def test_a_damaged_jsonl_file_is_refused_by_name_or_read_as_json_reads_it(tmp_path: Path) -> None:
    whole = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(ROWS)).encode()

    def one(chance: random.Random, what: str) -> bool:
        path = emptied(tmp_path / "data") / "prompts.jsonl"
        if chance.random() < 0.5:
            lines = whole.splitlines(keepends=True)
            row = chance.randrange(len(lines))
            lines[row] = with_hostile_value(lines[row], chance) + b"\n"
            path.write_bytes(b"".join(lines))
        else:
            path.write_bytes(whole)
            what += mutated(path, chance, is_json=False)
        if refusal(lambda: check_rows((str(path),), DATA), what, path):
            return False
        text = path.read_bytes().decode("utf-8-sig")
        same_rows(path, [json.loads(line) for line in text.split("\n") if line.strip()], tmp_path, what)
        return True

    repeated(one, SEED + 2)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def same_rows(path: Path, plain: list[Any], scratch: Path, what: str) -> None:
    files = RowFiles((str(path),), DATA, scratch / "scratch")
    assert len(files) == len(plain), what
    for number, row in enumerate(plain):
        ours = files.row(number)
        assert repr(ours.raw) == repr(row), what
        assert repr(ours.prompt) == repr(row["prompt"]), what
        truth = row.get("reward_model")
        assert repr(ours.ground_truth) == repr(truth.get("ground_truth") if isinstance(truth, dict) else None)
    files.close()


def test_a_damaged_parquet_file_is_refused_by_name_or_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    source = tmp_path / "whole.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), source, row_group_size=7)
    whole = source.read_bytes()

    def one(chance: random.Random, what: str) -> bool:
        path = emptied(tmp_path / "data") / "prompts.parquet"
        path.write_bytes(whole)
        if chance.random() < 0.3:
            rows = [{**row, chance.choice(list(row)): chance.choice(HOSTILE)} for row in ROWS]
            try:
                parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            except (pyarrow.ArrowException, UnicodeEncodeError, TypeError, OverflowError):
                path.write_bytes(b"")
        else:
            what += f": {mutated(path, chance, is_json=False)}"
        if refusal(lambda: check_rows((str(path),), DATA), what, path):
            return False
        try:
            rows = parquet.ParquetFile(path).read().to_pylist()
        except pyarrow.ArrowException:  # in a column that a run does not read
            return True
        same_rows(path, rows, tmp_path, what)
        return True

    repeated(one, SEED + 3)
