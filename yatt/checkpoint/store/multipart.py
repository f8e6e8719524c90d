"""Writes one object of S3 from a stream: a multipart upload with several parts in flight.

s3fs's own file sends one part after the other, so a file is as fast as one connection, and a store limits
each connection. Nothing is visible before the upload is completed; content below one part is a single PUT.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from yatt.adapters.files.files import Buffer
from yatt.checkpoint.store.store_errors import errors_of_store

PARTS_IN_FLIGHT = 2
"""Parts of one file that are sent at once. A file that is written needs memory for one more."""


def is_s3(filesystem: Any) -> bool:
    """Whether the driver is s3fs, the only one that these functions are for."""
    return hasattr(filesystem, "call_s3")


def write_object(filesystem: Any, path: str, chunks: Iterable[Buffer], part_bytes: int) -> None:
    """Writes the chunks as one object. If that fails, the upload is aborted, if the store answers, before the
    error is raised. Errors of `chunks` are raised unchanged.

    Args:
        filesystem: of s3fs.
        part_bytes: size of every part but the last, at least 5 MiB.

    Raises:
        StoreUnreachable: the store does not take a part.
    """
    upload = _Upload(filesystem, path)
    try:
        part = bytearray()
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while len(rest):
                taken = part_bytes - len(part)
                part += rest[:taken]
                rest = rest[taken:]
                if len(part) == part_bytes:
                    upload.send(part)
                    part = bytearray()
        upload.finish(part)
    except BaseException:
        upload.abort()
        raise


class _Upload:
    """One upload; its parts are numbered from 1 in the order of `send`."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path = filesystem, path
        bucket, key, _ = filesystem.split_path(path)
        self._place = {"Bucket": bucket, "Key": key}
        self._upload: dict[str, str] = {}
        self._flying: deque[Future[dict[str, Any]]] = deque()
        self._sent: list[dict[str, Any]] = []

    def send(self, part: bytearray) -> None:
        """Begins to send a part; waits until fewer than the most are in flight."""
        if not self._upload:
            begun = self._call("create_multipart_upload", **self._place)
            self._upload = {**self._place, "UploadId": begun["UploadId"]}
        while len(self._flying) >= PARTS_IN_FLIGHT:
            self._landed()
        number = len(self._sent) + len(self._flying) + 1
        sending = self._fs._call_s3("upload_part", PartNumber=number, Body=part, **self._upload)
        self._flying.append(asyncio.run_coroutine_threadsafe(sending, self._fs.loop))

    def finish(self, last: bytearray) -> None:
        """Makes the object visible."""
        if not self._upload:
            self._call("put_object", Body=last, **self._place)
            return
        if last:
            self.send(last)
        while self._flying:
            self._landed()
        self._call("complete_multipart_upload", MultipartUpload={"Parts": self._sent}, **self._upload)

    def abort(self) -> None:
        """Ends the parts in flight, then the upload: a part that arrives later would be kept and paid for."""
        for sending in self._flying:
            sending.cancel()
        for sending in self._flying:
            with contextlib.suppress(BaseException):
                sending.result()
        if self._upload:
            with contextlib.suppress(Exception):  # the next attempt aborts it (`unfinished`)
                self._fs.call_s3("abort_multipart_upload", **self._upload)

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        with errors_of_store(self._path, for_writing=True):
            answer: dict[str, Any] = self._fs.call_s3(operation, **arguments)
        return answer

    def _landed(self) -> None:
        """Waits for the oldest part in flight."""
        with errors_of_store(self._path, for_writing=True):
            answer = self._flying[0].result()
        self._flying.popleft()
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        self._sent.append({"PartNumber": len(self._sent) + 1, "ETag": answer["ETag"], **checksums})
