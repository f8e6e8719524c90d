"""The newest weights on this node's memory filesystem: written by its trainer, or fetched from another node.

A fetch copies each file in pieces, several at once, into a folder under another name. Each file's checksum is
compared with the source's; then one rename gives the folder its name. So an engine finds a publication
complete or not at all, whichever process is killed during the copy. See docs/adr/0012.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from yatt import clock
from yatt.adapters.local_folder import is_ours
from yatt.adapters.thread_call import call_in_thread
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.engine.published import INDEX_NAME, read_publication
from yatt.errors import WorkerFailed
from yatt.obs.events import EventLog
from yatt.records import cluster as c, message as m

A = TypeVar("A", bound=m.Message)
PIECE_BYTES = 8 << 20
PIECES_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPublication:
    """Weights on this node's memory filesystem, and the trainer's log-probs of the probe (see
    m.Published)."""

    policy_version: int
    folder: Path
    probe: tuple[bytes, ...]
    expected: tuple[bytes, ...]
    rounding: float = 0.0


class Publications:
    """This node's copy of the newest publication; serves it to nodes that have no trainer."""

    def __init__(self, node: Node, peers: Peers, events: EventLog, progress: Progress) -> None:
        self._node, self._peers, self._events, self._progress = node, peers, events, progress
        self._fetching = asyncio.Lock()
        self._digests: dict[tuple[int, str], asyncio.Task[str]] = {}
        self.newest: LocalPublication | None = None

    def adopt(self, published: LocalPublication) -> None:
        """Makes this publication the newest."""
        self.newest = published
        for key in [key for key in self._digests if key[0] != published.policy_version]:
            self._digests.pop(key).cancel()

    async def drop_older(self) -> None:
        """Removes every other publication, in a thread, since freeing gigabytes takes a while."""
        newest = self.newest
        for old in self._node.weights_root.glob("v*"):
            if is_ours(old) and (newest is None or old != newest.folder):
                await call_in_thread(partial(shutil.rmtree, old, ignore_errors=True))

    # ---- giving ---------------------------------------------------------------------------------

    async def list_files(self, order: c.ListPublication) -> m.Message:
        """Returns the files of a publication of this node."""
        found = read_publication(str(self._node.weights_folder(order.policy_version)), order.policy_version)
        paths = (*found.files, found.files[0].with_name(INDEX_NAME)) if found.files else ()
        paths = paths or (self._node.weights_folder(order.policy_version) / INDEX_NAME,)
        return c.PublicationListed(files=tuple((path.name, path.stat().st_size) for path in paths))

    async def read(self, order: c.ReadPublication) -> m.Message:
        """Returns one piece of a file."""
        path = self._path(order.policy_version, order.name)
        return c.Piece(data=await call_in_thread(partial(_read, path, order.offset, order.num_bytes)))

    async def digest(self, order: c.DigestPublication) -> m.Message:
        """Returns a file's checksum. It is computed once, for all nodes that request it."""
        key = (order.policy_version, order.name)
        if key not in self._digests:
            path = self._path(*key)
            self._digests[key] = asyncio.ensure_future(call_in_thread(partial(_sha256, path)))
        return c.FileDigest(sha256=await asyncio.shield(self._digests[key]))

    def _path(self, policy_version: int, name: str) -> Path:
        if Path(name).name != name:
            raise WorkerFailed(f"'{name}' is no name of a published file")
        return self._node.weights_folder(policy_version) / name

    # ---- taking ---------------------------------------------------------------------------------

    async def fetch(self, order: c.FetchWeights) -> m.Message:
        """Copies a publication from its source. Can be repeated: one that is here is not fetched again.

        Raises:
            WorkerFailed: the source does not have it, is lost, or the checksums differ.
        """
        async with self._fetching:
            if self.newest is None or self.newest.policy_version != order.policy_version:
                began_s = clock.monotonic_s()
                try:
                    size_bytes = await self._fetch(order)
                except OSError as error:
                    raise WorkerFailed(
                        f"weights cannot be written to {self._node.weights_root}: {error.strerror}"
                    ) from error
                self._events.emit(
                    "weights.fetch", policy_version=order.policy_version, source=order.source,
                    size_bytes=size_bytes, seconds=round(clock.monotonic_s() - began_s, 6),
                )  # fmt: skip
        return m.Done()

    async def _fetch(self, order: c.FetchWeights) -> int:
        folder = self._node.weights_folder(order.policy_version)
        partly = self._node.weights_root / f".partly-v{order.policy_version}"
        await call_in_thread(partial(shutil.rmtree, partly, ignore_errors=True))
        partly.mkdir()
        listed = await self._ask(order.source, c.ListPublication(policy_version=order.policy_version))
        for name, size_bytes in listed.files:
            await self._fetch_file(order, partly / name, size_bytes)
        partly.rename(folder)
        self.adopt(
            LocalPublication(
                policy_version=order.policy_version, folder=folder, probe=order.probe,
                expected=order.probe_logprobs, rounding=order.rounding,
            )
        )  # fmt: skip
        return sum(size_bytes for _, size_bytes in listed.files)

    async def _fetch_file(self, order: c.FetchWeights, path: Path, size_bytes: int) -> None:
        asked = c.DigestPublication(policy_version=order.policy_version, name=path.name)
        digest = asyncio.ensure_future(self._ask(order.source, asked))
        got = hashlib.sha256()
        try:
            with path.open("xb") as file:
                async for data in self._pieces(order, path.name, size_bytes):
                    await call_in_thread(partial(_append, file, got, data))
            wanted = await digest
        finally:
            digest.cancel()
        if got.hexdigest() != wanted.sha256:
            raise WorkerFailed(
                f"{path.name} of policy version {order.policy_version} is not what node{order.source} has: "
                f"SHA-256 {got.hexdigest()[:12]}, there {wanted.sha256[:12]}"
            )

    async def _pieces(self, order: c.FetchWeights, name: str, size_bytes: int) -> AsyncIterator[bytes]:
        """Yields a file's bytes in order; `PIECES_AHEAD` pieces are requested at once."""
        offsets = deque(range(0, size_bytes, PIECE_BYTES))
        ahead: deque[asyncio.Task[c.Piece]] = deque()
        try:
            while offsets or ahead:
                while offsets and len(ahead) < PIECES_AHEAD:
                    asked = c.ReadPublication(
                        policy_version=order.policy_version, name=name, offset=offsets.popleft(),
                        num_bytes=PIECE_BYTES,
                    )  # fmt: skip
                    ahead.append(asyncio.create_task(self._ask(order.source, asked)))
                yield (await ahead.popleft()).data
        finally:
            for task in ahead:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*ahead, return_exceptions=True)

    async def _ask(self, source: int, body: m.Order[A]) -> A:
        answer = await self._peers.request(source, body, self._node.config.launch.phase_timeout_s)
        given = m.unless_failed(answer, f"node{source}")
        self._progress.done()
        return given


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), num_bytes, offset)
    except OSError as error:
        raise WorkerFailed(f"published file {path} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WorkerFailed(f"published file {path} cannot be read: {error.strerror}") from error


def _append(file: BinaryIO, digest: "hashlib._Hash", data: bytes) -> None:
    file.write(data)
    digest.update(data)
