"""The run's keys, and sockets made with them: ipc inside a node, CURVE-encrypted TCP between nodes."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from yatt.adapters.files import publish
from yatt.adapters.patience import patiently
from yatt.errors import WorkerFailed

Socket = zmq.Socket[bytes]
_KEY = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"]{40})"', re.MULTILINE)
_FORM = b'metadata\ncurve\n    public-key = "%s"\n    secret-key = "%s"\n'
"""As zmq.auth writes and reads it."""

ENDS = ("server", "client")
SPARE_SOCKETS = 64
"""Sockets of a process beside its lines to peers."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Where one run's CURVE keys are; secret files have mode 0600."""

    folder: Path

    def secret(self, end: str) -> Path:
        """Path of the secret key of `end`, 'server' or 'client'."""
        return self.folder / f"{end}.key_secret"


def make_keys(folder: Path) -> CurveKeys:
    """Create the run's two key pairs in `folder` (mode 0700) unless both are there. If one is damaged or lost
    both are made anew; call it while no attempt is at work, which would go on with the old ones.

    Raises:
        OSError: they cannot be read or written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    keys = CurveKeys(folder)
    files = [keys.secret(end) for end in ENDS]
    is_whole = all(_is_pair(file) for file in files)
    for file in files:
        if not is_whole:
            public, secret = zmq.curve_keypair()
            publish(file, _FORM % (public, secret), mode=0o600)
        file.chmod(0o600)
    return keys


def _is_pair(file: Path) -> bool:
    try:
        return _pair_in(file.read_bytes()) is not None
    except FileNotFoundError:
        return False


def roomy_context(num_peers: int) -> zmq.Context[Socket]:
    """A context with room for a line to each of so many peers; zmq's own limit is 1,023 sockets."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1023, num_peers + SPARE_SOCKETS))
    return context


class Gate:
    """Lets only holders of the run's keys through to the TCP sockets of a context, by a thread of its own.

    Make it before the sockets: CURVE alone proves that a caller knows the server's public key, and admits any
    key of the caller's.
    """

    def __init__(self, context: zmq.Context[Socket], keys: CurveKeys) -> None:
        self._authenticator = ThreadAuthenticator(context)
        # Not by configure_curve: it admits nobody, and says nothing, if the folder cannot be read just now.
        self._authenticator.certs["*"] = {_pair(keys.secret("client"))[0]: True}
        self._authenticator.start()

    def close(self) -> None:
        """End the thread; before the context ends."""
        self._authenticator.stop()


def tcp(host: str, port: int | str) -> str:
    """A place as zmq writes it; `*` is any free port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listening_socket(context: zmq.Context[Socket], address: str, keys: CurveKeys | None = None) -> Socket:
    """A hub's socket, bound. TCP needs `keys`.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _never_block(socket)
    assert keys is not None or address.startswith("ipc://"), "TCP only with CURVE"
    if keys is not None:
        _pair(keys.secret("client"))  # for the lines that are opened later, in an event loop
        public, secret = _pair(keys.secret("server"))
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = secret, public, True
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.bind(address)
    return socket


def calling_socket(
    context: zmq.Context[Socket], address: str, identity: str, keys: CurveKeys | None = None
) -> Socket:
    """A line to a hub: a peer's, or an asyncio worker's own controller. TCP needs `keys`."""
    socket = context.socket(zmq.DEALER)
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
    return socket


@cache
def _pair(file: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a secret file; read once, for a run's keys never change.

    Raises:
        OSError: it cannot be read, for longer than a passing error lasts.
        WorkerFailed: it holds no pair of keys.
    """
    if (pair := _pair_in(patiently(file.read_bytes))) is None:
        raise WorkerFailed(f"{file} holds no pair of keys; the next start of the run makes new ones.")
    return pair


def _pair_in(data: bytes) -> tuple[bytes, bytes] | None:
    found = dict(_KEY.findall(data))
    return (found[b"public"], found[b"secret"]) if found.keys() == {b"public", b"secret"} else None


def _never_block(socket: Socket) -> None:
    """No limit on queued messages: one peer that stands still must not stop what is said to the others.

    What can be queued is bounded by the requests under way.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
