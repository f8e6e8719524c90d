"""A leader of 1,024 nodes whose slabs move once a second: what it costs, and how long a move takes."""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import cluster, many_nodes
from tests.bench.peers import JUDGE
from tests.bench.phase_switch import prepare, quantile
from tests.tiny_models import make_scripted_model
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.control.leader.batch_meter import BatchMeter
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.slabs import Slabs
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.phases import phases
from yatt.core.phases.phases import Phase
from yatt.records import cluster as c, message as m
from yatt.records.events.slabs import SlabOrdered

NUM_NODES, SLABS_PER_NODE, GENRM_SLABS = 1024, 8, 4092
FIRST, FIRST_S, PACED, BATCH_S, MOVES_PER_S = 3, 5.0, 2, 30.0, 1
GROUPS, SAMPLES = 512, 16
STRIDE = 977
"""Distance of the slabs that move one after the other, so that they are on all nodes."""

REASON = "bench"
MOST_SHARE, MOST_MOVE_S = 0.2, 0.2


class MovingActs(cluster.InstantActs):
    """Batches of `BATCH_S` seconds in which a slab moves each second; the leader is weighed from the end of
    the first one on, whose measurements the policy needs."""

    def __init__(self, node: cluster.SimulatedNode, clients: NodeClients, slabs: Slabs, inbox: Inbox) -> None:
        super().__init__(slabs, inbox)
        self._meter = BatchMeter(node.node, clients, slabs, node.events)
        self._order = sorted(slabs.table.moves.table)
        self._num_wanted = self._at = 0
        self.used_s = self.passed_s = 0.0

    async def run(self, act: phases.Act) -> phases.Acted:
        if act.phase is Phase.ROLLOUT and act.iteration >= FIRST:
            await self._sample(act.iteration)
        elif act.phase is Phase.TRAIN and act.iteration >= FIRST:
            await self._meter.batch_over(act.iteration, groups_of(act.iteration))
        elif act.phase is Phase.PUBLISH:
            await self.slabs.ready()
        return await super().run(act)

    async def _sample(self, iteration: int) -> None:
        if iteration == FIRST + 1:
            self.used_s, self.passed_s = -cluster.cpu_s(), -time.monotonic()
        self.slabs.begin_sampling()
        until_s = time.monotonic() + (BATCH_S if iteration > FIRST else FIRST_S)
        while time.monotonic() < until_s:
            await asyncio.sleep(1 / MOVES_PER_S)
            self._move()
        self.slabs.end_sampling()
        self._meter.sampled({}, BATCH_S)

    def _move(self) -> None:
        """Moves a slab of rollout to the GenRM, then one of the GenRM to rollout, so that the split stays."""
        former, role = ((ROLLOUT, JUDGE), (JUDGE, ROLLOUT))[self._num_wanted % 2]
        self._num_wanted += 1
        table = self.slabs.table.moves.table
        while table[slab := self._order[self._at]] != former:
            self._at = (self._at + STRIDE) % len(self._order)
        order = SlabOrdered(slab=slab.name, before=former, after=role, reason=REASON)
        self.slabs.orders.want(slab, order)

    @property
    def share(self) -> float:
        """Share of a core that the leader's process took."""
        return self.used_s / self.passed_s

    async def end(self, end: phases.End) -> None:
        self.used_s += cluster.cpu_s()
        self.passed_s += time.monotonic()


class StillActs(MovingActs):
    """The same without any move, and without the decisions of each second."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slabs._is_deciding = True  # as if somebody else decided

    def _move(self) -> None:
        pass


def groups_of(iteration: int) -> list[c.GroupFact]:
    """A batch's groups, as metadata."""
    return [
        c.GroupFact(
            number=number, scores={}, ages=(0,) * SAMPLES,
            samples=tuple(
                m.SampleFact(i, number, 0.0, 200, 100 + (number * 37 + i * 101 + iteration) % 1900)
                for i in range(SAMPLES)
            ),
        )
        for number in range(GROUPS)
    ]  # fmt: skip


