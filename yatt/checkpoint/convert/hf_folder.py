"""A Hugging Face folder that appears whole or not at all: files with bounded sizes, and an index. No torch.

The folder is made under a temporary name beside its place. A killed process leaves that behind; the next one
with the same target removes it, if nobody works on it.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import Buffer, write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.tensor_header import ITEM_BYTES
from yatt.checkpoint.commit.pieces import in_files
from yatt.errors import CheckpointError, ConfigError
from yatt.models.folder import CONFIG, INDEX, SIDE_FILES
from yatt.models.quantized import exported_config
from yatt.models.rows import WeightRow
from yatt.models.spans import RowSpan
from yatt.models.tensors import file_shapes
from yatt.plain_files import read_plain

MOST_SIDE_BYTES = 1 << 29
"""Of a file beside the weights; the largest are tokenizers, of some 40 MB."""

TEMPLATES, MOST_TEMPLATES = "additional_chat_templates", 64
"""Folder of a model's further chat templates, and how many of them are copied."""

FILE_BYTES = 4 << 30
"""Most bytes of the tensors of a file, if no single tensor has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensor:
    """A tensor of a safetensors file; `dtype` is the name in its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def planned_tensors(rows: Iterable[WeightRow], dtypes: Mapping[str, str]) -> list[FolderTensor]:
    """Returns the tensors of a folder of these rows.

    Args:
        dtypes: of each row by its name, as in the header of a safetensors file.

    Raises:
        CheckpointError: rows of one tensor have several dtypes.
    """
    found: dict[str, FolderTensor] = {}
    for row in rows:
        for name, shape in file_shapes([row]).items():
            tensor = FolderTensor(name=name, dtype=dtypes[row.name], shape=shape)
            if found.setdefault(name, tensor) != tensor:
                raise CheckpointError(f"{row.name} is {tensor.dtype}, and others of {name} are not")
    return [*found.values()]


class FolderWriter:
    """Writes ranges of tensors, in any order, from any thread.

    Args:
        folder: an empty folder.
        file_bytes: most bytes of the tensors of a file.
    """

    def __init__(self, folder: Path, tensors: Sequence[FolderTensor], file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_of = folder, dict[str, str]()
        self._places: dict[str, tuple[int, int, FolderTensor]] = {}
        self._descriptors: list[int] = []
        self._size_bytes = sum(tensor.size_bytes for tensor in tensors)
        dealt = in_files(tensors, lambda tensor: tensor.size_bytes, file_bytes)
        for number, some in enumerate(dealt):
            self._open(f"model-{number + 1:05d}-of-{len(dealt):05d}.safetensors", some)

    def write(self, name: str, begin: int, data: Buffer) -> None:
        """Writes bytes of a tensor from its byte `begin` on.

        Raises:
            OSError: the filesystem failed.
        """
        descriptor, first, _ = self._places[name]
        at, view = first + begin, memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, at)
            at, view = at + written, view[written:]

    def write_box(self, span: RowSpan, data: Buffer, column: int, width: int) -> None:
        """Writes the rows of a span, `width` columns of each from `column` on.

        Raises:
            OSError: the filesystem failed.
        """
        _, _, tensor = self._places[span.name]
        item = ITEM_BYTES[tensor.dtype]
        columns, rows = math.prod(tensor.shape[1:]), (span.num_rows, width)
        at = span.first * columns + column
        if span.block is not None:
            _, columns, height = tensor.shape
            data, rows = _transposed(data, *rows, item), (width, span.num_rows)
            at, columns = (span.block * columns + column) * height + span.first, height
        count, length = rows
        if length == columns:
            self.write(span.name, at * item, data)
            return
        view = memoryview(data)
        for number in range(count):  # each row is apart from the next
            own = view[number * length * item : (number + 1) * length * item]
            self.write(span.name, (at + number * columns) * item, own)

    def finish(self) -> None:
        """Makes all files durable, and writes the index."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        index = {"metadata": {"total_size": self._size_bytes}, "weight_map": self._file_of}
        _write(self._folder / INDEX, json.dumps(index, indent=1).encode())

    def close(self) -> None:
        """Closes all files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _open(self, file: str, tensors: Sequence[FolderTensor]) -> None:
        header = _header(tensors)
        descriptor = os.open(self._folder / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, len(header) + sum(tensor.size_bytes for tensor in tensors))
        os.pwrite(descriptor, header, 0)
        begin = len(header)
        for tensor in tensors:
            self._places[tensor.name] = descriptor, begin, tensor
            self._file_of[tensor.name] = file
            begin += tensor.size_bytes


