"""The arms of tests/bench/media.py: what holds a batch of prompts with pictures, and what consumes it.

python -m tests.bench.media_arms FOLDER references|text|bytes|rows NUM_PROMPTS   (one arm; prints its figures)

`references`: a controller, from its rows to the samples for the trainer, with a leader, an engine and a media
process. `text`: the same, without the pictures of its prompts. `bytes`, `rows`: a single controller that has
the pictures' files in its batch, or their decoded pixel rows for each sample. Each consumer is a process of
its own.
"""

import asyncio
import gc
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.bench.media_process import media_server
from tests.bench.memory import SHAPING, resident_bytes
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.control.gpus.engines import engine_room
from yatt.control.gpus.prepared_requests import PreparedRequests
from yatt.control.gpus.seen_pictures import MOST_WINDOW_BYTES, PATCH_BYTES, pictures_of, windows_of
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.groups import PromptGroup, SampleState
from yatt.control.training import orders_of_rank
from yatt.core.gpus.placement import ROLLOUT, dp_lead_ranks
from yatt.core.samples.balance import Cost, plan_iteration
from yatt.media.decode import decode_picture
from yatt.media.fetch import MediaSources
from yatt.records import cluster as c, message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame
from yatt.records.media import MediaItem

REFERENCES, TEXT, BYTES, ROWS = "references", "text", "bytes", "rows"
ENGINE, LEADER, CONSUMER = "engine", "leader", "consumer"
TOKENS, DP_SIZE = 64, 8
END = b"end"
SILENCE_MS = 300_000
MOST_WAITING = 16
"""Messages that a single controller has on their way."""

Added = dict[str, tuple[int, int]]
"""Bytes that pictures add to each kind of message, and how often one does."""


class PeakMemory:
    """The rise of this process's peak of resident memory, from its making."""

    def __init__(self) -> None:
        gc.collect()
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # the peak counts from here
        self._before = resident_bytes()

    def rise(self) -> int:
        return peak_bytes("self") - self._before


def peak_bytes(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


class Consumer:
    """A process of this module that takes messages and answers."""

    def __init__(self, folder: Path, role: str, *, most_waiting: int = 0) -> None:
        context = zmq.Context.instance()
        self._push, self._pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._push.set_hwm(most_waiting)
        self._pull.set_hwm(0)
        endpoints = [f"ipc://{folder}/{role}-{os.getpid()}-{way}" for way in ("to", "from")]
        self._push.bind(endpoints[0])
        self._pull.bind(endpoints[1])
        argv = [sys.executable, "-m", "tests.bench.media_arms", str(folder), role, *endpoints]
        self._process = subprocess.Popen(argv)
        self.receive()  # it is ready

    def send(self, *frames: bytes) -> int:
        """Sends a message; returns its bytes."""
        self._push.send_multipart(frames)
        return sum(map(len, frames))

    def receive(self) -> bytes:
        return self._pull.recv()

    async def received(self) -> bytes:
        """As `receive`, in the event loop."""
        return await zmq.asyncio.Socket.shadow(self._pull).recv()

    def end(self) -> dict[str, int]:
        """Ends the process; returns the figures that it answers."""
        self.send(END)
        found = json.loads(self.receive())
        assert self._process.wait(60) == 0
        return found


def messages_of(endpoints: list[str]) -> tuple[Iterator[list[bytes]], Callable[[bytes], None]]:
    """A consumer's messages until the last one, and what sends its answers."""
    context = zmq.Context.instance()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVTIMEO, SILENCE_MS)  # who sends may have been killed
    pull.connect(endpoints[0])
    push.set_hwm(0)
    push.connect(endpoints[1])

    def received() -> Iterator[list[bytes]]:
        push.send(b"ready")
        while (frames := pull.recv_multipart())[0] != END:
            yield frames

    return received(), push.send


def engine(folder: Path, endpoints: list[str]) -> None:
    """A scripted engine, which maps the prepared file of each picture; it answers with Completed."""
    from dataclasses import replace

    from yatt.engine.protocol import rollout_options
    from yatt.engine.scripted import ScriptedEngine

    config = load_run_config([folder / "run" / "config.yaml"], [])
    options = replace(rollout_options(config, "cpu"), media_folder=str(folder / "kept"))
    scripted = ScriptedEngine(options)
    scripted.start()
    received, answer = messages_of(endpoints)
    num_pictures, memory = 0, PeakMemory()
    for (frame,) in received:
        sample = decode_body(decode_frame(frame))
        assert isinstance(sample, m.SampleRequest)
        scripted.add(sample)
        (completed,) = scripted.abort()
        num_pictures += len(sample.media)
        answer(encode_frame(1, 1, 0, completed))
    answer(json.dumps({"memory": memory.rise(), "pictures": num_pictures}).encode())


def leader(endpoints: list[str]) -> None:
    """The leader's part of an iteration: decides from metadata which rank trains on which sample."""
    ordered(c.Advanced(groups=(), missing=0))
    received, answer = messages_of(endpoints)
    memory = PeakMemory()
    for (frame,) in received:
        advanced = decode_body(decode_frame(frame))
        assert isinstance(advanced, c.Advanced)
        answer(encode_frame(1, 1, 0, ordered(advanced)))
    answer(json.dumps({"memory": memory.rise()}).encode())