def settings(root: Path) -> dict[str, Any]:
    """Engine nodes with one GPU per slab, and a GenRM."""
    judge = {
        "name": "judge", "model": make_scripted_model(root / "judge"), "engine": "scripted",
        "template": "{completion}", "max_num_seqs": 64,
        "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0, "t": 0.0}},
    }  # fmt: skip
    return {
        "launch.gpus_per_node": 1, "launch.engine_gpus_per_node": SLABS_PER_NODE,
        "placement.mode": "disaggregated", "placement.trainer_nodes": 1, "placement.split": "dynamic",
        "placement.genrm_gpu_sets": GENRM_SLABS, "genrms": json.dumps([judge]),
        "trainer.train_batch_size": GROUPS, "trainer.mini_batch_size": GROUPS, "rollout.n": SAMPLES,
    }  # fmt: skip


def measure(num_nodes: int, kind: type[MovingActs]) -> tuple[MovingActs, list[dict[str, Any]]]:
    """The acts of a whole run, and its events from the first measured batch on."""
    raise_soft_limit()
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        root = Path(folder)
        prepare(root, num_nodes, FIRST + PACED, **settings(root))
        with many_nodes.stand_ins(root, num_nodes):
            acts = asyncio.run(many_nodes.lead(root, kind))
        events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    own = [event for event in events if event["kind"] != "bench"]
    begin = next(
        index for index, event in enumerate(own)
        if event["kind"] == "phase.begin" and (event["phase"], event["iteration"]) == ("rollout", FIRST)
    )  # fmt: skip
    return acts, own[begin:]


def run() -> dict[str, Any]:
    still, _ = measure(NUM_NODES, StillActs)
    acts, events = measure(NUM_NODES, MovingActs)
    kinds = ("slab.moved", "slab.move", "split.choose", "split.failed")
    moved, ordered, chosen, failed = ([e for e in events if e["kind"] == kind] for kind in kinds)
    assert not failed and all(event["has_moved"] for event in moved)
    moves_s = [event["seconds"] for event in moved]
    num_own = sum(event["reason"] == REASON for event in ordered)
    p50_s, p95_s = quantile(moves_s, 0.5), quantile(moves_s, 0.95)
    took = ", ".join(f"{event['took_s']:.2f} s" for event in chosen)
    per_s = num_own / (PACED * BATCH_S + FIRST_S)
    num_slabs = (NUM_NODES - 1) * SLABS_PER_NODE
    return {
        "title": "A leader of 1,024 nodes whose slabs move",
        "how": f"The leader and the stand-ins of the table before, in disaggregated placement: {num_slabs:,} "
        "slabs of engines. Keep-alive messages carry the load of eight engines each. "
        f"{PACED} batches of {BATCH_S:g} s with {GROUPS * SAMPLES:,} completions are weighed: each second "
        "the leader looks at all loads for moves near the end of a batch, and orders one slab to the other "
        "role; at the end of a batch it asks all nodes for their load and chooses the next split. A stand-in "
        "answers an order at once: what is left of a move is the leader and the wire.",
        "head": ["what", "measured"],
        "rows": [
            ["leader with moves / without moves and their decisions, share of a core",
             f"{acts.share:.1%} / {still.share:.1%}"],
            ["moves, one at a time", f"{num_own}, {per_s:.2f} per second"],
            ["moves to a chosen split, all at once", f"{len(moved) - num_own}"],
            ["a move, p50 / p95 / slowest",
             " / ".join(f"{each * 1e3:.0f} ms" for each in (p50_s, p95_s, max(moves_s)))],
            ["to choose a split", took],
        ],
        "targets": [
            {"what": "leader, a move each second, all its threads", "target": "<= 20 % of a core",
             "value": f"{acts.share:.1%}", "met": acts.share <= MOST_SHARE},
            {"what": "moves per second", "target": ">= 0.8", "value": f"{per_s:.2f}", "met": per_s >= 0.8},
            {"what": "a move without its engines, p95", "target": "<= 200 ms",
             "value": f"{p95_s * 1e3:.0f} ms", "met": p95_s <= MOST_MOVE_S},
        ],
        "notes": [
            "Without moves: keep-alive messages with loads, barriers of an iteration of 30 s, the choice of "
            "a split. The stand-ins share the machine's two cores with the leader, so a move waits for them."
        ],
    }  # fmt: skip
