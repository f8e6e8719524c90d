"""A leader of 1,024 nodes: what it costs, and how long its phase switches take."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import cluster
from tests.bench.phase_switch import PHASES, prepare, quantile
from yatt.adapters.files.files import read_or_none
from yatt.adapters.files.writer import BackgroundWriter
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.adapters.net.channel import Answer
from yatt.control.leader.background import Background
from yatt.control.leader.coordinator import Coordinator
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.membership.liveness import Liveness
from yatt.control.peer_messages import PeerMessages
from yatt.core.phases import phases
from yatt.records import cluster as c, message as m

NUM_NODES = 1024
SWITCHES, WARM_UP, PACED = 100, 5, 2
QUICK = WARM_UP + SWITCHES // 2
ITERATION_S = 30.0
MOST_SHARE, MOST_SWITCH_S = 0.2, 0.2


class PacedActs(cluster.InstantActs):
    """The first iterations at once, to time many switches; then one in `ITERATION_S`, to weigh the leader."""

    def __init__(self, slabs: Slabs, inbox: Inbox) -> None:
        super().__init__(slabs, inbox)
        self.used_s = self.passed_s = 0.0

    async def run(self, act: phases.Act) -> phases.Acted:
        if act.phase is phases.Phase.ROLLOUT and act.iteration > QUICK:
            if act.iteration == QUICK + 1:
                self.used_s, self.passed_s = -cluster.cpu_s(), -time.monotonic()
            await asyncio.sleep(ITERATION_S)
        return await super().run(act)

    async def end(self, end: phases.End) -> None:
        self.used_s += cluster.cpu_s()
        self.passed_s += time.monotonic()


class LeadingNode(cluster.SimulatedNode):
    """Hears its peers as a session does: signs of life, events to a writer's thread."""

    messages: PeerMessages

    def _from_peer(self, sender: str, body: m.Message) -> Answer | Awaitable[Answer]:
        return self.messages.handle(sender, body)


MakeActs = Callable[[LeadingNode, NodeClients, Slabs, Inbox], cluster.InstantActs]


async def addresses_of(root: Path) -> list[str]:
    until_s = time.monotonic() + cluster.START_LIMIT_S
    while (found := read_or_none(root / "addresses")) is None:
        assert time.monotonic() < until_s, "the peers did not start"
        await asyncio.sleep(0.1)
    return json.loads(found)


async def lead(root: Path, make_acts: MakeActs) -> Any:
    """The leader's whole run, signs of life included; returns its acts."""

    def lost(index: int, _: int, silence_s: float) -> None:
        raise AssertionError(f"node{index} was silent for {silence_s:.1f} s")

    async with cluster.nodes(root, range(1), LeadingNode) as (leader,):
        writer, loads, background = BackgroundWriter(), NodeLoads(leader.parts.load), Background(Inbox())
        liveness = Liveness(leader.node, leader.peers, lost, leader.parts.load)
        leader.messages = PeerMessages(
            node=leader.node, peers=leader.peers, liveness=liveness, sender=leader.sender, loads=loads,
            to_file=partial(writer.append, leader.node.paths.events), inbox=background.inbox,
            controller=asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        for index, address in enumerate(await addresses_of(root), 1):
            leader.dial(index, address)
        ports = NodeClients(
            leader.node, leader.controller.handle, leader.peers, leader.gave_up, leader.parts.progress.whole
        )
        await ports.ask_all(c.StatusQuery(), cluster.START_LIMIT_S)
        beating = asyncio.ensure_future(liveness.run())
        slabs = Slabs(leader.node, ports, loads, leader.events, background)
        acts = make_acts(leader, ports, slabs, background.inbox)
        coordinator = Coordinator(leader.node, ports, acts, acts, leader.events, background)  # type: ignore[arg-type]
        end = await coordinator.run()
        assert end.exit_code == 0, end.reason
        beating.cancel()
        assert writer.close(10.0)
        return acts


@contextmanager
def stand_ins(root: Path, num_nodes: int) -> Iterator[None]:
    """All nodes but the leader, in a process of their own (tests/bench/peers.py)."""
    peers = subprocess.Popen([sys.executable, "-m", "tests.bench.peers", str(root), str(num_nodes)])
    try:
        yield
    finally:
        peers.terminate()
        peers.wait(timeout=60)


def measure(num_nodes: int) -> dict[str, Any]:
    """Seconds of each switch by phase, and the leader's CPU and wall seconds while iterations are paced."""
    raise_soft_limit()
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        root = Path(folder)
        prepare(root, num_nodes, iterations=QUICK + PACED)
        with stand_ins(root, num_nodes):
            acts = asyncio.run(lead(root, lambda _, __, *rest: PacedActs(*rest)))
        taken = defaultdict(list)
        for line in (root / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "phase.end" and event["iteration"] > WARM_UP:
                taken[event["phase"]].append(event["seconds"])
    return {"taken": dict(taken), "share": acts.used_s / acts.passed_s}


def run() -> dict[str, Any]:
    seen = measure(NUM_NODES)
    rows = [
        [what, f"{len(t)}", f"{quantile(t, 0.5) * 1e3:.0f} ms", f"{quantile(t, 0.99) * 1e3:.0f} ms"]
        for phase, what in PHASES.items()
        for t in [seen["taken"][phase]]
    ]
    p99_s = quantile(seen["taken"]["train"] + seen["taken"]["sync"], 0.99)
    return {
        "title": "A leader of 1,024 nodes",
        "how": "A real leader: coordinator, ports, liveness, its own controller, events to a file, CURVE "
        f"over TCP to {NUM_NODES - 1:,} peers. The peers are stand-ins in one process: each has its own "
        "server and client, sends a sign of life and a batch of events a second, and answers every order at "
        "once; they have no arbiter and no workers (for their own share see the table before; on a cluster "
        f"each has a node). {SWITCHES // 2} iterations at once time the switches; {PACED} of "
        f"{ITERATION_S:g} s weigh the leader.",
        "head": ["switch", "samples", "p50", "p99"],
        "rows": rows,
        "targets": [
            {"what": "leader, one iteration in 30 s, all its threads", "target": "<= 20 % of a core",
             "value": f"{seen['share']:.1%}", "met": seen["share"] <= MOST_SHARE},
            {"what": "switch of holder, p99", "target": "<= 200 ms", "value": f"{p99_s * 1e3:.0f} ms",
             "met": p99_s <= MOST_SWITCH_S},
        ],
        "notes": ["Signs of life and events go on while switches are timed."],
    }  # fmt: skip
