"""A checkpoint as a Hugging Face folder and back: the same bits, for every family and layout."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.trainer.conftest import make_model
from tests.runs import HANG_S
from tests.saved_weights import cut_dim, save, tensors_in
from tests.tiny_vision import KINDS, make_vision_model
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.convert import export as export_module, from_hf
from yatt.checkpoint.convert.export import FolderForm, export_as_hf, weight_bytes
from yatt.checkpoint.convert.from_hf import to_checkpoint
from yatt.checkpoint.convert.hf_folder import copy_side_files, planned_tensors
from yatt.checkpoint.store.store import FolderStore, open_store
from yatt.errors import CheckpointError, ConfigError
from yatt.models.folder import INDEX, ModelFolder
from yatt.models.model import read_model
from yatt.models.rows import Part, WeightRow, matrix_row
from yatt.models.spans import row_spans, spans_within
from yatt.weights.convert import pick_tensors

LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2 dp3": {"tp": 2, "pp": 2, "dp": 3}}
FAMILIES = [("llama", False), ("llama", True), ("qwen2", True), ("qwen2", False), ("qwen3", False)]
NAME = "manifests/00000001.000001.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        (kind, tied): make_model(root / f"{kind}-{tied}", kind, is_tied=tied, num_hidden_layers=2)
        for kind, tied in FAMILIES
    }


@pytest.fixture
def qwen3(folders):
    return folders["qwen3", False]


def opened(folder: Path) -> ModelFolder:
    return ModelFolder(path=folder, model=read_model(str(folder)))


def saved(store, folder, **layout):
    checkpoints = Checkpoints(store, 1)
    checkpoints.adopt(None)
    save(store, folder, **layout)
    return checkpoints


def exported(checkpoints, source: Path, target: Path, **more) -> dict[str, torch.Tensor]:
    export_as_hf(checkpoints, NAME, opened(source), target, lambda _: None, **more)
    return tensors_in(target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_layout_gives_the_original_folder_to_the_bit(tmp_path, folders, family, layout):
    source = folders[family]
    checkpoints = saved(FolderStore(tmp_path / "store"), source, **LAYOUTS[layout])
    got, wanted = exported(checkpoints, source, tmp_path / "hf"), tensors_in(source)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_in_bfloat16_the_models_own_weights_are_taken_and_transformers_reads_them(tmp_path, qwen3):
    import transformers

    checkpoints = saved(FolderStore(tmp_path / "store"), qwen3, tp=2, dp=2, dtype=torch.bfloat16)
    seen: list[int] = []
    export_as_hf(
        checkpoints, NAME, opened(qwen3), tmp_path / "hf", seen.append, FolderForm(file_bytes=20_000)
    )
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sum(seen) == weight_bytes(checkpoints.read(NAME))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    for name, tensor in tensors_in(qwen3).items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == json.loads((qwen3 / "config.json").read_text()) | {"dtype": "bfloat16"}


@pytest.mark.filterwarnings("ignore")
def test_from_s3_and_in_small_reads(tmp_path, qwen3, s3_endpoint, monkeypatch):
    from tests.conftest import BUCKET

    monkeypatch.setattr(export_module, "CHUNK_BYTES", 3000)
    options = {"endpoint_url": s3_endpoint}
    checkpoints = saved(open_store(f"s3://{BUCKET}/{tmp_path.name}", options), qwen3, tp=2)
    got = exported(checkpoints, qwen3, tmp_path / "hf")
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors_in(qwen3).items())


def test_a_damaged_piece_leaves_no_folder(tmp_path, qwen3):
    store = FolderStore(tmp_path / "store")
    checkpoints = saved(store, qwen3)
    file = checkpoints.read(NAME).files[0]
    path = tmp_path / "store" / file.path
    data = bytearray(path.read_bytes())
    data[file.tensors[0].begin + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is not what was saved: of main\.embedding"):
        exported(checkpoints, qwen3, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path, folders):
    checkpoints = saved(FolderStore(tmp_path / "store"), folders["llama", False])
    with pytest.raises(ConfigError, match=r"is not this checkpoint's model: .* has no .*linear_qkv.bias"):
        exported(checkpoints, folders["qwen2", False], tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"it has no output_layer.weight, which was saved"):
        exported(checkpoints, folders["llama", True], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("there", ["file", "full folder", "no parent"])
def test_a_target_that_cannot_be_new_is_refused(tmp_path, qwen3, there):
    checkpoints, target = saved(FolderStore(tmp_path / "store"), qwen3), tmp_path / "hf"
    if there == "file":
        target.write_text("mine")
    elif there == "full folder":
        target.mkdir()
        (target / "notes").write_text("mine")
    else:
        target = tmp_path / "none" / "hf"
    with pytest.raises(ConfigError, match=r"exists already|there is no folder"):
        exported(checkpoints, qwen3, target)
    assert not list(tmp_path.glob(".hf*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from yatt.checkpoint.convert import export as e
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore
from yatt.models.folder import ModelFolder
from yatt.models.model import read_model
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
store, source, target, at = sys.argv[1:]
left = [int(at)]
def tick(_):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))
folder = ModelFolder(path=Path(source), model=read_model(source))
name = "manifests/00000001.000001.json"
e.export_as_hf(Checkpoints(FolderStore(Path(store)), 0), name, folder, Path(target), tick)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_killed_export_leaves_no_folder_and_the_next_one_removes_its_traces(tmp_path, qwen3, how):
    checkpoints = saved(FolderStore(tmp_path / "store"), qwen3, dp=3)
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(qwen3), str(tmp_path / "hf")]
    done = subprocess.run(
        [*arguments, "9"], env={**os.environ, "HOW": how}, capture_output=True, timeout=HANG_S
    )
    assert done.returncode in (-signal.SIGKILL, -signal.SIGINT), done.stderr
    assert not (tmp_path / "hf").exists()
    assert len(list(tmp_path.glob(".hf*"))) == (how == "SIGKILL")
    got = exported(checkpoints, qwen3, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "store"]
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors_in(qwen3).items())
    assert (tmp_path / "hf" / INDEX).is_file()


def test_an_export_imports_no_torch(tmp_path, qwen3):
    saved(FolderStore(tmp_path / "store"), qwen3)
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(qwen3), str(tmp_path / "hf")]
    done = subprocess.run(
        [*arguments, "0"], env={**os.environ, "HOW": ""}, capture_output=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr


# ---- the other direction ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [("llama", True), ("qwen2", False), ("qwen3", False)], ids=str)
def test_a_folder_becomes_a_checkpoint_with_the_same_weights(tmp_path, folders, family, dtype, monkeypatch):
    """Cut into bands of a few rows, and several files."""
    from safetensors.torch import save_file

    monkeypatch.setattr(from_hf, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(from_hf, "FILE_BYTES", 1 << 16)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((folders[family] / "config.json").read_bytes())
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_in(folders[family]).items()}
    names = sorted(tensors)
    for number in range(2):
        save_file({n: tensors[n] for n in names[number::2]}, source / f"model-{number}.safetensors")
    store = FolderStore(tmp_path / "store")
    name = to_checkpoint(opened(source), store, "store", "imported", lambda _: None)
    manifest = Checkpoints(store, 0).whole(name)
    assert len(manifest.files) > 1
    assert Checkpoints(store, 0).newest().name == name
    got = exported(Checkpoints(store, 0), source, tmp_path / "hf")
    assert all(torch.equal(got[n], tensor.float().bfloat16()) for n, tensor in tensors.items())
    mains = only_kind(store, manifest, "main")
    export_as_hf(Checkpoints(mains, 0), name, opened(source), tmp_path / "mains", lambda _: None)
    exact = tensors_in(tmp_path / "mains")
    assert all(torch.equal(exact[n], tensor.float()) for n, tensor in tensors.items())
    form = FolderForm(dtype="float32")
    export_as_hf(Checkpoints(store, 0), name, opened(source), tmp_path / "exact", lambda _: None, form)
    again = tensors_in(tmp_path / "exact")
    assert all(torch.equal(again[n], tensor.float()) for n, tensor in tensors.items())
    for folder, written in (("hf", "bfloat16"), ("mains", "float32"), ("exact", "float32")):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {written}
    with pytest.raises(ConfigError, match=r"--dtype bfloat16: the checkpoint has \S+ in float32 only"):
        form = FolderForm(dtype="bfloat16")
        export_as_hf(Checkpoints(mains, 0), name, opened(source), tmp_path / "none", lambda _: None, form)
    assert not (tmp_path / "none").exists()


def test_named_templates_and_the_processor_come_along(tmp_path, qwen3):
    source = tmp_path / "policy"
    shutil.copytree(qwen3, source)
    (source / "preprocessor_config.json").write_text('{"size": 1}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "additional_chat_templates" / "other.txt").write_text("no template")
    checkpoints = saved(FolderStore(tmp_path / "store"), source)
    exported(checkpoints, source, tmp_path / "hf")
    assert (tmp_path / "hf" / "preprocessor_config.json").read_text() == '{"size": 1}'
    assert [file.name for file in (tmp_path / "hf" / "additional_chat_templates").iterdir()] == [
        "tools.jinja"
    ]


def test_side_files_can_be_copied_again(tmp_path, qwen3):
    """An attempt that was killed at the end exports once more; and so does a run that is made longer."""
    target = tmp_path / "model"
    target.mkdir()
    for dtype in ("float32", "bfloat16"):
        copy_side_files(qwen3, target, dtype)
        assert json.loads((target / "config.json").read_text())["dtype"] == dtype


def only_kind(store, manifest, kind):
    """The same store, whose manifest lists only these pieces."""
    import msgspec

    from yatt.checkpoint.commit.manifest_format import sealed_manifest

    files = tuple(
        msgspec.structs.replace(
            file, tensors=tuple(piece for piece in file.tensors if piece.key.startswith(f"{kind}."))
        )
        for file in manifest.files
    )
    name = Checkpoints(store, 0).name(manifest)
    store.write(name, sealed_manifest(msgspec.structs.replace(manifest, files=files)))
    return store


def test_rounding_is_torchs_for_every_kind_of_number():
    import numpy as np

    some = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    values = some.to(torch.int32).view(torch.float32)
    values = torch.cat([values[~values.isnan()], torch.tensor([0.0, -0.0, float("inf"), 1e-45, 3.4e38])])
    got = np.frombuffer(from_hf._as_bfloat16(values.numpy()), "<u2")
    assert torch.equal(torch.from_numpy(got.astype(np.int16)), values.bfloat16().view(torch.int16))


def test_a_store_in_use_and_a_wrong_folder_are_refused(tmp_path, folders):
    source, store = folders["llama", False], FolderStore(tmp_path / "store")
    saved(store, source)
    with pytest.raises(ConfigError, match="is the checkpoint store of a run already"):
        to_checkpoint(opened(source), store, "store", "imported", lambda _: None)
    wrong = ModelFolder(path=source, model=read_model(str(folders["qwen2", False])))
    with pytest.raises(ConfigError, match="has no tensor"):
        to_checkpoint(wrong, FolderStore(tmp_path / "other"), "other", "imported", lambda _: None)
    assert not (tmp_path / "other").exists()


def test_spans_say_what_pick_does():
    parts = [Part("q", 8), Part("k", 4), Part("v", 4), Part("q", 8)]
    rows = [
        matrix_row("a", parts, 3, 4),
        matrix_row("b", parts, 3),
        WeightRow(name="c", parts=tuple(parts), groups=2),
    ]
    for row in rows:
        full = torch.arange(row.num_rows * max(1, row.width)).view(row.full_shape)
        wanted = dict(zip(row.hf_names, pick_tensors(row, full), strict=True))
        got = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
        for begin in range(0, row.num_rows, 5):
            for span in spans_within(row_spans(row), begin, begin + 5):
                got[span.name][span.first : span.first + span.num_rows] = full[span.begin : span.end]
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), row.name
    assert cut_dim(rows[0]) == 0


@pytest.mark.parametrize("is_turned", [False, True], ids=["released", "by transformers"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_one_tensor_are_written_as_released(tmp_path, layout, is_turned, monkeypatch):
    """Whichever way round the folder has them, and however pieces and bands cut them."""
    from safetensors.torch import save_file

    monkeypatch.setattr(from_hf, "CHUNK_BYTES", 1 << 12)
    source = Path(make_vision_model(tmp_path / "source", "qwen3_vl_moe"))
    wanted = tensors_in(source)
    if is_turned:
        stacks = {n: t.transpose(1, 2).contiguous() for n, t in wanted.items() if ".experts." in n}
        save_file(wanted | stacks, source / "model.safetensors", {"format": "pt"})
    imported = FolderStore(tmp_path / "imported")
    to_checkpoint(opened(source), imported, "imported", "imported", lambda _: None)
    form = FolderForm(dtype="float32")
    of_folder = exported(Checkpoints(imported, 0), source, tmp_path / "of-folder", form=form)
    assert of_folder.keys() == wanted.keys()
    assert all(torch.equal(of_folder[name], wanted[name]) for name in wanted)
    checkpoints = saved(FolderStore(tmp_path / "store"), source, **LAYOUTS[layout])
    of_run = exported(checkpoints, source, tmp_path / "of-run")
    assert all(torch.equal(of_run[name], wanted[name]) for name in wanted)


def test_experts_of_one_tensor_in_several_dtypes_are_refused(tmp_path):
    rows = read_model(make_vision_model(tmp_path / "source", "qwen3_vl_moe")).rows
    experts = [row for row in rows if row.stacked]
    dtypes = dict.fromkeys((row.name for row in experts), "BF16") | {experts[-1].name: "F32"}
    with pytest.raises(
        CheckpointError, match=r"linear_fc2.weight is F32, and others of \S+down_proj are not"
    ):
        planned_tensors(experts, dtypes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_goes_to_a_checkpoint_and_back_to_the_bit(tmp_path, kind):
    """Its convolution has five dimensions in files, and two in a checkpoint."""
    import transformers

    source = Path(make_vision_model(tmp_path / "source", kind))
    store = FolderStore(tmp_path / "store")
    name = to_checkpoint(opened(source), store, "store", "imported", lambda _: None)
    form = FolderForm(dtype="float32")
    export_as_hf(Checkpoints(store, 0), name, opened(source), tmp_path / "hf", lambda _: None, form)
    got = tensors_in(tmp_path / "hf")
    wanted = tensors_in(source)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) and got[name].shape == wanted[name].shape for name in got)
    assert any(tensor.dim() == (4 if kind == "internvl" else 5) for tensor in got.values())
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype="auto")
    again = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()