def ordered(advanced: c.Advanced) -> c.TrainOrder:
    facts = tuple(fact for group in advanced.groups for fact in group.samples)
    plan = plan_iteration(
        facts, groups_per_step=max(len(advanced.groups), 1), dp_size=DP_SIZE, cap_tokens=4096, cost=Cost()
    )
    leads = dp_lead_ranks(tp_size=1, cp_size=1, dp_size=DP_SIZE)
    return c.TrainOrder(iteration=1, facts=facts, plan=plan, dp_lead_ranks=leads)


def consumer(endpoints: list[str]) -> None:
    """What a single controller sends to: unpacks each message and drops it."""
    received, answer = messages_of(endpoints)
    memory = PeakMemory()
    for frames in received:
        pickle.loads(frames[0])  # noqa: S301 (what a driver's consumers do)
        answer(b"")
    answer(json.dumps({"memory": memory.rise()}).encode())


def opened_shard(folder: Path) -> tuple[RunConfig, DataShard]:
    config = load_run_config([folder / "run" / "config.yaml"], [])
    rows = RowFiles(config.data.train_files, config.data, folder)
    shard = DataShard(config, rows, Tokenizer(config.model.path))
    shard.open(0)
    return config, shard


def opened_groups(shard: DataShard, num_prompts: int) -> list[PromptGroup]:
    groups = [group for group, _ in map(shard.open, range(num_prompts)) if group is not None]
    assert len(groups) == num_prompts
    return groups


def requests_of(group: PromptGroup) -> list[m.SampleRequest]:
    return [
        m.SampleRequest(
            request_id=f"{group.number}/{sample.index}/0", prompt_ids=group.prompt, seed=sample.index,
            temperature=1.0, top_p=1.0, top_k=-1, max_tokens=TOKENS, group=f"{group.number}",
            media=group.media,
        )
        for sample in group.samples
    ]  # fmt: skip


def added_bytes(body: m.Message, without: m.Message) -> int:
    """Bytes that pictures add to a message."""
    return len(encode_frame(1, 1, 0, body)) - len(encode_frame(1, 1, 0, without))


