"""A thousand stand-ins for controllers in one process, for a real leader: see tests/bench/many_nodes.py.

Started as ``python -m tests.bench.peers RUN_FOLDER NUM_NODES``. Each has its own server and client of the
leader, both CURVE over TCP. Once a second it sends a sign of life and a batch of events, and it answers
every order at once; it decides nothing and has no workers. Where slabs move, its sign of life has the load of
its slabs' engines, which work as if they had.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import zmq

from tests.bench.cluster import ATTEMPT, address_of
from yatt.adapters.files.files import write_atomically
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.adapters.net.curve import CurveKeys, Socket, calling_socket, listening_socket, roomy_context
from yatt.config.load import load_resolved
from yatt.control.membership.liveness import PERIOD_S
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame
from yatt.records.load import NodeLoad, SlabLoad, StepSums, SwitchCost
from yatt.records.moves import LoadAnswer, LoadQuery, MoveSlab, SlabMoved

JUDGE = "genrm:judge"
STEPS, MOST_RUNNING, STEP_S, SEQUENCE_S = 40, 16, 0.02, 0.0005
"""Steps of an engine in a second, and their speed."""

COSTS = {ROLLOUT: SwitchCost(2.0, 5.0, 60.0), JUDGE: SwitchCost(2.0, 5.0, 60.0)}
EVENTS_A_BATCH = 2
TOLD = bytes(c.Alive.__name__, "ascii")
"""What wants no answer here has this in its body; all else is an order."""


class Peer:
    """One node's sockets."""

    def __init__(
        self, index: int, context: zmq.Context[Socket], keys: CurveKeys, leader: str, slabs: "PeerSlabs"
    ) -> None:
        self._slabs = slabs
        self._seq = itertools.count(1)
        self._answers = itertools.count(1)
        self._server = listening_socket(context, "tcp://127.0.0.1:*", keys)
        self.address = self._server.getsockopt_string(zmq.LAST_ENDPOINT)
        self._line = calling_socket(context, leader, f"node{index}", keys)
        line = {"kind": "bench", "node": index, "role": "controller", "attempt": ATTEMPT, "text": "x" * 100}
        self._lines = b"\n".join([json.dumps(line).encode()] * EVENTS_A_BATCH)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._server.fileno(), self._drain)
        loop.call_later(index % 997 / 997 * PERIOD_S, self._beat)

    def _beat(self) -> None:
        self._slabs.work()
        for body in (c.Alive(load=self._slabs.load()), c.EventLines(lines=self._lines)):
            self._line.send(encode_frame(ATTEMPT, next(self._seq), 0, body))
        asyncio.get_running_loop().call_later(PERIOD_S, self._beat)

    def _drain(self) -> None:
        """Until nothing is there: sending may take note of what has come."""
        while int(self._server.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, data = self._server.recv_multipart()
            frame = decode_frame(data)
            if frame.reply_to == 0 and TOLD not in bytes(frame.body):
                answer = encode_frame(ATTEMPT, next(self._answers), frame.seq, self._slabs.answer(frame))
                self._server.send_multipart([sender, answer])


class PeerSlabs:
    """The slabs of one node that change their role; none if the split is fixed."""

    def __init__(self, index: int, roles: dict[int, str]) -> None:
        self._index, self._roles = index, roles
        self._built = set(roles.items())
        self._sums = dict.fromkeys((ROLLOUT, JUDGE), StepSums())
        self._beats = index

    def work(self) -> None:
        """Each engine makes `STEPS` steps; how many sequences run differs from second to second."""
        self._beats += 1
        running = 1 + self._beats % MOST_RUNNING
        for role in self._roles.values():
            seconds = STEPS * (STEP_S + SEQUENCE_S * running)
            new = StepSums(
                STEPS, STEPS * running, STEPS * running**2, seconds, running * seconds
            )  # fmt: skip
            self._sums[role] += new

    def load(self) -> NodeLoad:
        """Returns what its engines do."""
        if not self._roles:
            return NodeLoad()
        return NodeLoad(
            slabs=tuple(SlabLoad(slab, role, 4) for slab, role in self._roles.items()), steps=self._sums,
            costs=COSTS, built=tuple(sorted(self._built)),
        )  # fmt: skip

    def answer(self, frame: m.Frame) -> m.Message:
        """Returns the answer to an order."""
        match decode_body(frame):
            case c.StatusQuery():
                return c.StatusAnswer(text=b"{}")
            case MoveSlab(slab=slab, role=role):
                self._roles[slab] = role
                self._built.add((slab, role))
                return SlabMoved(has_moved=True)
            case LoadQuery():
                return LoadAnswer(node=self._index, life=1, load=self.load())
        return m.Done()


def slabs_of(root: Path) -> dict[int, dict[int, str]]:
    """Maps each node to the first role of each of its slabs that may change it."""
    placement = placement_of(load_resolved(RunPaths(root).config))
    found: dict[int, dict[int, str]] = {}
    for slab in placement.shared:
        found.setdefault(slab.node, {})[slab.index] = placement.sampling[slab]
    return found


async def stand_in(root: Path, num_nodes: int) -> None:
    """Nodes 1 to `num_nodes` - 1, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    raise_soft_limit()
    leader, keys = await address_of(root, 0), CurveKeys(RunPaths(root).keys)
    context = roomy_context(2 * num_nodes)
    roles = slabs_of(root)
    peers = [
        Peer(index, context, keys, leader, PeerSlabs(index, roles.get(index, {})))
        for index in range(1, num_nodes)
    ]
    write_atomically(root / "addresses", json.dumps([peer.address for peer in peers]).encode())
    while not stop.is_set() and os.getppid() != 1:
        await asyncio.wait([asyncio.ensure_future(stop.wait())], timeout=1.0)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(stand_in(Path(sys.argv[1]), int(sys.argv[2])))