def _transposed(data: Buffer, num_rows: int, width: int, item: int) -> bytes:
    """The bytes of a matrix [num_rows, width], column by column."""
    import numpy as np

    return np.frombuffer(data, f"<u{item}").reshape(num_rows, width).T.tobytes()


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a temporary folder, which becomes `target` at the end, or vanishes if something is raised.

    Raises:
        ConfigError: `target` exists and is not empty, or the folder that it would be in does not exist.
    """
    check_target(target)
    remove_partial_folders(target)
    partial_folder = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    partial_folder.mkdir()
    try:
        with _locked(partial_folder) as descriptor:
            yield partial_folder
            os.fsync(descriptor)
            _appear(partial_folder, target)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def check_target(target: Path) -> None:
    """Refuses a folder that cannot be written as a new one.

    Raises:
        ConfigError: it exists and is not empty, or the folder that it would be in does not exist.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be made: there is no folder {target.parent}; make it first.")
    is_folder = target.is_dir() and not target.is_symlink()  # a link cannot be replaced by a folder
    if os.path.lexists(target) and not (is_folder and not any(target.iterdir())):
        raise ConfigError(f"{target} exists already and is not an empty folder; write another name.")


def copy_side_files(source: Path, folder: Path, dtype: str, *, has_score: bool = False) -> None:
    """Copies config, tokenizer, chat templates and processor from one Hugging Face folder to another, also if
    they are there: an export may be repeated.

    Args:
        dtype: of the weights in `folder`, as `bfloat16`.
        has_score: the weights have a value head in place of the output layer.

    Raises:
        ConfigError: one is no regular file, is too large, or cannot be read.
    """
    named = with_retries(partial(_named_templates, source))
    if named:
        with_retries(partial((folder / TEMPLATES).mkdir, exist_ok=True))
    for name in (*SIDE_FILES, *(f"{TEMPLATES}/{each}" for each in named)):
        data = with_retries(partial(read_plain, source / name, MOST_SIDE_BYTES))
        if data is not None:
            content = exported_config(data, dtype, has_score=has_score) if name == CONFIG else data
            with_retries(partial(write_atomically, folder / name, content))


def _named_templates(source: Path) -> list[str]:
    """Returns the files of a model's further chat templates."""
    try:
        names = sorted(os.listdir(source / TEMPLATES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if name.endswith(".jinja")][:MOST_TEMPLATES]


def _appear(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ConfigError(f"{target} was made by somebody else meanwhile; write another name.") from error
    with _opened(target.parent) as parent:
        os.fsync(parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Marks the folder as in use. A filesystem may not have such locks; then nobody removes leftovers."""
    with _opened(folder) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor


def remove_partial_folders(target: Path) -> None:
    """Removes what processes that were killed have left beside a folder (`whole_folder`)."""
    name = re.compile(rf"\.{re.escape(target.name)}\.\d+\.[0-9a-f]{{8}}")
    for path in [path for path in target.parent.iterdir() if name.fullmatch(path.name)]:
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(path.iterdir()):  # an empty one may be about to be locked
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[FolderTensor]) -> bytes:
    table: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        offsets = [begin, begin + tensor.size_bytes]
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        begin += tensor.size_bytes
    body = json.dumps(table).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body
