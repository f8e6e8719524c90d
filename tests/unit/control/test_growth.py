"""What one message or one sample costs does not grow with the nodes, the groups or the requests. Counted."""

import asyncio
from functools import partial
from pathlib import Path

from tests.growth import num_calls
from tests.unit.control.engine_stand_in import Engines
from tests.unit.core.test_placement import config as colocated, disaggregated
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.control.training import NodeTraining
from yatt.core.gpus.placement import ROLLOUT, Slab, placement_of
from yatt.core.requests.dispatch import Dispatch
from yatt.core.samples.balance import Cost, deal_mini_batch, plan_iteration
from yatt.core.samples.prompts import InOrder
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.load import NodeLoad

FEW, MANY = 100, 1600


def node_of(kind, index: int = 0) -> Node:
    return Node(
        config=kind, paths=RunPaths(Path("/r")), placement=placement_of(kind),
        attempt=1, index=index, host="",
        device="cpu",
    )  # fmt: skip


def test_hearing_of_a_node_costs_the_same_among_few_and_many() -> None:
    def calls(num: int) -> int:
        node = node_of(disaggregated(num, 1, 1))
        liveness = Liveness(node, Peers(), lambda index, life, silence_s: None, NodeLoad)
        return num_calls(lambda: [liveness.heard(index) for index in range(1, 50)])

    assert calls(MANY) == calls(FEW)


def test_a_request_costs_the_same_among_few_and_many_full_servers() -> None:
    """One place is free at a time, as where there is more to do than engines can."""

    def calls(num: int) -> int:
        dispatch, room = Dispatch(patience=1), 4
        for server in range(num):
            dispatch.serve(f"node{server}", "pool", room)
        for key in range(room * num + 100):
            dispatch.submit(f"{key}", "pool", group=f"{key // 8}")
        dispatch.assign()

        def cycles() -> None:
            for key in range(100):
                dispatch.done(f"{key}")
                assert len(dispatch.assign()) == 1

        return num_calls(cycles)

    assert calls(MANY) <= 1.1 * calls(FEW)


def test_a_request_costs_the_same_among_few_and_many_idle_servers() -> None:
    def calls(num: int) -> int:
        dispatch = Dispatch(patience=1)
        for server in range(num):
            dispatch.serve(f"node{server}", "pool", 4)

        def cycles() -> None:
            for key in range(50):
                dispatch.submit(f"{key}", "pool", group=f"{key // 8}")
                assert len(dispatch.assign()) == 1

        return num_calls(cycles)

    assert calls(MANY) <= 1.1 * calls(FEW)


def test_what_others_asked_of_a_node_is_known_without_looking_at_each_request() -> None:
    def calls(num: int) -> int:
        busy = Engines(lambda *_: None)
        engines = LocalEngines(busy, colocated(1, 1, 0, 0))  # type: ignore[arg-type]

        async def asked() -> int:
            await engines.add("a", ROLLOUT, Slab(0, 0, (0,)), 1)
            names = [f"node{index % 8}/{index}" for index in range(num)]
            waiting = [asyncio.ensure_future(engines.complete(ROLLOUT, sample(name))) for name in names]
            await asyncio.sleep(0)
            assert engines.num_under_way(ROLLOUT, but="node3") == num - num // 8
            counted = num_calls(lambda: engines.num_under_way(ROLLOUT, but="node3"))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert engines.num_under_way(ROLLOUT, but="") == 0, "what is over is not counted"
            return counted

        return asyncio.run(asked())

    assert calls(MANY) == calls(FEW // 4 * 4 - 4)


def sample(name: str) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=name, prompt_ids=b"", seed=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1
    )


def test_a_workers_message_finds_its_worker_at_once() -> None:
    def calls(gpus: int) -> int:
        supervisor = Supervisor(node_of(colocated(1, gpus, 0, 0)), None)  # type: ignore[arg-type]
        for worker in supervisor.workers.values():
            worker.starts, worker.process.is_starting = 3, True
        last = list(supervisor.workers.values())[-1]
        assert supervisor.by_address(last.address) is last and supervisor.by_address(f"{last.name}.2") is None
        return num_calls(lambda: supervisor.by_address(last.address))

    assert calls(64) == calls(1)


def facts(lengths: list[int]) -> list[m.SampleFact]:
    return [m.SampleFact(index, index // 8, 0.0, 0, length) for index, length in enumerate(lengths)]


def test_planning_grows_with_the_samples_and_not_with_their_square() -> None:
    """Lengths above half the cap need a micro-batch each: as many bins as samples, the worst case."""
    for shape in (lambda i: 55 + i % 40, lambda i: 5 + i * 7 % 60, lambda i: 34 + i % 3):

        def calls(num: int, shape=shape) -> int:
            dealt = facts([shape(i) for i in range(num)])
            return num_calls(partial(deal_mini_batch, dealt, dp_size=4, cap_tokens=100, cost=Cost(1.0, 0.1)))

        few, many = calls(200), calls(3200)
        assert many < 16 * few * 4, "sixteen times the samples, and logarithms"


def test_planning_an_iteration_grows_with_its_steps() -> None:
    def calls(num: int) -> int:
        dealt = facts([10 + i % 50 for i in range(num)])
        work = partial(
            plan_iteration, dealt, groups_per_step=8, dp_size=2, cap_tokens=100, cost=Cost()
        )  # fmt: skip
        return num_calls(work)

    assert calls(3200) < 16 * calls(200) * 1.5


def test_asking_whether_it_is_enough_looks_at_each_group_a_few_times_in_all() -> None:
    def calls(num: int) -> int:
        def phase() -> None:
            groups = InOrder((), range(num))
            for number in (*range(1, num, 2), *range(0, num, 2)):
                groups.resolved(number, accepted=number % 5 > 0)
                groups.num_in_order()
            assert groups.num_in_order() == sum(number % 5 > 0 for number in range(num))

        return num_calls(phase)

    assert calls(MANY) < 16 * calls(FEW) * 1.2


def test_dealing_samples_to_nodes_looks_at_each_rank_once() -> None:
    def calls(num: int) -> int:
        node = node_of(colocated(num, 2, 0, 0))
        training = NodeTraining(node, None, Peers(), None, None)  # type: ignore[arg-type]
        dp_lead_ranks = tuple(range(2 * num))
        order = c.TrainOrder(iteration=1, facts=(), plan=(), dp_lead_ranks=dp_lead_ranks)
        wanted = {head: {head} for head in dp_lead_ranks}
        return num_calls(lambda: asyncio.run(training._send_away(order, {}, wanted)), name="node_of")

    assert calls(80) == 2 * calls(40)


def test_lost_nodes_are_not_listed_anew_at_each_message() -> None:
    peers = Peers(frozenset({1}))
    assert peers.lost is peers.lost
    peers.exclude(2, "is gone")
    assert peers.lost == {1, 2}
