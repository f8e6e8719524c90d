"""This node's part of training: distributes samples, and sends orders to trainer ranks.

Each controller sends the samples of its data shard directly to the nodes whose ranks train on them. The first
rank of each dp_rank's model-parallel group receives them from its own controller.
"""

import asyncio
import signal

from yatt.adapters.node_local.host_segment import CRITIC, CRITIC_STATE, STATE
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.gpus.seen_pictures import SeenPictures
from yatt.control.gpus.weights.uploads import Uploads, host_stem
from yatt.control.gpus.workers import Workers
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.control.rollouts.groups.groups import PromptGroup
from yatt.core.attempts.exits import describe_exit
from yatt.errors import DeadlineExceeded
from yatt.records import cluster as c, message as m
from yatt.records.usage import largest_usage

PORTION_BYTES = 256 << 10
"""Size of samples per message: a message is in memory two and a half times while it is sent."""


class NodeTraining:
    """Sends orders to the trainer ranks of one node.

    Args:
        peers: connections to the other controllers.
        uploads: this node's uploader.
        pictures: shows ranks the pictures of samples, in runs that have some.
    """

    def __init__(
        self, node: Node, workers: Workers, peers: Peers, uploads: Uploads, pictures: SeenPictures | None
    ) -> None:
        self._pictures = pictures
        self._node, self._workers, self._peers, self._uploads = node, workers, peers, uploads
        self._transfers: dict[int, dict[int, m.Rollout]] = {}
        self._sent: set[tuple[int, int]] = set()  # samples of the update to come, with the node that has each
        self._arrived = asyncio.Condition()
        self.advantages: dict[int, float] = {}
        """Mean advantage over its tokens of each of this node's samples, by sample id, in the last update."""

    async def open_store(self, _: c.OpenTrainerStore) -> m.Message:
        """Makes global rank 0 host the process group's store."""
        return await self._workers.order(self._workers.trainers()[0], m.OpenStore(host=self._node.host))

    async def build(self, order: c.BuildTrainer) -> None:
        """Makes the ranks join the process group and build model and optimizer."""
        world_size = self._node.placement.world_size

        def join(rank: int) -> m.Join:
            return m.Join(host=order.host, port=order.port, global_rank=rank, world_size=world_size)

        joins = (self._workers.order(worker, join(rank)) for rank, worker in self._local_ranks())
        await asyncio.gather(*joins)

        async def build(rank: int, worker: Worker) -> None:
            stem = str(host_stem(self._node, rank))
            built = await self._workers.order(worker, m.Build(stem=stem, attempt=self._node.attempt))
            worker.process.host_bytes = built.host_bytes

        await asyncio.gather(*(build(rank, worker) for rank, worker in self._local_ranks()))

    async def restore(self, order: c.RestoreTrainer) -> m.Restored:
        """Makes every local rank restore itself from a checkpoint; returns the first fault."""
        body = m.Restore(
            checkpoint=order.checkpoint,
            is_origin=order.is_origin,
            is_local=order.is_local,
            weights_only=order.weights_only,
        )
        answers = await self._workers.order_trainers(body)
        return m.Restored(
            fault=next((answer.fault for answer in answers if answer.fault), ""),
            local_bytes=sum(answer.local_bytes for answer in answers),
        )

    async def receive(self, order: c.SampleTransfer) -> m.Message:
        """Receives samples of another node for this one's ranks."""
        async with self._arrived:
            self._transfers.setdefault(order.iteration, {}).update({r.sample_id: r for r in order.rollouts})
            self._arrived.notify_all()
        return m.Done()

    async def show(self, order: c.ShowPictures, groups: list[PromptGroup]) -> c.PicturesShown:
        """Sends every sample to the node that trains on it, and has its rank see the pictures. It can be
        repeated with fewer groups, which other ranks may get."""
        assert self._pictures is not None, "only asked for in runs with pictures"
        show, local = self._pictures.show, await self._distributed(order, _rollouts_of(groups))
        found = await asyncio.gather(
            *(show(worker, order.iteration, local.get(rank, ())) for rank, worker in self._local_ranks())
        )
        return c.PicturesShown(lost={i: why for lost in found for i, why in lost.items()})

    async def train(self, order: c.TrainOrder, groups: list[PromptGroup]) -> m.Message:
        """Sends every sample to the node that trains on it, then updates. Where the update changes host
        copies, no upload may read them any more."""
        if not order.is_held_out and (areas := changed_areas(self._node.config)):
            await self._uploads.detach(order.iteration, areas)
        mine = _rollouts_of(groups)
        local = await self._distributed(order, mine)
        trained = await asyncio.gather(
            *(self._train_on(worker, order, local.get(rank, ())) for rank, worker in self._local_ranks())
        )
        self._transfers = {i: p for i, p in self._transfers.items() if i > order.iteration}
        self._sent.clear()
        found = zip(order.facts, m.unpack_floats(trained[0].advantages), strict=False)
        self.advantages = {fact.sample_id: each for fact, each in found if fact.sample_id in mine}
        names = {name for answer in trained for name in answer.timing_s}
        slowest = {name: max(a.timing_s.get(name, 0.0) for a in trained) for name in sorted(names)}
        costs = tuple(cost for answer in trained for cost in answer.costs)
        usage = largest_usage([answer.usage for answer in trained])
        return c.TrainedNode(metrics=trained[0].metrics, timing_s=slowest, costs=costs, usage=usage)

    async def take_snapshot(self, order: m.TakeSnapshot) -> m.SnapshotTaken:
        """Makes every local rank bring its host copy up to date, when no upload reads it any more."""
        await self._uploads.detach(order.iteration)
        taken = await self._workers.order_trainers(order)
        common = next((s.common for s in taken if s.common != b"{}"), b"{}")
        return m.SnapshotTaken(common=common, size_bytes=sum(s.size_bytes for s in taken))

    async def upload(self, order: m.Upload) -> m.Uploaded:
        """Uploads the host copies of the local ranks."""
        return await self._uploads.upload(order)

    async def pass_on(self, order: m.Order[m.Done]) -> m.Message:
        """Makes the local ranks carry out an order that only passes through."""
        await self._workers.order_trainers(order)
        return m.Done()

    def _local_ranks(self) -> list[tuple[int, Worker]]:
        first = self._node.placement.first_rank(self._node.index)
        return [(first + i, worker) for i, worker in enumerate(self._workers.trainers())]

    async def _distributed(
        self, order: c.TrainOrder | c.ShowPictures, mine: dict[int, m.Rollout]
    ) -> dict[int, tuple[m.Rollout, ...]]:
        """Sends this node's samples where they are trained on; returns those of each local dp lead rank."""
        wanted = self._wanted(order)
        await self._send_away(order, mine, wanted)
        return await self._gather(order, mine, wanted)

    def _wanted(self, order: c.TrainOrder | c.ShowPictures) -> dict[int, set[int]]:
        """Returns sample ids by global rank of the dp lead rank that trains on them."""
        wanted: dict[int, set[int]] = {head: set() for head in order.dp_lead_ranks}
        for step in order.plan:
            for head, micro_batches in zip(order.dp_lead_ranks, step.micro_batches, strict=True):
                wanted[head].update(sample_id for micro in micro_batches for sample_id in micro)
        return wanted

    async def _send_away(
        self, order: c.TrainOrder | c.ShowPictures, mine: dict[int, m.Rollout], wanted: dict[int, set[int]]
    ) -> None:
        sends = []
        node_of = self._node.placement.node_of
        by_node: dict[int, set[int]] = {}
        for head, ids in wanted.items():
            by_node.setdefault(node_of(head), set()).update(ids)
        for index, ids in by_node.items():
            if index == self._node.index:
                continue
            left = [i for i in sorted(ids & mine.keys()) if (index, i) not in self._sent]
            if left:
                sends.append(self._send_to(index, order.iteration, tuple(mine[i] for i in left)))
            self._sent |= {(index, i) for i in left}
        await asyncio.gather(*sends)

    async def _send_to(self, index: int, iteration: int, rollouts: tuple[m.Rollout, ...]) -> None:
        limit_s = self._node.config.launch.phase_timeout_s
        for portion in sample_portions(rollouts):
            body = c.SampleTransfer(iteration=iteration, rollouts=portion)
            answer = await self._peers.request(index, body, limit_s)
            m.unless_failed(answer, f"node{index}")

    async def _gather(
        self, order: c.TrainOrder | c.ShowPictures, mine: dict[int, m.Rollout], wanted: dict[int, set[int]]
    ) -> dict[int, tuple[m.Rollout, ...]]:
        """Waits for the samples of each local dp lead rank; returns them by rank."""
        node_of = self._node.placement.node_of
        dp_lead_ranks = {h: ids for h, ids in wanted.items() if node_of(h) == self._node.index}
        needed = {i for ids in dp_lead_ranks.values() for i in ids}

        def have() -> dict[int, m.Rollout]:
            return {**self._transfers.get(order.iteration, {}), **mine}

        num_to_come = len(needed - mine.keys())

        def is_complete() -> bool:
            """Runs after every sample transfer; compares all samples only when enough have come."""
            num_come = len(self._transfers.get(order.iteration, ()))
            return num_come >= num_to_come and needed <= have().keys()

        limit_s = self._node.config.launch.phase_timeout_s
        try:
            async with self._arrived, asyncio.timeout(limit_s):
                await self._arrived.wait_for(is_complete)
        except TimeoutError:
            missing = len(needed - have().keys())
            raise DeadlineExceeded(
                f"{missing} of {len(needed)} samples did not come from the other nodes in {limit_s:g} s"
            ) from None
        samples = have()
        return {head: tuple(samples[i] for i in sorted(ids)) for head, ids in dp_lead_ranks.items()}

    async def _train_on(
        self, worker: Worker, order: c.TrainOrder, rollouts: tuple[m.Rollout, ...]
    ) -> m.Trained:
        transfers, train = orders_of_rank(order, rollouts)
        for transfer in transfers:
            await self._workers.order(worker, transfer)
        return await self._workers.order(worker, train)


