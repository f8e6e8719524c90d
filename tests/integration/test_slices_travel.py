"""Nodes of engines over several nodes fetch their slices, no byte more, over real sockets and segments."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.integration import test_weights_travel as travel
from tests.integration.test_weights_travel import Breaking, Member, Sent, lines_between
from tests.runs import HANG_S
from tests.sliced_weights import fill_rank, part_sums, rank_plan, spanning_config, write_rank
from yatt.adapters.net import bulk
from yatt.adapters.node_local.host_segment import SegmentWriter, Stamp
from yatt.config.schema import RunConfig
from yatt.control.gpus.weights import weight_segments
from yatt.control.gpus.weights.given_segment import GivenSegment
from yatt.control.gpus.weights.uploads import host_stem
from yatt.engine.weights.published import read_publication
from yatt.errors import WorkerFailed, YattError
from yatt.forecast.memory.fetching import slice_sizes
from yatt.forecast.memory.fit import exchanged_weights
from yatt.models.cuts import engine_cuts
from yatt.models.model import Model, model_of
from yatt.records import cluster as c
from yatt.records.weights import WeightPlan
from yatt.weights.published import PublishedWeights
from yatt.weights.slices import part_extent

sent = travel.sent
"""Counts blocks, which are small; for every test here."""

COMMON = {
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen2", "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
    },
    "experts": {
        "model_type": "qwen3_moe", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "moe_intermediate_size": 128, "num_experts_per_tok": 2,
    },
    "latent": {
        "model_type": "deepseek_v3", "num_attention_heads": 16, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 4, "topk_group": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "intermediate_size": 256, "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
TP, NODES = 8, 4
CASES = {
    "dense": ("dense", {"ranks": 2, "tensor_model_parallel_size": 2}, {}),
    "experts": ("experts", {"ranks": 4, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4,
                            "expert_tensor_parallel_size": 1}, {}),
    "whole experts": ("experts", {"ranks": 1}, {"expert_parallel": True}),
    "latent": ("latent", {"ranks": 4, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 1}, {}),
}  # fmt: skip


class SlicedCluster:
    """A trainer node with some ranks, and engines of eight GPUs on four nodes each."""

    def __init__(self, folder: Path, config: RunConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.members = [Member(folder, index, config) for index in range(config.launch.nodes)]
        self.chance = torch.Generator().manual_seed(7)
        self.plans = [rank_plan(config, model, r, self.num_ranks) for r in range(self.num_ranks)]
        self.cuts = engine_cuts(config, model.rows, model.shape)
        self.tensors: dict[str, torch.Tensor] = {}
        for plan, _ in self.plans:
            for each in plan.weights:
                if each.name not in self.tensors:
                    made = torch.randn(each.shape, generator=self.chance)
                    self.tensors[each.name] = made.to(getattr(torch, each.dtype))
        stems = [host_stem(self.members[0].node, rank) for rank in range(self.num_ranks)]
        self.segments: list[SegmentWriter] = [
            write_rank(stem, plan, size, self.tensors)
            for stem, (plan, size) in zip(stems, self.plans, strict=True)
        ]

    @property
    def num_ranks(self) -> int:
        return self.config.launch.gpus_per_node

    def publish(self, version: int, share: float = 1.0) -> None:
        """Gives this share of all elements other values."""
        for segment, (plan, _) in zip(self.segments, self.plans, strict=True):
            segment.invalidate()
            if segment is self.segments[0]:
                for tensor in self.tensors.values():
                    drawn = torch.rand(tensor.shape, generator=self.chance)
                    tensor.copy_(torch.where(drawn < share, tensor + drawn.to(tensor.dtype) + 1, tensor))
            fill_rank(segment, plan, self.tensors)
            segment.complete(Stamp(1, version))

    async def take(self, version: int, *members: Member) -> None:
        sums = part_sums(self.tensors, self.cuts.cuts)
        await asyncio.gather(*(each.take(version, sums) for each in members or self.members[1:]))

    def part_of(self, member: Member) -> int:
        return (member.node.index - 1) % NODES

    def opened(self, member: Member, version: int) -> tuple[PublishedWeights, dict[str, int]]:
        """What an engine of this node reads, and the checksums with which it is compared."""
        found = read_publication(str(member.node.weights_folder(version)), version)
        here = {name: total for name, total in found.here.items() if name != "norm"}
        assert found.part == self.part_of(member) and here.keys() == self.cuts.cuts.keys()
        return PublishedWeights(found.stems, found.stamp, part=found.part), here

    def check(self, member: Member, version: int) -> None:
        """All that this node's ranks have is what was published."""
        weights, here = self.opened(member, version)
        assert weights.damaged(here) == []
        assert dict(weights).keys() == self.tensors.keys()
        for name, tensor in weights:
            taken, whole = tensor, self.tensors[name]
            for dim, (begin, end) in enumerate(self.extent(name, self.part_of(member))):
                if begin == end:
                    break
                taken, whole = taken.narrow(dim, begin, end - begin), whole.narrow(dim, begin, end - begin)
            else:
                assert torch.equal(taken.clone(), whole), name

    def extent(self, name: str, part: int) -> list[tuple[int, int]]:
        offset, shape = part_extent(self.tensors[name].shape, self.cuts.cuts.get(name), part)
        return [(begin, begin + size) for begin, size in zip(offset, shape, strict=True)]

    def exact_bytes(self, part: int) -> int:
        """Bytes of what the ranks of one node have."""
        return sum(
            math.prod(end - begin for begin, end in self.extent(name, part)) * tensor.element_size()
            for name, tensor in self.tensors.items()
        )


