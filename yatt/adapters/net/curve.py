"""The run's keys, and sockets that use them: ipc inside a node, CURVE-encrypted TCP between nodes."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from yatt.adapters.files.files import write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.errors import WorkerFailed

Socket = zmq.Socket[bytes]
_KEY = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"]{40})"', re.MULTILINE)
_FORM = b'metadata\ncurve\n    public-key = "%s"\n    secret-key = "%s"\n'
"""The file format of zmq.auth."""

ENDS = ("server", "client")
_NOW = int(zmq.NOBLOCK)
SPARE_SOCKETS = 64
"""Sockets of a process in addition to its connections to peers."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The paths of one run's CURVE keys; secret files have mode 0600."""

    folder: Path

    def secret(self, end: str) -> Path:
        """Returns the path of the secret key of `end`, 'server' or 'client'."""
        return self.folder / f"{end}.key_secret"


def make_keys(folder: Path) -> CurveKeys:
    """Creates the run's two key pairs in `folder` (mode 0700) unless they exist. Replaces both if one is
    damaged or lost; call it while no attempt is running, which would continue with the old keys.

    Raises:
        OSError: the keys cannot be read or written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    keys = CurveKeys(folder)
    files = [keys.secret(end) for end in ENDS]
    is_whole = all(_is_pair(file) for file in files)
    for file in files:
        if not is_whole:
            public, secret = zmq.curve_keypair()
            write_atomically(file, _FORM % (public, secret), mode=0o600)
        file.chmod(0o600)
    return keys


def _is_pair(file: Path) -> bool:
    try:
        return _pair_in(file.read_bytes()) is not None
    except FileNotFoundError:
        return False


def roomy_context(num_peers: int) -> zmq.Context[Socket]:
    """Returns a context with enough sockets for that many peers; zmq's default limit is 1,023 sockets."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1023, num_peers + SPARE_SOCKETS))
    return context


class Gate:
    """Admits only holders of the run's keys to the TCP sockets of a context, in a separate thread.

    Create it before the sockets: CURVE alone proves only that a client knows the server's public key, and
    accepts any client key.
    """

    def __init__(self, context: zmq.Context[Socket], keys: CurveKeys) -> None:
        self._authenticator = ThreadAuthenticator(context)
        # Not with configure_curve: it silently admits no client if the folder cannot be read at the moment.
        self._authenticator.certs["*"] = {_pair(keys.secret("client"))[0]: True}
        self._authenticator.start()

    def close(self) -> None:
        """Ends the thread; call it before the context ends."""
        self._authenticator.stop()


def tcp_address(host: str, port: int | str) -> str:
    """Returns a zmq address; port `*` is any free port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listening_socket(context: zmq.Context[Socket], address: str, keys: CurveKeys | None = None) -> Socket:
    """Returns a bound server socket. TCP needs `keys`.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _never_block(socket)
    assert keys is not None or address.startswith("ipc://"), "TCP only with CURVE"
    if keys is not None:
        _pair(keys.secret("client"))  # load the keys now; client sockets are opened later, in an event loop
        public, secret = _pair(keys.secret("server"))
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = secret, public, True
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.bind(address)
    return socket


def calling_socket(
    context: zmq.Context[Socket], address: str, identity: str, keys: CurveKeys | None = None
) -> Socket:
    """Returns a client socket: of a peer, or of an asyncio worker. TCP needs `keys`."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        _never_block(socket)
        assert keys is not None or address.startswith("ipc://"), "TCP only with CURVE"
        if keys is not None:
            server_public, _ = _pair(keys.secret("server"))
            public, secret = _pair(keys.secret("client"))
            socket.curve_serverkey = server_public
            socket.curve_secretkey, socket.curve_publickey = secret, public
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.connect(address)
    except BaseException:
        socket.close(linger=0)  # the end of the context waits for it
        raise
    return socket


def receive_now(socket: Socket, *, is_server: bool) -> tuple[bytes, bytes, int]:
    """Returns the next message: its sender's identity (of a server socket), its data, and the number of parts
    too many. Takes a third of the time of `recv_multipart`, which asks for further parts after each one.

    Raises:
        zmq.Again: there is none.
    """
    identity = socket.recv(_NOW) if is_server else b""
    part = socket.recv(_NOW, copy=False)
    data, num_more = part.bytes, 0
    while part.more:
        part = socket.recv(_NOW, copy=False)
        num_more += 1
    return identity, data, num_more


@cache
def _pair(file: Path) -> tuple[bytes, bytes]:
    """Returns the public and the secret key of a secret file; cached, because a run's keys never change.

    Raises:
        OSError: the file cannot be read, also after retries.
        WorkerFailed: the file has no valid key pair.
    """
    if (pair := _pair_in(with_retries(file.read_bytes))) is None:
        raise WorkerFailed(f"{file} has no valid key pair; the next start of the run creates new keys.")
    return pair


def _pair_in(data: bytes) -> tuple[bytes, bytes] | None:
    found = dict(_KEY.findall(data))
    return (found[b"public"], found[b"secret"]) if found.keys() == {b"public", b"secret"} else None


def _never_block(socket: Socket) -> None:
    """Removes the limit on queued messages: a peer that hangs must not block messages to the others.

    The queue is bounded by the number of pending requests.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