def changed_areas(config: RunConfig) -> tuple[str, ...]:
    """The segments of host copies that an update changes: state that lives there, or a model whose turn on
    the GPU is over. Weights are published, so they are there already."""
    if config.critic.swap:
        return STATE, CRITIC, CRITIC_STATE
    return (STATE, CRITIC_STATE) if config.trainer.offload_optimizer else ()


def _rollouts_of(groups: list[PromptGroup]) -> dict[int, m.Rollout]:
    return {sample_id: r for group in groups for sample_id, r in group.rollouts().items()}


def lost_rank(node: Node, worker: Worker, how: str) -> tuple[str, bool]:
    """Returns the failure report of a trainer rank that ended: the error, and whether it may be a symptom. A
    rank that was not killed may have ended because another one did."""
    log = node.paths.log(node.attempt, f"{worker.name}.{worker.starts}")
    return f"{worker.name} ended: {how}. Its log is {log}", how != describe_exit(-signal.SIGKILL)


def orders_of_rank(
    order: c.TrainOrder, rollouts: tuple[m.Rollout, ...]
) -> tuple[list[c.SampleTransfer], m.Train]:
    """Returns the orders to a rank, each to be sent after the answer to the previous one: samples in
    portions, and the last portion with Train."""
    *before, last = sample_portions(rollouts) or [()]
    transfers = [c.SampleTransfer(iteration=order.iteration, rollouts=portion) for portion in before]
    return transfers, m.Train(
        iteration=order.iteration,
        facts=order.facts,
        plan=order.plan,
        rollouts=last,
        is_held_out=order.is_held_out,
    )


def sample_portions(
    rollouts: tuple[m.Rollout, ...], most_bytes: int = PORTION_BYTES
) -> list[tuple[m.Rollout, ...]]:
    """Returns the samples in order, in portions of at most `most_bytes` (more if one sample is larger)."""
    cut: list[list[m.Rollout]] = []
    room = 0
    for rollout in rollouts:
        size = rollout.size_bytes
        if not cut or size > room:
            cut.append([])
            room = most_bytes
        cut[-1].append(rollout)
        room -= size
    return [tuple(portion) for portion in cut]
