"""The yardstick of a phase switch: the messages it cannot do without, over bare libzmq.

Node 0 sends a frame to every other node and waits for all answers, twice (PREPARE and ENTER), over CURVE and
TCP, with no code of yatt's: what the machine and the library take for that. The other nodes share processes
as in the benchmark, each started as ``python -m tests.bench.bare_rounds FOLDER FIRST_NODE LAST_NODE``.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

FRAME = b"x" * 200
"""As long as an order of a switch or its answer, more or less."""

WARM_UP = 10
LIMIT_MS = 60_000


def pair_seconds(root: Path, shares: Sequence[range], pairs: int) -> list[float]:
    """Seconds of each pair of rounds.

    Args:
        root: a folder for the leader's address.
        shares: the nodes of each process.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leader:
        public, secret = zmq.curve_keypair()
        leader.curve_server, leader.curve_publickey, leader.curve_secretkey = True, public, secret
        leader.linger, leader.rcvtimeo = 0, LIMIT_MS
        leader.bind("tcp://127.0.0.1:*")
        address = leader.getsockopt_string(zmq.LAST_ENDPOINT)
        (root / "leader").write_text(f"{address} {public.decode()}")
        started = [
            subprocess.Popen([sys.executable, "-m", __name__, str(root), str(share[0]), str(share[-1])])
            for share in shares
        ]
        try:
            nodes = [leader.recv_multipart()[0] for share in shares for _ in share]
            taken = [_pair(leader, nodes) for _ in range(WARM_UP + pairs)]
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(timeout=60)
    return taken[WARM_UP:]


def _pair(leader: zmq.Socket[bytes], nodes: Sequence[bytes]) -> float:
    began_s = time.perf_counter()
    for _ in range(2):
        for node in nodes:
            leader.send_multipart([node, FRAME])
        for _ in nodes:
            leader.recv_multipart()
    return time.perf_counter() - began_s


def answer(root: Path, nodes: range) -> None:
    """Says who it is in the name of each node, and sends back what comes, until SIGTERM."""
    address, public = (root / "leader").read_text().split()
    context, poller = zmq.Context(), zmq.Poller()
    for node in nodes:
        line = context.socket(zmq.DEALER)
        line.curve_serverkey = public.encode()
        line.curve_publickey, line.curve_secretkey = zmq.curve_keypair()
        line.identity = f"node{node}".encode()
        line.connect(address)
        line.send(FRAME)
        poller.register(line, zmq.POLLIN)
    while True:
        for line, _ in poller.poll():
            line.send(line.recv())


if __name__ == "__main__":
    answer(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]) + 1))