class Controller:
    """One iteration of a controller, by the functions of the real one.

    Args:
        room: requests that the engine takes at a time, as `yatt.control.rollouts.router` gives it room.
    """

    def __init__(self, folder: Path, media: Any, room: int) -> None:
        self._media, self._prepared = media, PreparedRequests(media.prepare, folder / "kept")
        self._kept, self._room = str(folder / "kept"), asyncio.Semaphore(room)
        self._engine, self._leader = Consumer(folder, ENGINE), Consumer(folder, LEADER)
        self._running: dict[str, asyncio.Future[m.Completed]] = {}
        self._draw = random.Random(7)
        self.added: Added = {}
        self.request_bytes = self.sample_bytes = 0

    async def play(self, groups: list[PromptGroup]) -> None:
        receiving = asyncio.create_task(self._receive())
        await asyncio.gather(*map(self._sample, groups))
        receiving.cancel()
        facts = tuple(group.fact({"exact": 1.0}, SHAPING, 1) for group in groups)
        self._leader.send(encode_frame(1, 1, 0, c.Advanced(groups=facts, missing=0)))
        order = decode_body(decode_frame(self._leader.receive()))
        assert isinstance(order, c.TrainOrder)
        rollouts = tuple(each for group in groups for each in group.rollouts().values())
        await self._see(rollouts)
        transfers, train = orders_of_rank(order, rollouts)
        self.sample_bytes = sum(len(encode_frame(1, 1, 0, body)) for body in (*transfers, train))
        for rollout in rollouts:
            body = c.SampleTransfer(iteration=1, rollouts=(rollout,))
            without = c.SampleTransfer(iteration=1, rollouts=(without_pictures(rollout),))
            self._count("a sample to a trainer rank", body, without, 1)

    async def _sample(self, group: PromptGroup) -> None:
        tasks = zip(group.samples, requests_of(group), strict=True)
        await asyncio.gather(*(self._complete(sample, request) for sample, request in tasks))

    async def _complete(self, sample: SampleState, request: m.SampleRequest) -> None:
        """Has one sample completed, and scores it."""
        async with self._room:
            request = await self._prepared.with_prepared(request)
            future = asyncio.get_running_loop().create_future()
            self._running[request.request_id] = future
            without = msgspec.structs.replace(request, media=())
            self._count("a request to an engine", request, without, 1)
            self.request_bytes += self._engine.send(encode_frame(1, 1, 0, request))
            completed = await future
        assert completed.finish_reason == "abort"
        sample.extend(self._draw.randbytes(4 * TOKENS), self._draw.randbytes(4 * TOKENS), 1)
        sample.end_turn("length")
        sample.finish_reason, sample.scores = "length", {"exact": self._draw.random()}

    async def _receive(self) -> None:
        while True:
            completed = decode_body(decode_frame(await self._engine.received()))
            assert isinstance(completed, m.Completed)
            self._running.pop(completed.request_id).set_result(completed)

    async def _see(self, rollouts: tuple[m.Rollout, ...]) -> None:
        """As `SeenPictures.show`."""
        for window in windows_of(pictures_of(rollouts), MOST_WINDOW_BYTES // PATCH_BYTES):
            answer = await self._media.prepare(window)
            seen = tuple(m.PreparedPicture(window[e.index].sha256, e.digest) for e in answer.items)
            order = m.SeePictures(iteration=1, folder=self._kept, pictures=seen)
            asked, num = m.PrepareMedia(items=window), len(window)
            self._count("an order to the media process", asked, m.PrepareMedia(items=()), num)
            self._count("its answer", answer, msgspec.structs.replace(answer, items=()), num)
            self._count("an order to see", order, msgspec.structs.replace(order, pictures=()), num)

    def _count(self, kind: str, body: m.Message, without: m.Message, num: int) -> None:
        size, before = self.added.get(kind, (0, 0))
        self.added[kind] = size + added_bytes(body, without), before + num

    def end(self) -> dict[str, dict[str, int]]:
        return {ENGINE: self._engine.end(), LEADER: self._leader.end()}


def without_pictures(rollout: m.Rollout) -> m.Rollout:
    turns = tuple(msgspec.structs.replace(turn, media=()) for turn in rollout.turns)
    return msgspec.structs.replace(rollout, turns=turns)


async def references(folder: Path, num_prompts: int, *, sees: bool) -> dict[str, Any]:
    config, shard = opened_shard(folder)
    async with media_server(folder / "run", folder / "kept") as media:
        controller = Controller(folder, media, engine_room(config, ROLLOUT))
        first, _ = shard.open(0)
        assert first is not None
        ref = first.media[0].ref
        await media.prepare((MediaItem(ref.path, ref.sha256),))
        media_before, memory = peak_bytes(media.pid), PeakMemory()
        groups = opened_groups(shard, num_prompts)
        for group in groups:
            group.media = group.media if sees else ()
        await controller.play(groups)
        rise = memory.rise()
        ends = controller.end()
        assert ends[ENGINE]["pictures"] == num_prompts * config.rollout.n * sees
        return {
            "controller": rise, "leader": ends[LEADER]["memory"], "engine": ends[ENGINE]["memory"],
            "media process": peak_bytes(media.pid) - media_before, "requests": controller.request_bytes,
            "sent": controller.request_bytes + controller.sample_bytes,
            "added": controller.added,
        }  # fmt: skip


def single(folder: Path, kind: str, num_prompts: int) -> dict[str, Any]:
    """A single controller with the pictures in its batch."""
    config, shard = opened_shard(folder)
    sources = MediaSources(config.data.media_root, config.data.media_store, {}, config.media.timeout_s)
    to = Consumer(folder, CONSUMER, most_waiting=MOST_WAITING)

    def content(ref: m.MediaRef) -> bytes:
        with sources.opened_source(MediaItem(ref.path, ref.sha256)) as source:
            return source.content(ref.sha256)

    rows_of = pixel_rows(config) if kind == ROWS else None
    first, _ = shard.open(0)
    assert first is not None
    if rows_of:
        rows_of(content(first.media[0].ref))  # the libraries' own memory is no part of the batch
    sent_bytes, memory = 0, PeakMemory()
    groups = opened_groups(shard, num_prompts)
    batch: list[list[Any]] = []  # for each sample
    for group in groups:
        pictures = [content(each.ref) for each in group.media]
        if rows_of:
            made = [rows_of(data) for data in pictures]
            batch += [[rows.copy() for rows in made] for _ in group.samples]
        else:
            batch += [pictures, *([] for _ in group.samples[1:])]  # each picture travels once
    requests = [request for group in groups for request in requests_of(group)]
    for request, pictures in zip(requests, batch, strict=True):
        sent_bytes += to.send(pickle.dumps({"prompt_ids": request.prompt_ids, "pictures": pictures}))
    for _ in requests:
        to.receive()
    rise = memory.rise()
    to.end()
    return {"controller": rise, "sent": sent_bytes}


def pixel_rows(config: RunConfig) -> Callable[[bytes], Any]:
    """Decodes a picture to the rows that the model's processor makes: [rows, 1536] float32."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(config.model.path)

    def made(data: bytes) -> Any:
        picture = decode_picture(data, config.media.most_pixels)
        return processor(images=[picture], return_tensors="pt")["pixel_values"].numpy()

    return made


def main(folder: Path, role: str, more: list[str]) -> None:
    if role in (ENGINE, LEADER, CONSUMER):
        {ENGINE: lambda: engine(folder, more), LEADER: lambda: leader(more),
         CONSUMER: lambda: consumer(more)}[role]()  # fmt: skip
        return
    num_prompts = int(more[0])
    found = (
        asyncio.run(references(folder, num_prompts, sees=role == REFERENCES))
        if role in (REFERENCES, TEXT)
        else single(folder, role, num_prompts)
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
