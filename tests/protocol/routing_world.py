"""Nodes that ask and two with an engine each: real routers, engines' tables and announcements of room, with
every message under way between them.

A schedule is a list of moves. A world is built anew for each schedule, so it need not be copied.
"""

import asyncio
import functools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.control.engine_stand_in import completion, rows_of
from tests.unit.core.test_placement import disaggregated
from yatt.adapters.net.channel import Channel
from yatt.config.schema import RunConfig
from yatt.control.controller import Controller
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.rooms import RoomAnnouncer
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import ROLLOUT, Placement, placement_of
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.records.cluster import EngineRoom

STOPPED, ABORTED, FAILED = "stop", "abort", "failed"
WATCHED = (3, 5)
MOST_MESSAGES = 400
"""More messages than any schedule needs: a request that is sent to and fro for ever exceeds them."""


@dataclass
class Kinds:
    """The classes of a world, of which a planted mistake replaces one, `rollout.max_retries`, and the role
    that is asked."""

    router: type[Router] = Router
    engines: type[LocalEngines] = LocalEngines
    announcer: type[RoomAnnouncer] = RoomAnnouncer
    retries: int = 3
    role: str = ROLLOUT


@dataclass
class Mail:
    """A message on its way; `asked` has the future of a request's answer."""

    body: m.Message
    asked: "asyncio.Future[m.Message] | None" = None
    is_answer: bool = False


