"""Our reader of safetensors files gives what the library gives, and names what is no such file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from yatt.errors import ConfigError
from yatt.weights import tensor_file
from yatt.weights.tensor_file import DTYPES, TensorFile


def test_every_dtype_and_shape_is_read_as_the_library_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 7)
    chance, path = torch.Generator().manual_seed(3), tmp_path / "model.safetensors"
    shapes, tensors = [(3, 5), (4,), (), (0, 2)], {}
    for name, dtype in DTYPES.items():
        for shape in shapes:
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), generator=chance, dtype=torch.uint8)
            tensors[f"{name}{shape}"] = raw.view(dtype).reshape(shape)
    save_file(tensors, path, metadata={"format": "pt"})
    ours, theirs, ticks = TensorFile(path), load_file(path), []
    assert set(ours.names()) == set(theirs)
    for name, wanted in theirs.items():
        found = ours.read(name, lambda: ticks.append(1))
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.reshape(-1).view(torch.uint8).tolist() == wanted.reshape(-1).view(torch.uint8).tolist()
    assert len(ticks) > len(theirs)


def headed(header: object, data: bytes = b"") -> bytes:
    body = json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def one(dtype: object, shape: list, offsets: list, data: bytes = b"", names: str = "a") -> bytes:
    return headed({n: {"dtype": dtype, "shape": shape, "data_offsets": offsets} for n in names}, data)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no header"),
        (b"\xff" * 8, "has no header"),
        (b"\x20" + b"\0" * 7 + b"{}", "ends within its header"),
        (headed([]), "a header that cannot"),
        (headed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "4 bytes for shape"),
        (one("F32", [1.0], [0, 4], b"1234"), "a header that cannot"),
        (one("F32", [1], [0, 4.0], b"1234"), "a header that cannot"),
        (one("F32", [float("inf")], [0, 4]), "a header that cannot"),
        (one("F32", [-1], [4, 0]), "a header that cannot"),
        (one(["F32"], [1], [0, 4]), "a header that cannot"),
        (one("U8", [3], [0, 3], b"1234"), "its tensors end at"),
        (one("U8", [3], [1, 4], b"1234"), "a begins at"),
        (one("U8", [3], [0, 3], b"123", names="ab"), "b begins at"),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_named(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        TensorFile(tmp_path / "x.safetensors")


def test_a_file_that_ends_within_a_tensor_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    whole = headed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8)
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"its tensors end at .* it is no whole safetensors file"):
        TensorFile(path)
    path.write_bytes(whole)
    file = TensorFile(path)
    path.write_bytes(whole[:-1])  # cut since
    with pytest.raises(ConfigError, match="ends within tensor a; it is no whole safetensors file"):
        file.read("a", lambda: None)


def test_a_tensor_of_another_kind_costs_nothing_until_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {
        "mask": {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    path.write_bytes(headed(header, bytes(12)))
    file = TensorFile(path)
    assert file.read("a", lambda: None).item() == 0.0 and load_file(path).keys() == {"mask", "a"}
    with pytest.raises(ConfigError, match="tensor mask is U64; known are F64, F32"):
        file.read("mask", lambda: None)
