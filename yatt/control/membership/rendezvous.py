"""Rendezvous of the controllers of one attempt: files in the run folder, then TCP.

Each controller publishes its address in a file of its own under the attempt's number. Only the leader looks
for these files, by listing their folder, and publishes all addresses in one more file; the others wait for
it. So each file is opened once, and N nodes do not open N x N files. Every wait has a deadline, whose error
names the missing nodes.
"""

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import zmq

from yatt import clock
from yatt.adapters.files.files import make_within, read_or_none, record_in, sealed_record, write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.adapters.net.channel import Channel, Handler, ProgressOf
from yatt.adapters.net.curve import CurveKeys, Socket, calling_socket, listening_socket, tcp_address
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.membership.peers import Dial
from yatt.control.node import Node
from yatt.core.requests.peer_name import peer_name
from yatt.errors import DeadlineExceeded

POLL_S = 0.05
MOST_POLL_S = 0.5
"""Longest pause between looks; pauses grow with time, because many nodes read one shared folder."""

OPEN_ALL_EVERY = 8
"""Number of the leader's looks of which one does not rely on the listing."""

LEADER_PAUSE_S = 0.005
"""All nodes send the leader keep-alive messages. Answers to its orders come over other connections."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rendezvous that is complete.

    Attributes:
        channel: of this node's server socket.
        address: of this socket.
        dial: opens a connection to another node.
    """

    channel: Channel
    address: str
    dial: Dial


async def meet_peers(
    node: Node, context: zmq.Context[Socket], handler: Handler, progress: ProgressOf
) -> Rendezvous:
    """Opens this node's server socket for peers, and waits until every node has one.

    A newcomer publishes nothing; it waits for the addresses of the nodes that have met.

    Args:
        handler: handles messages of peers, after the rendezvous.

    Raises:
        DeadlineExceeded: nodes did not publish their address within `launch.start_timeout_s`.
        StaleAttempt: a node found a newer attempt.
    """
    keys = CurveKeys(node.paths.keys)
    socket = listening_socket(context, tcp_address(node.host, "*"), keys)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    channel = Channel(socket, attempt=node.attempt)
    own = node.paths.endpoint(node.attempt, node.index)

    def tell() -> None:
        make_within(node.paths.root, own.parent)
        write_atomically(own, sealed_record({"address": address, "node": node.index}, node.attempt))

    try:
        if not node.is_newcomer:
            await _patiently(tell)
        addresses = await gathered_addresses(node) if node.is_leader else await awaited_addresses(node)
    except BaseException:
        await channel.close()
        raise

    of_names = {peer_name(index): address for index, address in addresses.items()}

    def dial(name: str, address: str) -> Channel:
        return Channel(
            calling_socket(context, address or of_names[name], node.identity, keys),
            attempt=node.attempt,
            handler=handler,
            peer=name,
            progress=progress,
        )

    channel.serve(handler, progress, pause_s=LEADER_PAUSE_S if node.is_leader else 0.0)
    return Rendezvous(channel, address, dial)


async def gathered_addresses(node: Node) -> dict[int, str]:
    """Gathers every present node's address, and publishes all of them; the leader's part.

    Raises:
        DeadlineExceeded: nodes did not publish their address in time.
    """
    wait, found = _Wait(node), dict[int, str]()
    while True:
        found |= await _patiently(partial(_new_addresses, node, frozenset(found), wait.num_turns))
        if found.keys() >= node.present:
            break
        await wait.turn(found.keys())
    content = {"addresses": {str(index): found[index] for index in sorted(found)}}
    whole = sealed_record(content, node.attempt)
    await _patiently(partial(write_atomically, node.paths.all_endpoints(node.attempt), whole))
    return found


async def _patiently(work: Callable[[], T]) -> T:
    result: T = await call_in_thread(partial(with_retries, work))
    return result


def _new_addresses(node: Node, known: frozenset[int], num_turns: int) -> dict[int, str]:
    """Returns the addresses of nodes that were published since the last look.

    A shared filesystem may show an old listing for long, so now and then every missing file is opened.
    """
    by_name = num_turns % OPEN_ALL_EVERY == OPEN_ALL_EVERY - 1
    due = (node.present if by_name else published_nodes(node)) - known
    records = {
        i: record_in(read_or_none(node.paths.endpoint(node.attempt, i)), node.attempt) for i in sorted(due)
    }
    return {index: record["address"] for index, record in records.items() if record is not None}


async def awaited_addresses(node: Node) -> dict[int, str]:
    """Waits for the addresses that the leader publishes; the part of the other nodes.

    Raises:
        DeadlineExceeded: they were not published in time.
    """
    wait, path = _Wait(node), node.paths.all_endpoints(node.attempt)
    while (record := record_in(await _patiently(partial(read_or_none, path)), node.attempt)) is None:
        await wait.turn(())
    return {int(index): address for index, address in record["addresses"].items()}


def published_nodes(node: Node) -> set[int]:
    """Returns the nodes of this attempt with a published address; makes one listing of a folder."""
    folder = node.paths.all_endpoints(node.attempt).parent
    stems = (name.removesuffix(".json") for name in os.listdir(folder))
    return {int(stem) for stem in stems if stem.isdecimal()} & node.present


class _Wait:
    """Paces looks at the shared folder, with growing pauses, until `launch.start_timeout_s` is over."""

    def __init__(self, node: Node) -> None:
        self._node, self._began_s = node, clock.monotonic_s()
        self.num_turns = 0

    async def turn(self, found: Collection[int]) -> None:
        """Pauses until the next look; raises DeadlineExceeded if the time is over."""
        node, limit_s = self._node, self._node.config.launch.start_timeout_s
        self.num_turns += 1
        passed_s = clock.monotonic_s() - self._began_s
        if passed_s > limit_s:
            missing = node.present - (set(found) or published_nodes(node))
            listed = ", ".join(f"node{index}" for index in sorted(missing)) or "node0 (it has not listed all)"
            raise DeadlineExceeded(
                f"after {limit_s:g} s these controllers have not published themselves: {listed}. "
                f"Look at their logs in {node.paths.attempt(node.attempt) / 'logs'}."
            )
        await asyncio.sleep(min(MOST_POLL_S, max(POLL_S, passed_s / 10)))