def config_of(case: str, num_engines: int = 1, **placement: Any) -> tuple[RunConfig, Model]:
    kind, trainer, rollout = CASES[case]
    config = spanning_config(
        "m", tp_size=TP, node_ranks=TP // NODES, num_engines=num_engines, dtype="bfloat16", trainer=trainer,
        **rollout,
    )  # fmt: skip
    config = replace(config, placement=replace(config.placement, **placement))
    return config, model_of(COMMON | MODELS[kind])


@contextlib.asynccontextmanager
async def sliced_cluster(
    folder: Path, case: str = "dense", num_engines: int = 1, **placement: Any
) -> AsyncIterator[SlicedCluster]:
    cluster = SlicedCluster(folder, *config_of(case, num_engines, **placement))
    async with lines_between(cluster.members, folder):
        yield cluster


def received(member: Member) -> int:
    return member.told("weights.fetch")[-1]["received_bytes"]


@pytest.mark.parametrize("case", CASES)
def test_a_node_fetches_its_slices_and_the_plan_says_how_many_bytes(tmp_path: Path, case: str) -> None:
    async def scene() -> None:
        async with sliced_cluster(tmp_path, case) as cluster:
            cluster.publish(1)
            await cluster.take(1)
            planned = exchanged_weights(cluster.config, [], cluster.model)
            sizes = slice_sizes(cluster.config, cluster.model)
            whole = sum(tensor.nbytes for tensor in cluster.tensors.values())
            for member in cluster.members[1:]:
                cluster.check(member, 1)
                exact = cluster.exact_bytes(cluster.part_of(member))
                assert exact <= received(member) <= 1.01 * exact
                assert received(member) == planned.fetched[member.node.index] < 0.45 * whole
                (event,) = member.told("weights.fetch")
                assert event["size_bytes"] == received(member) and event["unknown_bytes"] == 0
                held = sum(each.stat().st_size for each in member.node.weights_root.glob("*.weights"))
                assert held == received(member) + 4096 * cluster.num_ranks, "memory: pages of stamps too"
                for rank in range(cluster.num_ranks):
                    fetched = member.taken.fetched(rank)
                    assert fetched is not None and fetched._fill is not None and sizes is not None
                    place = 0, rank, cluster.part_of(member)
                    assert fetched._fill.size_bytes == sizes.total[place]
            assert planned.given == {0: sum(planned.fetched.values())}
            assert not +planned.unknown

    asyncio.run(scene())


