"""Writes weights: as memory files for the engines of a node, and as a Hugging Face folder for people.

``index.json`` with ``{"policy_version", "files", "checksums"}`` is written last. A rename makes each complete
file visible under its name. Writing the same version again produces the same files.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from yatt.adapters.patience import LIMIT_S, patiently
from yatt.models.folder import SIDE_FILES
from yatt.trainer.model import Policy
from yatt.trainer.passes import Tick
from yatt.weights.checksum import checksum
from yatt.weights.convert import export_weights, write_index

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Tensor names by file, bytes of all weights (on every rank), and checksums by name (if written)."""

    files: dict[str, list[str]]
    size_bytes: int
    checksums: dict[str, str]


def publish_weights(policy: Policy, folder: Path, policy_version: int, tick: Tick, *, writes: bool) -> int:
    """Writes all weights to `folder` on the ranks that write. Collective over all ranks.

    Returns:
        Bytes of all weights.
    """
    written = _write_buckets(policy, folder, tick, writes=writes)
    if writes:
        index = {"files": list(written.files), "checksums": written.checksums}
        _replace(folder / "index.json", json.dumps({"policy_version": policy_version, **index}).encode())
    return written.size_bytes


def export_hf(policy: Policy, folder: Path, tick: Tick, *, writes: bool) -> None:
    """Writes the policy's weights as a Hugging Face folder. Collective.

    Raises:
        OSError: the folder's filesystem fails permanently, or for longer than the limit.
    """
    written = _write_buckets(policy, folder, tick, writes=writes, limit_s=LIMIT_S)
    if writes:
        file_of = {name: file for file, names in written.files.items() for name in names}
        patiently(partial(write_index, folder, file_of, written.size_bytes))


def copy_side_files(source: Path, folder: Path) -> None:
    """Copies config and tokenizer from one Hugging Face folder to another."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            patiently(partial(shutil.copyfile, source / name, folder / name))


def _write_buckets(
    policy: Policy, folder: Path, tick: Tick, *, writes: bool, limit_s: float = 0.0
) -> _Written:
    """Writes the weights in buckets. `limit_s`: longest wait per call for a filesystem that fails."""
    step = partial(patiently, limit_s=limit_s, on_failure=lambda _: tick())
    if writes:
        step(partial(folder.mkdir, exist_ok=True))  # no parents: do not recreate a removed run folder
    files: dict[str, list[str]] = {}
    checksums: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(_buckets(policy, copies=writes)):
        name = f"model-{number + 1:05d}.safetensors"
        files[name] = list(bucket)
        total += sum(tensor.nbytes for tensor in bucket.values())
        if writes:
            checksums |= {key: checksum(tensor) for key, tensor in bucket.items()}
            step(partial(_save_bucket, bucket, folder / name))
        tick()
    return _Written(files=files, size_bytes=total, checksums=checksums)


def _save_bucket(bucket: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({key: tensor.cpu() for key, tensor in bucket.items()}, unfinished, {"format": "pt"})
    except SafetensorError as error:  # its text contains the filesystem's error number
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(number := int(found[1]), os.strerror(number), str(path)) from error
    unfinished.replace(path)


def _buckets(policy: Policy, *, copies: bool) -> Iterator[dict[str, Tensor]]:
    """Yields weights by name; copies of them if `copies`, because parts of fused weights share memory."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in export_weights(policy.models, policy.rows, policy.groups):
        bucket[name] = tensor.contiguous().clone() if copies else tensor
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
