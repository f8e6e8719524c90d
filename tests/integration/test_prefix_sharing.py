"""What the completions of prompt groups cost in prefill on two engines, against vLLM's own LLM on one."""

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.packages import needs
from tests.tiny_models import VOCAB_SIZE, make_qwen3
from tests.unit.core.test_placement import config as colocated
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import listening_socket
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.paths import RunPaths
from yatt.records import message as m

pytestmark = needs("vllm")
GROUPS, N, PROMPT_TOKENS = 6, 8, 512
MOST_RATIO = 1.1

COMMON = f"""
import json, os, sys
from yatt.engine.environment import prepare_environment
prepare_environment(device="cpu", threads=1)
from yatt.engine.build import build_engine
from yatt.engine.protocol import EngineOptions
from yatt.engine.vllm import engine_arguments
options = EngineOptions(
    model=sys.argv[1], dtype="float32", device="cpu", eos_ids=(2,), max_model_tokens={PROMPT_TOKENS} + 32,
    max_num_seqs=16, kv_cache_bytes=64 << 20,
)
computed = []
def count(outputs):
    for output in outputs:
        if output.finished:
            computed.append(len(output.prompt_token_ids) - output.num_cached_tokens)
    return outputs
"""

ENGINE = (
    COMMON
    + """
from yatt.adapters.net.worker_link import WorkerLink
from yatt.engine.worker import EnginePlan, EngineWorker
from yatt.records import message as m
def build(kind, options):
    engine = build_engine(kind, options)
    start = engine.start
    def counting():
        start()
        step = engine._llm.step
        engine._llm.step = lambda: count(step())
    engine.start = counting
    return engine
link = WorkerLink(sys.argv[3], worker=sys.argv[4], attempt=1)
link.send(m.Hello(worker=sys.argv[4], pid=os.getpid()))
plan = EnginePlan(kind="vllm", options=options, build=build, start_limit_s=60)
EngineWorker(link, plan).serve(os.getppid())
link.close()
open(sys.argv[2], "w").write(json.dumps(computed))
"""
)
"""An engine's real worker, which notes how many prompt tokens of each request it had to compute."""

REFERENCE = (
    COMMON
    + """
from vllm import LLM, SamplingParams
arguments = engine_arguments(options)
prompts = json.load(open(sys.argv[3]))
llm = LLM(**arguments)
asked = [{"prompt_token_ids": p} for p in prompts]
count(llm.generate(asked, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True), use_tqdm=False))
open(sys.argv[2], "w").write(json.dumps(computed))
"""
)


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(GROUPS)]


def request(group: int, index: int, ids: list[int]) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=f"{group}/{index}/0", prompt_ids=m.pack_ids(ids), seed=group * N + index,
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, ignore_eos=True, group=f"{group}",
    )  # fmt: skip


async def through_the_router(folder: Path, model: str) -> list[list[int]]:
    """Computed prompt tokens of each request, by engine."""
    base = colocated(1, 2, 0, 0)
    config = replace(base, rollout=replace(base.rollout, max_num_seqs=16))
    node = Node(
        config=config,
        paths=RunPaths(folder),
        placement=placement_of(config),
        attempt=1,
        index=0,
        host="",
        device="cpu",
    )
    context, endpoint = zmq.Context(), f"ipc://{folder}/server"
    here: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("e0", "e1")}

    def hear(sender: str, body: m.Message) -> None:
        if isinstance(body, m.Hello):
            here[sender].set()
        elif isinstance(body, m.Completed):
            engines.completed(sender, body)

    server = Channel(listening_socket(context, endpoint), attempt=1, handler=hear, resend_s=0)
    engines = LocalEngines(server, config)
    router = Router(node, engines, Peers(), Progress(int))
    workers = [started(ENGINE, model, folder / f"{name}.json", endpoint, name) for name in here]
    try:
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in here.values())), 300)
        await asyncio.gather(*(server.request(name, m.Wake(), 120, token=1) for name in here))
        for name, slab in zip(here, node.slabs, strict=True):
            await engines.add(name, ROLLOUT, slab, token=1)
        asked = [
            router.complete(ROLLOUT, request(g, i, ids)) for g, ids in enumerate(prompts()) for i in range(N)
        ]
        completed = await asyncio.wait_for(asyncio.gather(*asked), 300)
        assert [len(each.token_ids) // 4 for each in completed] == [8] * (GROUPS * N)
        await asyncio.gather(*(server.request(name, m.Stop(), 30) for name in here))
        assert [await asyncio.to_thread(worker.wait, 30) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        await server.close()
        context.term()
    return [json.loads((folder / f"{name}.json").read_text()) for name in here]


def started(program: str, *arguments: Any) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=env)


@pytest.mark.slow
def test_groups_on_two_engines_cost_the_prefill_of_one_engine_that_has_them_all(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "model", tied=True)
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    longer = json.dumps({**facts, "max_position_embeddings": 2 * PROMPT_TOKENS})
    (tmp_path / "model" / "config.json").write_text(longer)
    (tmp_path / "prompts.json").write_text(json.dumps([ids for ids in prompts() for _ in range(N)]))
    reference = started(REFERENCE, model, tmp_path / "reference.json", tmp_path / "prompts.json")
    assert reference.wait(300) == 0
    on_one = json.loads((tmp_path / "reference.json").read_text())
    on_two = asyncio.run(through_the_router(tmp_path, model))
    assert len(on_one) == sum(map(len, on_two)) == GROUPS * N
    assert all(len(each) >= N for each in on_two), "both engines have had work"
    assert sum(on_one) < GROUPS * PROMPT_TOKENS * 3, "vLLM shares the prefix of a group"
    ratio = sum(map(sum, on_two)) / sum(on_one)
    assert ratio <= MOST_RATIO, f"{ratio:.2f}: {on_two} against {on_one}"
