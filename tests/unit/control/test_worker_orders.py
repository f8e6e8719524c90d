"""Orders to a node's workers: tokens, weights, failures. Real `Workers`, no processes, a stand-in socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, turns, until
from tests.unit.control.engine_stand_in import Engines
from tests.unit.core.test_placement import config as colocated, widths
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.gpus.unfit import UnfitEngines
from yatt.control.gpus.weights.publications import LocalPublication, Publications
from yatt.control.gpus.workers import MOST_DEATHS, Workers
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, TRAINER, placement_of
from yatt.core.requests.first_use import MAX_WAKE_FAILURES
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import message as m

JUDGE = "genrm:g0"
LOGPROBS = (m.pack_floats([-1.0, -2.0]),)


class Socket(Engines):
    """Answers every order as `answers` says, and keeps them with their tokens."""

    def __init__(self) -> None:
        super().__init__(lambda _, __: None)
        self.orders: list[tuple[str, m.Message, int]] = []
        self.answers: dict[type[m.Message], Callable[[Any], m.Message]] = {
            m.LoadWeights: lambda o: m.WeightsLoaded(
                policy_version=o.policy_version, probe_logprobs=LOGPROBS, num_compared=9, num_readable=9
            )
        }

    async def request(self, to: str, body: m.Message, limit_s: float, **more: Any) -> m.Message:
        self.orders.append((to, body, more.get("token", 0)))
        return self.answers.get(type(body), lambda _: m.Done())(body)

    def fail_waiting(self, to: str, error: Exception) -> None:
        pass


class Bench:
    """Args: `narrow` puts two rollout engines on the slab; with `spans` it has rank 1 of one."""

    def __init__(self, *, narrow: bool = False, spans: bool = False) -> None:
        config = widths(colocated(1, 2, 1, 0), 1, 2) if narrow else colocated(1, 1, 0, 0)
        config = widths(colocated(2, 1, 0, 0), 2) if spans else config
        self.node = Node(
            config=config, paths=RunPaths(Path("/r")), placement=placement_of(config),
            attempt=1, index=int(spans),
            host="", device="cpu",
        )  # fmt: skip
        self.slab = self.node.slabs[0]
        events = EventLog(attempt=1, node=0, role="controller", sink=lambda _: None)
        self.socket, self.failures = Socket(), list[tuple[str, int]]()
        self.supervisor = Supervisor(self.node, events)
        self.engines = LocalEngines(self.socket, config)  # type: ignore[arg-type]
        self.publications = Publications(self.node, Peers(), events, Progress(int))
        unfit = UnfitEngines(self.node, events, lambda error, code: self.failures.append((error, code)))
        self.workers = Workers(
            self.node, self.supervisor, self.engines, self.publications, unfit, events
        )  # fmt: skip
        for worker in self.supervisor.workers.values():  # as if each had started and said Hello
            worker.starts, worker.process.is_starting = 1, True
            worker.process.hello.set()

    def worker(self, role: str) -> Worker:
        (found,) = self.supervisor.of(role, self.slab)
        return found

    def publish(self, version: int) -> None:
        self.publications.adopt(
            LocalPublication(
                policy_version=version, folder=Path("/none"), probe=(m.pack_ids([1, 2, 3]),),
                expected=LOGPROBS,
            )
        )  # fmt: skip

    def kinds(self) -> list[tuple[str, int]]:
        return [(type(body).__name__, token) for _, body, token in self.socket.orders]


def test_an_engine_that_is_woken_takes_the_newest_weights_under_its_token() -> None:
    bench = Bench()
    bench.publish(4)
    asyncio.run(bench.workers.wake(bench.slab, ROLLOUT, 7))
    assert bench.kinds() == [("Wake", 7), ("LoadWeights", 7)]
    assert bench.engines.is_awake(bench.worker(ROLLOUT).address) and not bench.failures


def test_an_engine_sleeps_under_the_token_that_is_taken_back_and_gets_no_requests_meanwhile() -> None:
    async def scene(bench: Bench) -> None:
        await bench.workers.wake(bench.slab, ROLLOUT, 7)
        await bench.workers.sleep(bench.slab, ROLLOUT, 7, 5.0)

    bench = Bench()
    asyncio.run(scene(bench))
    assert bench.kinds() == [("Wake", 7), ("Sleep", 7)]
    assert not bench.engines.is_awake(bench.worker(ROLLOUT).address)


def test_an_update_or_a_completion_is_the_work_after_which_sleeping_memory_is_learned() -> None:
    async def scene(bench: Bench) -> list[bool]:
        trainer, engine, found = bench.worker(TRAINER), bench.worker(ROLLOUT), list[bool]()
        await bench.workers.order(trainer, m.Publish(policy_version=1, probe=()))
        found.append(trainer.process.has_computed)
        await bench.workers.order(trainer, m.Train(iteration=1, facts=(), plan=()))
        found.append(trainer.process.has_computed)
        for token in (7, 8):
            await bench.workers.wake(bench.slab, ROLLOUT, token)
            await bench.workers.sleep(bench.slab, ROLLOUT, token, 5.0)
            found.append(engine.process.has_computed)
            bench.engines._engines.useful.add(engine.address)  # as `completed` does
        return found

    assert asyncio.run(scene(Bench())) == [False, True, False, True]


def test_an_engine_that_ends_or_starts_delays_no_sleep_of_its_neighbour() -> None:
    async def scene(bench: Bench) -> None:
        first, second = bench.supervisor.of(ROLLOUT, bench.slab)
        await bench.workers.wake(bench.slab, ROLLOUT, 7)

        def sleep(_: m.Sleep) -> m.Message:
            if not first.process.is_asleep:
                return m.Done()
            second.process.is_starting = False  # as if its process had ended
            return m.Failed(error="ended", exit_code=1)

        bench.socket.answers[m.Sleep] = sleep
        await bench.workers.sleep(bench.slab, ROLLOUT, 7, 5.0)
        assert (first.process.is_asleep, second.process.is_asleep) == (True, False)
        second.process.is_starting = True
        second.process.hello.clear()
        await bench.workers.wake(bench.slab, JUDGE, 8)
        bench.socket.answers[m.Sleep] = lambda _: m.Done()
        await bench.workers.sleep(bench.slab, ROLLOUT, 8, 5.0)
        assert bench.kinds()[-2:] == [("Wake", 8), ("Sleep", 8)], "one of them has nothing on its GPU"

    asyncio.run(scene(Bench(narrow=True)))


def test_a_sleep_that_a_running_engine_refuses_is_an_error() -> None:
    async def scene(bench: Bench) -> None:
        await bench.workers.wake(bench.slab, ROLLOUT, 7)
        bench.socket.answers[m.Sleep] = lambda _: m.Failed(error="no", exit_code=1)
        with pytest.raises(WorkerFailed):
            await bench.workers.sleep(bench.slab, ROLLOUT, 7, 5.0)

    asyncio.run(scene(Bench(narrow=True)))


def test_one_of_two_engines_is_woken_again_under_the_token_of_both_while_it_counts() -> None:
    async def scene(bench: Bench) -> None:
        bench.publish(4)
        _, second = bench.supervisor.of(ROLLOUT, bench.slab)
        await bench.workers.wake(bench.slab, ROLLOUT, 7)
        bench.workers.forget(second, "killed")
        bench.socket.orders.clear()
        await bench.workers.restart(second, 7)
        assert [(to, *kind) for (to, _, _), kind in zip(bench.socket.orders, bench.kinds(), strict=True)] == [
            (second.address, "Wake", 7), (second.address, "LoadWeights", 7),
        ]  # fmt: skip
        assert all(bench.engines.is_awake(w.address) for w in bench.supervisor.of(ROLLOUT, bench.slab))
        bench.workers.take_back(bench.slab)
        bench.socket.orders.clear()
        second.process.is_starting = False
        await bench.workers.restart(second, 7)
        assert not bench.socket.orders and not second.is_running and second.starts == 1

    asyncio.run(scene(Bench(narrow=True)))


def test_where_memory_is_lacking_none_of_the_engines_of_a_slab_is_started() -> None:
    async def scene(bench: Bench) -> None:
        async def lack(_: Worker) -> str:
            await asyncio.sleep(0)
            return "too little memory"

        def failed(worker: Worker, _: str) -> bool:
            assert worker.slab is not None
            bench.workers.take_back(worker.slab)  # as the arbiter does when the slab goes back
            return True

        unfit = bench.workers._unfit
        unfit.lack, unfit.failed = lack, failed  # type: ignore[method-assign]
        workers = bench.supervisor.of(ROLLOUT, bench.slab)
        for worker in workers:
            worker.process.is_starting = False
        await bench.workers.wake(bench.slab, ROLLOUT, 7)
        assert [worker.starts for worker in workers] == [1, 1], "neither was started again"

    asyncio.run(scene(Bench(narrow=True)))


def test_a_slab_that_is_taken_back_while_an_engine_loads_weights_is_no_failure_of_the_engine() -> None:
    async def scene(bench: Bench) -> None:
        bench.publish(4)
        ended: list[str] = []
        bench.supervisor.end = lambda worker: ended.append(worker.name)  # type: ignore[method-assign]

        def load(_: m.LoadWeights) -> m.Message:
            bench.workers.take_back(bench.slab)
            return m.Failed(error="this worker is not awake", exit_code=1)

        bench.socket.answers[m.LoadWeights] = load
        for _ in range(MAX_WAKE_FAILURES):
            await bench.workers.wake(bench.slab, ROLLOUT, 7)
        assert not ended and not bench.failures
        assert not bench.engines.room(ROLLOUT), "it takes no requests"

    asyncio.run(scene(Bench(narrow=True)))


def test_a_slab_that_is_taken_back_while_an_engine_loads_weights_gets_it_no_requests() -> None:
    async def scene(bench: Bench) -> None:
        bench.publish(4)
        answer = bench.socket.answers[m.LoadWeights]

        def load(order: m.LoadWeights) -> m.Message:
            bench.workers.take_back(bench.slab)
            return answer(order)

        bench.socket.answers[m.LoadWeights] = load
        await bench.workers.wake(bench.slab, ROLLOUT, 7)
        assert not bench.engines.room(ROLLOUT) and not bench.failures

    asyncio.run(scene(Bench()))


def test_a_slab_that_is_taken_back_while_a_process_starts_is_not_used() -> None:
    async def scene(bench: Bench) -> None:
        bench.worker(ROLLOUT).process.hello.clear()
        waking = asyncio.ensure_future(bench.workers.wake(bench.slab, ROLLOUT, 7))
        await asyncio.sleep(0.01)
        bench.workers._grants._granted[bench.slab] = 0  # as `sleep` does first
        bench.worker(ROLLOUT).process.hello.set()
        await asyncio.wait_for(waking, HANG_S)

    bench = Bench()
    asyncio.run(scene(bench))
    assert bench.kinds() == [], "it may be another's by now"


def test_an_engine_that_is_refused_while_host_copies_change_loads_the_next_version() -> None:
    async def scene(bench: Bench) -> None:
        bench.publish(4)
        tried: list[int] = []

        def load(order: m.LoadWeights) -> m.Message:
            tried.append(order.policy_version)
            if order.policy_version == 4:
                bench.publications.change()
                return m.Failed(error="is being changed", exit_code=1)
            return m.WeightsLoaded(
                policy_version=5, probe_logprobs=LOGPROBS, differing=(), num_compared=1, num_readable=1
            )

        bench.socket.answers[m.LoadWeights] = load
        waking = asyncio.ensure_future(bench.workers.wake(bench.slab, ROLLOUT, 7))
        await until(lambda: tried, "the load")
        await turns()
        assert (tried, waking.done()) == ([4], False)
        bench.publish(5)
        await asyncio.wait_for(waking, HANG_S)
        assert tried == [4, 5]

    bench = Bench()
    asyncio.run(scene(bench))
    assert bench.engines.is_awake(bench.worker(ROLLOUT).address) and not bench.failures


def test_an_engine_that_is_refused_though_nothing_changes_has_failed() -> None:
    bench = Bench()
    bench.publish(4)
    bench.socket.answers[m.LoadWeights] = lambda _: m.Failed(error="damaged", exit_code=1)
    ended: list[str] = []
    bench.supervisor.end = lambda worker: ended.append(worker.name)  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(bench.workers.wake(bench.slab, ROLLOUT, 7), HANG_S))
    assert bench.kinds() == [("Wake", 7), ("LoadWeights", 7)]
    assert not bench.engines.is_awake(bench.worker(ROLLOUT).address)


def test_an_engine_whose_log_probs_differ_ends_the_attempt() -> None:
    bench = Bench()
    bench.publish(4)
    bench.socket.answers[m.LoadWeights] = lambda o: m.WeightsLoaded(
        policy_version=4, probe_logprobs=(m.pack_floats([-1.0, -9.0]),), num_compared=9, num_readable=9
    )
    asyncio.run(bench.workers.wake(bench.slab, ROLLOUT, 7))
    ((error, _),) = bench.failures
    assert "after taking policy version 4" in error and "log-probs of the probe differ" in error


def test_an_engine_with_other_bits_is_named_with_its_tensors() -> None:
    bench = Bench()
    bench.publish(4)
    bench.socket.answers[m.LoadWeights] = lambda o: m.WeightsLoaded(
        policy_version=4,
        probe_logprobs=LOGPROBS,
        differing=("model.embed_tokens.weight",),
        num_compared=9,
        num_readable=9,
    )
    asyncio.run(bench.workers.wake(bench.slab, ROLLOUT, 7))
    assert "these differ: model.embed_tokens.weight" in bench.failures[0][0]


def test_an_engine_of_which_no_tensor_can_be_compared_is_refused() -> None:
    bench = Bench()
    bench.publish(4)
    bench.socket.answers[m.LoadWeights] = lambda o: m.WeightsLoaded(policy_version=4, probe_logprobs=LOGPROBS)
    asyncio.run(bench.workers.wake(bench.slab, ROLLOUT, 7))
    assert "no tensor of policy version 4 can be compared" in bench.failures[0][0]


def test_a_users_mistake_ends_the_attempt_at_once_and_others_after_some_tries() -> None:
    async def scene(exit_code: int) -> list[int]:
        bench = Bench()
        bench.socket.answers[m.Wake] = lambda _: m.Failed(error="no model", exit_code=exit_code)
        told = []
        for token in range(1, MAX_WAKE_FAILURES + 1):
            await bench.workers.wake(bench.slab, ROLLOUT, token)
            told.append(len(bench.failures))
        return told

    assert asyncio.run(scene(EXIT_USER_MISTAKE))[0] == 1
    assert asyncio.run(scene(EXIT_FAILED)) == [0] * (MAX_WAKE_FAILURES - 1) + [1]


def test_a_rank_that_ends_again_and_again_before_it_is_awake_ends_the_attempt() -> None:
    async def scene(bench: Bench) -> None:
        worker = bench.worker(ROLLOUT)
        for _ in range(2 * MOST_DEATHS):
            await bench.engines.add(worker.address, ROLLOUT, bench.slab, 7, takes_requests=False)
            bench.workers.forget(worker, "killed by SIGKILL")
            worker.starts += 1
        assert not bench.failures, "it was awake each time: the ends are counted at rank 0"
        for _ in range(MOST_DEATHS - 1):
            bench.workers.forget(worker, "killed by SIGKILL")
            worker.starts += 1

    bench = Bench(spans=True)
    asyncio.run(scene(bench))
    ((error, code),) = bench.failures
    assert f"rollout-n1s0r1 ended {MOST_DEATHS} times in a row" in error and code == EXIT_FAILED


def test_orders_to_trainer_ranks_carry_the_token_they_were_woken_under() -> None:
    async def scene(bench: Bench) -> None:
        await bench.workers.wake(bench.slab, TRAINER, 3)
        await bench.workers.order_trainers(m.TakeSnapshot(iteration=1))
        await bench.workers.order_trainers(m.OpenStore(host="h"))

    bench = Bench()
    asyncio.run(scene(bench))
    assert bench.kinds() == [("Wake", 3), ("TakeSnapshot", 3), ("OpenStore", 0)]


def test_a_failed_order_names_the_worker_and_keeps_its_exit_code() -> None:
    bench = Bench()
    bench.socket.answers[m.Build] = lambda _: m.Failed(error="no such layer", exit_code=2)
    with pytest.raises(WorkerFailed, match="trainer-n0r0: no such layer") as caught:
        asyncio.run(bench.workers.order_trainers(m.Build(stem="x", attempt=1)))
    assert caught.value.exit_code == 2
