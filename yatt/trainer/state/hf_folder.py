"""Writes the policy as a Hugging Face folder for people. A rename makes each complete file visible."""

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from yatt.adapters.files.patience import LIMIT_S, with_retries
from yatt.trainer.forward.passes import Tick
from yatt.trainer.mcore.model import Policy
from yatt.weights.convert import export_weights, write_index

BUCKET_BYTES = 256 << 20


def export_hf(policy: Policy, folder: Path, tick: Tick, *, writes: bool) -> None:
    """Writes the policy's weights, in buckets, as a Hugging Face folder. Collective.

    Raises:
        OSError: the folder's filesystem fails permanently, or for longer than the limit.
    """
    step = partial(with_retries, limit_s=LIMIT_S, on_failure=lambda _: tick())
    if writes:
        step(partial(folder.mkdir, exist_ok=True))  # no parents: do not recreate a removed run folder
    file_of: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(_buckets(policy, copies=writes)):
        name = f"model-{number + 1:05d}.safetensors"
        file_of |= dict.fromkeys(bucket, name)
        total += sum(tensor.nbytes for tensor in bucket.values())
        if writes:
            step(partial(_save_bucket, bucket, folder / name))
        tick()
    if writes:
        with_retries(partial(write_index, folder, file_of, total))


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
