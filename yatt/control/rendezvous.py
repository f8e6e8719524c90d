"""How the controllers of one attempt find each other: one file a node in the run folder, then TCP.

Each publishes its address under the attempt's epoch and waits for the others', with a deadline that
names who is missing.
"""

import asyncio

import zmq

from yatt import clock
from yatt.adapters.curve import CurveKeys, Socket, calling_socket, listening_socket
from yatt.adapters.files import make_within, publish, read_or_none, sealed, unsealed
from yatt.adapters.wire import Channel, Handler, Progress
from yatt.control.node import Node
from yatt.errors import DeadlineExceeded

POLL_S = 0.05


async def meet(
    node: Node, context: zmq.Context[Socket], handler: Handler, progress: Progress
) -> tuple[Channel, dict[int, Channel]]:
    """Open this node's hub for peers and a line to every other node.

    Returns:
        The hub, and the lines by node index.

    Raises:
        DeadlineExceeded: nodes did not publish themselves in `launch.start_timeout_s`.
        StaleEpoch: a node found a newer attempt.
    """
    keys = CurveKeys(node.paths.keys)
    socket = listening_socket(context, f"tcp://{node.host}:*", keys)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    hub = Channel(socket, epoch=node.epoch, handler=handler, progress=progress)
    own = node.paths.roster(node.epoch, node.index)
    make_within(node.paths.root, own.parent)
    publish(own, sealed({"address": address, "node": node.index}, node.epoch))
    addresses = await _addresses(node)
    peers = {
        index: Channel(
            calling_socket(context, peer_address, node.name, keys),
            epoch=node.epoch, handler=handler, peer=f"node{index}", progress=progress,
        )
        for index, peer_address in addresses.items()
        if index != node.index
    }  # fmt: skip
    return hub, peers


async def _addresses(node: Node) -> dict[int, str]:
    limit_s = node.config.launch.start_timeout_s
    began_s = clock.monotonic_s()
    found: dict[int, str] = {}
    while found.keys() < node.present:
        for index in node.present - found.keys():
            record = unsealed(read_or_none(node.paths.roster(node.epoch, index)), node.epoch)
            if record is not None:
                found[index] = record["address"]
        if clock.monotonic_s() - began_s > limit_s:
            missing = ", ".join(f"node{i}" for i in sorted(node.present - found.keys()))
            raise DeadlineExceeded(
                f"after {limit_s:g} s these controllers have not published themselves: {missing}. "
                f"Look at their logs in {node.paths.attempt(node.epoch) / 'logs'}."
            )
        await asyncio.sleep(POLL_S)
    return found