def test_a_chain_is_of_nodes_with_the_same_slices(tmp_path: Path, sent: Sent) -> None:
    """Three engines: the trainer node sends each slice once, and each node to one that needs the same."""

    async def scene() -> None:
        async with sliced_cluster(tmp_path, num_engines=3) as cluster:
            for version in (1, 2):
                cluster.publish(version)
                await cluster.take(version)
                for member in cluster.members[1:]:
                    cluster.check(member, version)
            sources = {
                each.node.index: each.told("weights.fetch")[-1]["sources"] for each in cluster.members[1:]
            }
            assert {node: set(found) for node, found in sources.items()} == {
                node: {0 if node <= NODES else node - NODES} for node in range(1, 3 * NODES + 1)
            }
            blocks = Counter(
                {part: -(-size // bulk.BLOCK_BYTES) for part, size in part_sizes(cluster).items()}
            )
            assert sent.num == {"owner": 2 * blocks.total(), "relay": 2 * 2 * blocks.total()}

    asyncio.run(scene())


def part_sizes(cluster: SlicedCluster) -> dict[tuple[int, int, int], int]:
    sizes = slice_sizes(cluster.config, cluster.model)
    assert sizes is not None
    return dict(sizes.total)


def test_only_changes_of_slices_travel(tmp_path: Path) -> None:
    async def scene() -> None:
        async with sliced_cluster(tmp_path, num_engines=2) as cluster:
            cluster.publish(1)
            await cluster.take(1)
            whole = {each.node.index: received(each) for each in cluster.members[1:]}
            cluster.publish(2, 0.02)
            await cluster.take(2)
            for member in cluster.members[1:]:
                cluster.check(member, 2)
                assert received(member) < 0.1 * whole[member.node.index]

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["is lost", "has another plan", "has other slices"])
def test_what_the_node_before_does_not_give_comes_from_the_trainer_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("MEET_S", "ANSWER_S"):
        monkeypatch.setattr(weight_segments, name, 2.0)

    async def scene() -> None:
        async with sliced_cluster(tmp_path, num_engines=2) as cluster:
            before, after = cluster.members[1], cluster.members[1 + NODES]
            cluster.publish(1)
            await disturbed(cluster, before, how)
            if how == "is lost":
                after.peers.exclude(1, "was not heard of")
            await asyncio.wait_for(cluster.take(1, after), HANG_S)
            cluster.check(after, 1)
            said = {each["error"] for each in after.told("weights.fetch.fail")}
            assert said == {
                "has another plan": {f"node1: {OTHER_PLAN} {rank}" for rank in range(2)},
                "has other slices": {f"node1: {OTHER_PART} {rank}" for rank in range(2)},
            }.get(how, set())
            assert set(after.told("weights.fetch")[-1]["sources"]) == {0}

    asyncio.run(scene())


OTHER_PLAN = "this node has another plan of the weights of trainer rank"
OTHER_PART = "this node does not fetch version 1 of trainer rank"


async def disturbed(cluster: SlicedCluster, before: Member, how: str) -> None:
    """The node before has fetched; it takes itself for another place of its engine, or has another plan."""
    if how == "has other slices":
        before.taken.__dict__["_part"] = 1
    await cluster.take(1, before)
    for rank in range(cluster.num_ranks if how == "has another plan" else 0):
        fetched = before.taken.fetched(rank)
        assert fetched is not None and fetched._segment is not None
        fetched._segment = replace(fetched._segment, digest=b"another")


def test_a_part_that_no_engine_has_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with sliced_cluster(tmp_path) as cluster:
            cluster.publish(1)
            with pytest.raises(WorkerFailed, match="the plan of trainer rank-00000 has no part 4"):
                await cluster.members[0].given.describe(c.DescribeWeights(rank=0, part=4))

    asyncio.run(scene())


@pytest.mark.parametrize("name", ["q_proj.weight", "down_proj.weight", "embed_tokens.weight", "q_proj.bias"])
def test_bytes_that_are_off_by_one_row_are_found_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Planted: the giver packs the bytes after the right ones of one tensor, and keeps the plan."""

    async def scene() -> None:
        async with sliced_cluster(tmp_path) as cluster:
            cluster.publish(1)
            original = GivenSegment._slice

            def shifted(self: GivenSegment, stem: Path, part: int) -> None:
                original(self, stem, part)
                plan = msgspec.msgpack.decode(self.plan, type=WeightPlan)
                places = {box.at for each in plan.weights if each.name.endswith(name) for box in each.boxes}
                item = 2
                self._runs = tuple(
                    replace(run, begin=max(0, run.begin - (item if run.num_rows > 1 else run.row_bytes)))
                    if run.at in places else run
                    for run in self._runs or ()
                )  # fmt: skip

            monkeypatch.setattr(GivenSegment, "_slice", shifted)
            await cluster.take(1)
            found = set()
            for member in cluster.members[1:]:
                weights, here = cluster.opened(member, 1)
                wrong = weights.damaged(here)
                assert all(each.endswith(name) for each in wrong)
                found |= {(member.node.index, each) for each in wrong}
            assert len(found) >= NODES - 1, "a slice at the very beginning cannot be shifted"

    asyncio.run(scene())


def test_whole_tensors_are_fetched_if_the_run_file_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        async with sliced_cluster(tmp_path, send_slices=False) as cluster:
            cluster.publish(1)
            await cluster.take(1)
            for member in cluster.members[1:]:
                found = read_publication(str(member.node.weights_folder(1)), 1)
                assert found.part is None and received(member) == sum(size for _, size in cluster.plans)
                for name, tensor in PublishedWeights(found.stems, found.stamp):
                    assert torch.equal(tensor.clone(), cluster.tensors[name])
            chains = {each["sources"][0] for m in cluster.members[2:] for each in m.told("weights.fetch")}
            assert chains == {1, 2, 3}, "one chain of all nodes, as for engines that fit a node"

    asyncio.run(scene())


@pytest.mark.parametrize("seed", range(3))
def test_whatever_breaks_slices_that_arrive_are_those_that_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(bulk, "receive_bytes", breaking := Breaking(seed))
    for name in ("PAUSE_S", "MEET_S", "ANSWER_S"):
        monkeypatch.setattr(weight_segments, name, 0.1)
    chance = breaking.random

    async def scene() -> None:
        async with sliced_cluster(tmp_path, num_engines=2) as cluster:
            nodes, arrived = cluster.members[1:], 0
            for version in range(1, 5):
                breaking.is_on = version < 4
                cluster.publish(version, chance.choice((0.0, 0.01, 0.6)))
                takers = [node for node in nodes if not breaking.is_on or chance.random() < 0.8]
                taking = [asyncio.ensure_future(cluster.take(version, node)) for node in takers]
                outcomes = await asyncio.gather(*taking, return_exceptions=True)
                for node, outcome in zip(takers, outcomes, strict=True):
                    assert outcome is None or isinstance(outcome, YattError), outcome
                    if outcome is None:
                        cluster.check(node, version)
                        arrived += 1
            assert arrived >= len(nodes)

    asyncio.run(scene())
