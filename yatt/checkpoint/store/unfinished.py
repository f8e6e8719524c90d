"""Multipart uploads that killed writers left over: invisible in a listing of the store, but paid for.

Only uploads of earlier attempts are aborted, as their names tell: ``global_step_N/ATTEMPT-NONCE/...``. No
clock is compared.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from yatt.checkpoint.store.driver import open_driver
from yatt.checkpoint.store.multipart import is_s3
from yatt.checkpoint.store.store import is_folder
from yatt.checkpoint.store.store_errors import errors_of_store
from yatt.core.attempts.checkpoint_names import saved_commit
from yatt.errors import CheckpointError, StoreUnreachable

_LOG = logging.getLogger(__name__)


def abort_uploads(url: str, options: Mapping[str, Any], *, before: int) -> int:
    """Aborts unfinished uploads of attempts before this one; returns their number.

    Does nothing for a folder, or if the driver has no list of uploads (only s3fs has one). A failure is only
    logged, since an account may lack this right.
    """
    if is_folder(url):
        return 0
    filesystem, root = open_driver(url, options)
    if not is_s3(filesystem):
        return 0
    num_aborted = 0
    try:
        for bucket, key, upload in _uploads(filesystem, root):
            name = key.removeprefix(f"{filesystem.split_path(root)[1]}/")
            commit = saved_commit(name.rpartition("/")[0])
            if commit is not None and commit.attempt < before:
                with contextlib.suppress(CheckpointError), errors_of_store(key):  # it may be gone meanwhile
                    filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
                num_aborted += 1
    except StoreUnreachable as error:
        _LOG.warning("unfinished uploads cannot be aborted: %s", error)
    return num_aborted


def _uploads(filesystem: Any, root: str) -> Iterator[tuple[str, str, str]]:
    """Yields bucket, key and upload id of every unfinished upload under the root."""
    bucket, prefix, _ = filesystem.split_path(root)
    place: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""}
    while True:
        with errors_of_store(root, for_writing=True):
            page = filesystem.call_s3("list_multipart_uploads", **place)
        for upload in page.get("Uploads", ()):
            yield bucket, upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        place |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