class Wire:
    """In place of a connection: what is sent waits until it is delivered, in order."""

    def __init__(self, queue: deque[Mail]) -> None:
        self._queue = queue
        self._pending: list[asyncio.Future[m.Message]] = []

    async def request(self, _: str, body: m.Message, __: float, watch: object = None) -> m.Message:
        asked: asyncio.Future[m.Message] = asyncio.get_running_loop().create_future()
        self._pending.append(asked)
        self._queue.append(Mail(body, asked))
        return await asked

    def send(self, _: str, body: m.Message) -> None:
        self._queue.append(Mail(body))

    def fail_waiting(self, _: str, error: Exception) -> None:
        for asked in self._pending:
            if not asked.done():
                asked.set_exception(error)

    async def failure(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to close."""


class Hands:
    """In place of the socket to a node's engine: it has what it was sent at once, and answers when told."""

    def __init__(self) -> None:
        self.running: dict[str, m.SampleRequest] = {}
        self.completed: Callable[[str, m.Completed], None] = lambda *_: None

    async def tell(self, to: str, body: m.Message, *, token: int = 0) -> None:
        if isinstance(body, m.SampleRequest):
            self.running[body.request_id] = body
        if isinstance(body, m.Abort):
            for request_id in body.request_ids:
                if (sample := self.running.pop(request_id, None)) is not None:
                    self.completed(to, completion(sample, [7], ABORTED))

    def answer(self, to: str, request_id: str, reason: str) -> None:
        self.completed(to, completion(self.running.pop(request_id), [7], reason))


@dataclass
class Place:
    """One node: its parts, and whether its engine is awake, falls asleep, or is away."""

    node: Node
    hands: Hands
    engines: LocalEngines
    router: Router
    controller: Controller
    stage: str = "away"

    @property
    def address(self) -> str:
        return f"engine{self.node.index}"


@functools.cache
def settings(num_askers: int, retries: int) -> tuple[RunConfig, Placement]:
    """The same for many worlds: both are frozen."""
    config = disaggregated(num_askers + 2, num_askers, 1, genrms=1, slabs=1)
    config = replace(
        config, run=replace(config.run, deterministic=True),
        placement=replace(config.placement, split="dynamic"),
        rollout=replace(config.rollout, max_retries=retries),
    )  # fmt: skip
    return config, placement_of(config)


class World:
    """The nodes of one run.

    Args:
        names: requests, dealt to the nodes that ask; those with the same text before `:` are one group.
    """

    def __init__(self, kinds: Kinds, names: tuple[str, ...], num_askers: int = 1) -> None:
        self.askers, self.sides = range(num_askers), (num_askers, num_askers + 1)
        self._kinds = kinds
        self._config, self._placement = settings(num_askers, kinds.retries)
        self.queues: dict[tuple[int, int], deque[Mail]] = {
            pair: deque()
            for asker in self.askers
            for side in self.sides
            for pair in ((asker, side), (side, asker))
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: set[int] = set()
        self.results: dict[str, list[str]] = {name: [] for name in names}
        self.num_delivered, self.is_aborted = 0, False
        self.peers: dict[int, Peers] = {}
        self.places = {index: self._place(index) for index in (*self.askers, *self.sides)}
        for number, name in enumerate(names):
            self._begin(self._ask(name, self.places[number % num_askers].router))

    # ---- moves ----------------------------------------------------------------------------------

    def moves(self) -> list[tuple[str, Any]]:
        """What may happen next, apart from losses and aborts."""
        found: list[tuple[str, Any]] = [
            ("deliver", pair) for pair, queue in self.queues.items() if queue and not self.lost & set(pair)
        ]
        for index in set(self.sides) - self.lost:
            at = self.places[index]
            found += [("answer", (index, key)) for key in at.hands.running if at.stage != "away"]
            found.append(({"away": "wake", "awake": "drain", "leaving": "slept"}[at.stage], index))
        return found

    async def move(self, kind: str, what: Any) -> None:
        """Carries out one move, and what follows from it in each process by itself."""
        await getattr(self, f"_{kind}")(what)
        await self.settle()

    async def settle(self) -> None:
        """Until nobody has anything to do, or for ever so long."""
        ready = vars(asyncio.get_running_loop())["_ready"]
        for _ in range(12):
            await asyncio.sleep(0)
            if not ready:
                break

    async def _deliver(self, pair: tuple[int, int]) -> None:
        self.num_delivered += 1
        assert self.num_delivered < MOST_MESSAGES, "messages without end"
        mail, (sender, receiver) = self.queues[pair].popleft(), pair
        if mail.is_answer:
            if mail.asked is not None and not mail.asked.done():
                mail.asked.set_result(mail.body)
            return
        self._begin(self._handled(mail, sender, receiver))

    async def _answer(self, what: tuple[int, str]) -> None:
        index, key = what
        self.places[index].hands.answer(self.places[index].address, key, STOPPED)

    async def _wake(self, index: int) -> None:
        at = self.places[index]
        at.stage = "awake"
        await at.engines.add(at.address, self._kinds.role, at.node.slabs[0], 1)

    async def _drain(self, index: int) -> None:
        """As `Workers.sleep` begins."""
        at = self.places[index]
        at.stage = "leaving"
        at.engines.drain(at.address)

    async def _slept(self, index: int) -> None:
        """As `Workers.sleep` ends: the engine has returned what it ran, then answered."""
        at = self.places[index]
        at.stage = "away"
        for key in list(at.hands.running):
            at.hands.answer(at.address, key, ABORTED)
        at.engines.remove(at.address, "was put to sleep")

    async def _die(self, index: int) -> None:
        """The engine's process is killed."""
        at = self.places[index]
        at.stage = "away"
        at.hands.running.clear()
        at.engines.remove(at.address, "ended: killed", is_blamed=True)

    async def _lose(self, index: int) -> None:
        self.lost.add(index)
        for asker in self.askers:
            self.peers[asker].exclude(index, "is lost")

    async def _abort(self, _: None) -> None:
        self.is_aborted = True
        for asker in self.askers:
            await self.places[asker].router.abort(self._kinds.role)

    # ---- what is seen ---------------------------------------------------------------------------

    @property
    def awake(self) -> list[int]:
        return [
            index for index in self.sides if self.places[index].stage == "awake" and index not in self.lost
        ]

    def running(self) -> Counter[str]:
        """How many engines that are not lost run each request."""
        found: Counter[str] = Counter()
        for index in set(self.sides) - self.lost:
            found.update(sample_name(key) for key in self.places[index].hands.running)
        return found

    def key(self) -> str:
        """The same for worlds that go on alike."""
        routers = [router_key(self.places[asker].router) for asker in self.askers]
        mail = {pair: [shown(each) for each in queue] for pair, queue in self.queues.items()}
        nodes = [self._node_key(self.places[index]) for index in self.sides]
        return str((routers, mail, nodes, self.results, sorted(self.lost)))

    def _node_key(self, at: Place) -> object:
        requests = [
            (sample_name(key), each.engine, each.is_aborted)
            for key, each in at.engines._requests.by_key.items()
        ]
        return at.stage, requests, [sample_name(key) for key in at.hands.running], at.engines.version

    async def close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- inside ---------------------------------------------------------------------------------

    def _place(self, index: int) -> Place:
        node = Node(
            config=self._config, paths=RunPaths(Path("/r")), placement=self._placement, attempt=1,
            index=index, host="", device="cpu",
        )  # fmt: skip
        hands, peers, progress = Hands(), Peers(), Progress(int)
        self.peers[index] = peers
        peers.lines.dial_with(lambda name, _: self._dial(index, int(name.removeprefix("node"))))
        engines = self._kinds.engines(hands, self._config)  # type: ignore[arg-type]
        hands.completed = engines.completed
        router = self._kinds.router(node, engines, peers, progress)
        rooms = self._kinds.announcer(node, engines, peers)
        parts: Any = SimpleNamespace(
            engines=engines, router=router, rooms=rooms, peers=peers, publications=SimpleNamespace(take=None),
            given_weights=SimpleNamespace(describe=None, offer=None),
            judges=SimpleNamespace(use=_use_no_others),
        )  # fmt: skip
        return Place(node, hands, engines, router, Controller(node, parts, None))

    def _dial(self, sender: int, receiver: int) -> Channel:
        return Wire(self.queues[sender, receiver])  # type: ignore[return-value]

    async def _handled(self, mail: Mail, sender: int, receiver: int) -> None:
        answer = await self.places[receiver].controller.handle(f"node{sender}", mail.body)
        if mail.asked is not None and answer is not None:
            self.queues[receiver, sender].append(Mail(answer, mail.asked, is_answer=True))

    async def _ask(self, name: str, router: Router) -> None:
        """As `Episodes` does: a completion whose engine was put to sleep is continued while sampling may. A
        verdict is not: it comes whole. Log-probs of watched tokens are joined as tokens are."""
        reason, part, role, tokens, rows = m.MOVED, 0, self._kinds.role, b"", b""
        while reason == m.MOVED and not (part and (self.is_aborted or role != ROLLOUT)):
            sample = m.SampleRequest(
                request_id=f"{name}/{part}", prompt_ids=m.pack_ids([1]), seed=1, temperature=1.0, top_p=1.0,
                top_k=-1, max_tokens=4, group=name.partition(":")[0], watched=WATCHED,
            )  # fmt: skip
            try:
                completed = await router.complete(role, sample)
                reason, tokens, rows = (
                    completed.finish_reason,
                    tokens + completed.token_ids,
                    rows + completed.watched,
                )
            except Exception as error:  # noqa: BLE001 (looked at)
                reason = f"{FAILED}: {error}"
            part += 1
        if rows != rows_of(sample, m.unpack_ids(tokens)):
            reason = f"{FAILED}: log-probs of watched tokens are lost"
        self.results[name].append(reason)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def router_key(router: Router) -> object:
    dispatch = router._dispatch
    calls = sorted((key, c.server, c.suspicion) for key, c in dispatch._calls.items())
    servers = sorted((name, s.room, s.elsewhere) for name, s in dispatch._servers.items())
    order = [list(waiting) for waiting in dispatch._waiting.values()]
    return calls, servers, order, sorted(router._versions.items())


def sample_name(key: str) -> str:
    """`name` of the request id `node0/name/part#number`."""
    return key.split("/")[1]


def shown(mail: Mail) -> tuple[str, str]:
    body = mail.body
    match body:
        case EngineRoom():
            return "room", f"{body.room} {body.version}"
        case _:
            sample = getattr(body, "sample", None) or getattr(body, "completed", None)
            room = f"{getattr(body, 'room', '')} {getattr(body, 'version', '')}"
            return type(body).__name__, f"{sample_name(sample.request_id) if sample else ''} {room}"


async def _use_no_others(_: m.Message) -> m.Message:
    return m.Done()
