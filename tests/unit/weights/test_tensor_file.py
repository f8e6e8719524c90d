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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no header"),
        (b"\xff" * 8, "has no header"),
        (b"\x20" + b"\0" * 7 + b"{}", "ends within its header"),
        (headed([]), "a header that cannot"),
        (headed({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}), "a header that cannot"),
        (headed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "a has 4 bytes for shape"),
        (headed({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}), "a header that cannot"),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_named(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        TensorFile(tmp_path / "x.safetensors")


def test_a_file_that_ends_within_a_tensor_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(headed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 7))
    with pytest.raises(ConfigError, match="ends within tensor a; it is no whole safetensors file"):
        TensorFile(path).read("a", lambda: None)
