"""The leader's code about slabs holds no more memory after thousands of iterations than after one thousand.

`make soak` makes ten thousand of them (`YATT_SLAB_ITERATIONS`).
"""

import asyncio
import gc
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.core.test_placement import disaggregated
from yatt.config.schema import PlacementSection, RunConfig
from yatt.control.leader.background import Background
from yatt.control.leader.batch_meter import BatchMeter
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs import slabs as slabs_module
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core.gpus.moves import MoveWanted
from yatt.core.gpus.placement import ROLLOUT, Slab, placement_of
from yatt.core.phases.phases import Phase
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.load import NodeLoad, SlabLoad, StepSums, SwitchCost
from yatt.records.moves import LoadAnswer, LoadQuery, MoveSlab, SlabMoved

ITERATIONS = int(os.environ.get("YATT_SLAB_ITERATIONS", "3000"))
WARM_UP, NODES, GPUS, GROUPS = 1000, 4, 2, 4
JUDGE = "genrm:g0"
MOST_BLOCKS = 1000
"""Blocks of the allocator that may come by chance (about 200 do). If one object per iteration were kept,
there would be `ITERATIONS` more."""


class Machines(Peers):
    """Models of the engine nodes: they answer orders at once, and their engines work as fast as before."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        placement = placement_of(config)
        self.roles = {slab: placement.sampling[slab] for slab in placement.shared}
        self.built = {(slab, role) for slab, role in self.roles.items()}
        self.steps: dict[int, dict[str, StepSums]] = {index: {} for index in range(NODES)}
        self.numbers = random.Random(0)
        self.num_moves = 0

    async def tell(self, index: int, body: m.Message, life: int = 0) -> None:
        raise AssertionError(body)

    async def request(self, index: int, body: Any, deadline_s: float, moved: Any = None) -> Any:
        if isinstance(body, LoadQuery):
            return LoadAnswer(node=index, life=1, load=self.load(index))
        assert isinstance(body, MoveSlab)
        slab = next(each for each in self.roles if (each.node, each.index) == (index, body.slab))
        self.roles[slab] = body.role
        self.built.add((slab, body.role))
        self.num_moves += 1
        return SlabMoved(has_moved=True, workers_s=0.01)

    def work(self) -> None:
        """Each engine makes some steps."""
        for slab, role in self.roles.items():
            sums = self.steps[slab.node].get(role, StepSums())
            running = self.numbers.randint(1, 8)
            for _ in range(4):
                sums = sums.plus(running, 0.01 + 0.001 * running + self.numbers.random() * 0.002)
            self.steps[slab.node][role] = sums

    def load(self, index: int) -> NodeLoad:
        mine = {slab: role for slab, role in self.roles.items() if slab.node == index}
        return NodeLoad(
            slabs=tuple(SlabLoad(slab.index, role, 1) for slab, role in mine.items()),
            steps=dict(self.steps[index]), costs={JUDGE: SwitchCost(0.01, 0.02, 1.0)},
            built=tuple((slab.index, role) for slab, role in self.built if slab.node == index),
            num_asked={JUDGE: self.numbers.randint(0, 50)},
        )  # fmt: skip


class Leader:
    """The leader's objects around `Slabs`, as a session makes them."""

    def __init__(self) -> None:
        wanted = disaggregated(NODES, 1, 1, engine_gpus=GPUS, genrms=1, slabs=2)
        self.config = _dynamic(wanted)
        node = Node(
            config=self.config, paths=RunPaths(Path("/r")), placement=placement_of(self.config),
            attempt=1, index=0,
            host="", device="cpu",
        )  # fmt: skip
        self.machines, self.kinds = Machines(self.config), Counter[str]()
        events = EventLog(attempt=1, node=0, role="controller", sink=self._seen)

        async def own(_: str, body: m.Message) -> m.Message:
            return LoadAnswer(node=0, life=1, load=NodeLoad()) if isinstance(body, LoadQuery) else m.Done()

        self.inbox = Inbox()
        background = Background(self.inbox)
        clients = NodeClients(node, own, self.machines, self._gave_up, lambda: 0)
        self.slabs = Slabs(node, clients, NodeLoads(NodeLoad), events, background)
        self.meter = BatchMeter(node, clients, self.slabs, events)

    def _seen(self, line: str) -> None:
        self.kinds[line.split('"kind":"')[1].split('"')[0]] += 1

    def _gave_up(self, index: int, life: int, why: str) -> None:
        raise AssertionError(why)

    async def iteration(self, number: int) -> None:
        """One batch: keep-alive messages, decisions near its end, two moves, a node that is lost now and
        then; then it is measured and the next split is chosen."""
        self.slabs.orders.seq = number
        self.slabs.begin_sampling()
        self.machines.work()
        for index in range(1, NODES):
            self.slabs.measured.loads.put(index, 1, self.machines.load(index))
        if number % 50 == 10:
            self.slabs.gone(3)
        if number % 50 == 20:
            self.slabs.back(3)
        if self.slabs.measured.is_known:
            self.slabs._decide()
        for slab in self._pair(number):
            role = JUDGE if self.slabs.table.moves.table[slab] == ROLLOUT else ROLLOUT
            self.slabs.orders.step(MoveWanted(slab, role))
        await asyncio.sleep(0)
        self.slabs.table.holders(Phase.ROLLOUT, 0)
        self.slabs.end_sampling()
        self.meter.sampled({"rollout/dropped_groups": number % 3}, 10.0 + number % 7)
        self.meter.trained(1.0)
        row = await self.meter.batch_over(number, groups(number))
        assert 0 <= row[f"placement/idle/{ROLLOUT}"] <= 1
        await self.slabs.ready()
        while self.slabs.table.moves.moving:
            await asyncio.sleep(0)
        assert not self.inbox._events, "a failure"

    def _pair(self, number: int) -> tuple[Slab, Slab]:
        table = sorted(self.slabs.table.moves.table)
        return table[number % len(table)], table[(number + 3) % len(table)]


def _dynamic(config: RunConfig) -> RunConfig:
    placement = PlacementSection(mode="disaggregated", trainer_nodes=1, genrm_gpu_sets=2, split="dynamic")
    trainer = replace(config.trainer, total_iterations=10**9)
    return replace(config, placement=placement, trainer=trainer)


def groups(number: int) -> list[c.GroupFact]:
    numbers = random.Random(number)
    return [
        c.GroupFact(
            number=index, scores={}, ages=(0,),
            samples=tuple(m.SampleFact(i, index, 0.0, 10, numbers.randint(1, 100)) for i in range(8)),
        )
        for index in range(GROUPS)
    ]  # fmt: skip


async def blocks_after(leader: Leader, first: int, last: int) -> int:
    for number in range(first, last):
        await leader.iteration(number)
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
def test_iterations_with_moves_keep_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs_module, "DECIDE_S", 3600.0)  # decisions come from `iteration`

    async def run() -> None:
        leader = Leader()
        before = await blocks_after(leader, 1, WARM_UP)
        moves = leader.machines.num_moves
        after = await blocks_after(leader, WARM_UP, ITERATIONS)
        assert leader.machines.num_moves - moves > ITERATIONS - WARM_UP, "more than a move per iteration"
        assert leader.kinds["split.choose"] > 0.9 * ITERATIONS and not leader.kinds["split.failed"]
        assert after - before < MOST_BLOCKS, (before, after)

    asyncio.run(run())
