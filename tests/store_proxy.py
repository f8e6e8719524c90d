"""A real HTTP proxy between a store and its S3 server; it disturbs requests as networks and services do."""

import contextlib
import http.client
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

BLOCK = 64 << 10


@dataclass
class Fault:
    """Disturbs the next `times` requests of an operation.

    Attributes:
        what: `answer` refuses with `status` and `code`; `hang` accepts the request and never answers;
            `stall` does not even read its body; `reset` cuts the connection in the middle of the body,
            `cut` in the middle of the reply; `drop` passes the request on and cuts the connection before
            the reply.
        operation: regular expression of operations, see `operation_of`.
        skip: requests that pass before.
    """

    what: str
    operation: str = ".*"
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    skip: int = 0

    def strikes(self, operation: str) -> bool:
        if not self.times or not re.fullmatch(self.operation, operation):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


def operation_of(method: str, target: str, headers: Any) -> str:
    """Returns S3's name of the request; a conditional PutObject is Create."""
    query = urlsplit(target).query
    match method:
        case "POST":
            return "CompleteMultipartUpload" if "uploadId=" in query else "CreateMultipartUpload"
        case "PUT":
            name = "Create" if headers.get("If-None-Match") else "PutObject"
            return "UploadPart" if "partNumber=" in query else name
        case "DELETE":
            return "AbortMultipartUpload" if "uploadId=" in query else "DeleteObject"
        case "GET":
            return "List" if "list-type" in query or "uploads" in query else "GetObject"
    return "HeadObject"


@dataclass
class StoreProxy:
    """A port in front of an S3 server; a context manager.

    Attributes:
        bytes_per_s: limit of each connection; 0: none.
        drops_conditions: removes If-None-Match, as a server that does not know it.
        seen: operations, and what was done to each ("passed", or a fault's `what`).
        at_point: called before each request that is passed on, and before its reply; if it returns True, the
            connection is cut.
        read: targets of GetObject.
    """

    server: str
    faults: list[Fault] = field(default_factory=list)
    bytes_per_s: float = 0.0
    drops_conditions: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    port: int = 0
    at_point: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.upstream = urlsplit(self.server).netloc
        self.lock, self.closing = threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._front: _Front | None = None

    def __enter__(self) -> "StoreProxy":
        self.back()
        return self

    def __exit__(self, *_: object) -> None:
        self.away()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def back(self) -> None:
        """Listens, on the same port each time."""
        self.closing.clear()
        self._front = _Front(("127.0.0.1", self.port), self)
        self.port = self._front.server_port
        threading.Thread(target=self._front.serve_forever, args=(0.02,), daemon=True).start()

    def away(self) -> None:
        """Stops listening and cuts what is open."""
        front, self._front = self._front, None
        if front is None:
            return
        self.closing.set()
        front.shutdown()
        front.server_close()
        with self.lock:
            for client in self._open:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def connected(self, client: socket.socket) -> Iterator[None]:
        with self.lock:
            self._open.add(client)
        try:
            yield
        finally:
            with self.lock:
                self._open.discard(client)

    def fault_of(self, operation: str) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self.faults if fault.strikes(operation)), None)
            self.seen.append((operation, fault.what if fault else "passed"))
            return fault

    def count(self, operation: str, what: str = ".*") -> int:
        """Number of requests of these operations to which this was done."""
        with self.lock:
            seen = list(self.seen)
        return sum(bool(re.fullmatch(operation, o) and re.fullmatch(what, w)) for o, w in seen)


class _Front(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], proxy: StoreProxy) -> None:
        self.proxy = proxy
        super().__init__(address, _Connection)

    def server_bind(self) -> None:
        """Small buffers: what is not read is not taken by the kernel either."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BLOCK)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        """A cut connection is what a fault is."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Front

    def handle(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.proxy.connected(self.connection), contextlib.suppress(OSError):
            super().handle()

    def _any(self) -> None:
        proxy = self.server.proxy
        operation = operation_of(self.command, self.path, self.headers)
        fault = proxy.fault_of(operation)
        if operation == "GetObject":
            proxy.read.append(self.path)
        length = int(self.headers.get("Content-Length", 0))
        if fault is not None and fault.what in ("stall", "reset"):
            if fault.what == "reset":
                self._take(length // 2)
                self._cut()
            else:
                proxy.closing.wait()
            self.close_connection = True
            return
        body = self._take(length)
        if fault is not None and fault.what == "hang":
            proxy.closing.wait()
            self.close_connection = True
        elif fault is not None and fault.what == "answer":
            self._refuse(fault)
        else:
            self._pass_on(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _refuse(self, fault: Fault) -> None:
        told = f"<Error><Code>{fault.code}</Code><Message>told by the proxy</Message></Error>".encode()
        self._reply(fault.status, [("Content-Type", "application/xml")], told)

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        if self.server.proxy.at_point():
            self._cut()
            return
        upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=300)
        try:
            removed = {"expect", "connection"} | (
                {"if-none-match"} if self.server.proxy.drops_conditions else set()
            )
            headers = {k: v for k, v in self.headers.items() if k.lower() not in removed}
            upstream.request(self.command, self.path, body or None, headers)
            reply = upstream.getresponse()
            content = reply.read()
        finally:
            upstream.close()
        if self.server.proxy.at_point() or (fault is not None and fault.what == "drop"):
            self._cut()
            return
        kept = ("transfer-encoding", "connection", "content-length", "server", "date")
        more = [(k, v) for k, v in reply.getheaders() if k.lower() not in kept]
        if self.command == "HEAD" and (size := reply.getheader("Content-Length")):
            more.append(("Content-Length", size))
        self._reply(reply.status, more, content, cut=fault is not None and fault.what == "cut")

    def _reply(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(content) // 2 if cut else len(content), BLOCK):
            self.wfile.write(content[at : at + BLOCK])
            self._slow_down(BLOCK)
        if cut:
            self._cut()

    def _take(self, length: int) -> bytes:
        taken = bytearray()
        while len(taken) < length and (data := self.rfile.read(min(BLOCK, length - len(taken)))):
            taken += data
            self._slow_down(len(data))
        return bytes(taken)

    def _slow_down(self, num_bytes: int) -> None:
        if limit := self.server.proxy.bytes_per_s:
            time.sleep(num_bytes / limit)

    def _cut(self) -> None:
        """Resets the connection: the client sees ECONNRESET, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        os.close(self.connection.detach())  # `close` would wait for `rfile`

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def after(seconds: float, work: Callable[[], object]) -> threading.Timer:
    """Does something later; join it."""
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer
