"""Headers of safetensors files are refused as the library refuses them."""

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from yatt.adapters.inputs.tensor_header import ITEM_BYTES, OTHER_DTYPES, read_header
from yatt.errors import ConfigError


def file_of(folder: Path, dtype: str, size_bytes: int) -> Path:
    """A file of one tensor with eight elements."""
    header = json.dumps({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, size_bytes]}}).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size_bytes))
    return path


def sizes_of(dtype: str) -> range:
    return range(ITEM_BYTES[dtype] * 8, ITEM_BYTES[dtype] * 8 + 1) if dtype in ITEM_BYTES else range(1, 65)


@pytest.mark.parametrize("dtype", [*ITEM_BYTES, *sorted(OTHER_DTYPES)])
def test_every_dtype_of_the_library_is_known(tmp_path: Path, dtype: str) -> None:
    taken = 0
    for size_bytes in sizes_of(dtype):
        path = file_of(tmp_path, dtype, size_bytes)
        try:
            with safe_open(path, "np"):
                taken += 1
        except SafetensorError:
            continue
        assert read_header(path)["x"].dtype == dtype
    assert taken == 1


@pytest.mark.parametrize("dtype", ["F3[", "", "f32", "F128"])
def test_any_other_is_refused(tmp_path: Path, dtype: str) -> None:
    path = file_of(tmp_path, dtype, 32)
    with pytest.raises(SafetensorError):
        safe_open(path, "np").__enter__()
    with pytest.raises(ConfigError, match="is no dtype"):
        read_header(path)
