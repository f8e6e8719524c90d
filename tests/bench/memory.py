"""What a controller keeps of the samples of one iteration, in bytes a token."""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq

from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import listening_socket
from yatt.control.rollouts.groups.groups import PromptGroup, new_group
from yatt.control.training import PORTION_BYTES, orders_of_rank
from yatt.core.gpus.placement import dp_lead_ranks
from yatt.core.samples.balance import Cost, plan_iteration
from yatt.core.samples.rewards import Shaping
from yatt.records import cluster as c, message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame

GROUPS, SAMPLES, TOKENS, PROMPT_TOKENS = 512, 16, 8192, 512
DP_SIZE = 8
MOST_BYTES = 12.0
SHAPING = Shaping(max_tokens=TOKENS, buffer_tokens=0, factor=0.0, masks_truncated=False)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def arrived(number: int, index: int, draw: random.Random, num_tokens: int) -> m.Completed:
    """A completion as it comes over the wire: encoded, and decoded again."""
    told = c.Forwarded(
        completed=m.Completed(
            request_id=f"node0/{number}/{index}/0", token_ids=draw.randbytes(4 * num_tokens),
            logprobs=draw.randbytes(4 * num_tokens), finish_reason="stop", policy_version=7,
        ),
        room=64, version=3, elsewhere=0,
    )  # fmt: skip
    answer = decode_body(decode_frame(encode_frame(1, 1, 1, told)))
    assert isinstance(answer, c.Forwarded)
    return answer.completed


def filled(number: int, draw: random.Random, num_tokens: int, num_samples: int = SAMPLES) -> PromptGroup:
    """A prompt group, sampled and scored as `yatt.control.rollouts.sampling` does it."""
    prompt = [draw.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    group = new_group(number, number, "x" * 4 * PROMPT_TOKENS, prompt, num_samples)
    for sample in group.samples:
        completed = arrived(number, sample.index, draw, num_tokens)
        sample.extend(completed.token_ids, completed.logprobs, completed.policy_version)
        sample.finish_reason = completed.finish_reason
        sample.text = "y" * 4 * num_tokens
        sample.scores["exact"] = draw.random()
        sample.verdicts["judge"] = "z" * 200
    for sample in group.samples:
        sample.text = ""  # as when the group is resolved
    return group


def travelled(groups: list[PromptGroup]) -> tuple[c.Advanced, c.TrainOrder]:
    """What the leader hears of the groups, and orders."""
    facts = tuple(
        c.GroupFact(
            number=g.number, samples=g.facts({"exact": 1.0}, SHAPING), scores=g.mean_scores(),
            ages=(0,) * len(g.samples),
        )
        for g in groups
    )  # fmt: skip
    told = c.Advanced(groups=facts, missing=0)
    advanced = decode_body(decode_frame(encode_frame(1, 1, 1, told)))
    assert isinstance(advanced, c.Advanced)
    every = tuple(fact for group in advanced.groups for fact in group.samples)
    plan = plan_iteration(
        every, groups_per_step=128, dp_size=DP_SIZE, cap_tokens=4 * (TOKENS + PROMPT_TOKENS), cost=Cost()
    )
    leads = dp_lead_ranks(tp_size=1, cp_size=1, dp_size=DP_SIZE)
    order = decode_body(
        decode_frame(
            encode_frame(1, 1, 0, c.TrainOrder(iteration=8, facts=every, plan=plan, dp_lead_ranks=leads))
        )
    )
    assert isinstance(order, c.TrainOrder)
    return advanced, order


PEAK = "handing over, at most"
KEPT = "groups, what the leader is told, the order, what is to be sent"


def weigh(num_groups: int, num_tokens: int) -> tuple[dict[str, float], list[PromptGroup], c.TrainOrder]:
    """Resident bytes a completion token that a controller which is trainer node and leader keeps."""
    draw = random.Random(7)
    filled(0, draw, num_tokens)  # whatever is made once
    gc.collect()
    before = resident_bytes()
    total = num_groups * SAMPLES * num_tokens
    groups = [filled(number, draw, num_tokens) for number in range(num_groups)]
    gc.collect()
    kept = {"prompt groups": (resident_bytes() - before) / total}
    advanced, order = travelled(groups)
    rollouts = [group.rollouts() for group in groups]
    gc.collect()
    kept[KEPT] = (resident_bytes() - before) / total
    assert sum(map(len, rollouts)) == len(order.facts) and len(advanced.groups) == num_groups
    return kept, groups, order


RANKS = """
import sys, zmq
from yatt.adapters.net.worker_link import WorkerLink
from yatt.records import cluster, message as m
links = [WorkerLink(sys.argv[1], worker=f"trainer{rank}", attempt=1) for rank in range(int(sys.argv[2]))]
for rank, link in enumerate(links):
    link.send(m.Hello(worker=f"trainer{rank}", pid=1))
num = {link: 0 for link in links}
while num:
    for link in list(num):
        if (order := link.receive(0.001)) is None:
            continue
        num[link] += len(order.body.rollouts)
        is_last, seq = isinstance(order.body, m.Train), order.seq
        del order
        trained = m.Trained(metrics={"num": float(num[link])}, timing_s={})
        link.send(trained if is_last else m.Done(), reply_to=seq)
        if is_last:
            link.close()
            del num[link]
"""
"""Trainer ranks in one process: each answers with the number of its samples."""


async def handed_over(folder: Path, groups: list[PromptGroup], order: c.TrainOrder) -> float:
    """Bytes by which the process's peak rises while every rank of the node is handed its samples."""
    context, endpoint, here = zmq.Context(), f"ipc://{folder}/server", asyncio.Event()
    names: set[str] = set()

    def hear(sender: str, _: m.Message) -> None:
        names.add(sender)
        if len(names) == len(order.dp_lead_ranks):
            here.set()

    server = Channel(listening_socket(context, endpoint), attempt=1, handler=hear, resend_s=0)
    argv = [sys.executable, "-c", RANKS, endpoint, str(len(order.dp_lead_ranks))]
    ranks = await asyncio.create_subprocess_exec(*argv)
    await asyncio.wait_for(here.wait(), 60)
    mine = {sample_id: r for group in groups for sample_id, r in group.rollouts().items()}
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak counts from here
    before = resident_bytes()

    async def train(rank: int) -> m.Message:
        ids = sorted(i for step in order.plan for micro in step.micro_batches[rank] for i in micro)
        transfers, train_order = orders_of_rank(order, tuple(mine[i] for i in ids))
        for body in transfers:
            await server.request(f"trainer{rank}", body, 120.0)
        return await server.request(f"trainer{rank}", train_order, 120.0)

    answers = await asyncio.gather(*(train(rank) for rank in range(len(order.dp_lead_ranks))))
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    assert await ranks.wait() == 0
    await server.close()
    context.term()
    assert sum(a.metrics["num"] for a in answers if isinstance(a, m.Trained)) == len(mine)
    return float(peak - before)


def child(num_groups: int, num_tokens: int) -> None:
    """All figures of one size, as JSON; in a process of its own, for memory that is freed does not shrink."""
    kept, groups, order = weigh(num_groups, num_tokens)
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        extra = asyncio.run(handed_over(Path(folder), groups, order))
    kept[PEAK] = kept[KEPT] + extra / (num_groups * SAMPLES * num_tokens)
    print(json.dumps(kept))


def run() -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.bench.memory", str(GROUPS), str(TOKENS)]
    seen = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return {
        "title": "A controller's memory",
        "how": f"{GROUPS} prompt groups x {SAMPLES} completions of {TOKENS:,} tokens on a trainer node that "
        "is the leader too: real records, filled as sampling and scoring fill them, each completion decoded "
        "as it comes. Resident bytes a completion token, beyond those before. Handing over: the process's "
        f"peak while {DP_SIZE} local ranks, a process of their own, are sent their samples.",
        "head": ["what", "bytes a token"],
        "rows": [[what, f"{value:.2f}"] for what, value in seen.items()],
        "targets": [
            {"what": f"{KEPT}, bytes a token", "target": f"<= {MOST_BYTES:g}", "value": f"{seen[KEPT]:.2f}",
             "met": seen[KEPT] <= MOST_BYTES},
            {"what": f"{PEAK}, bytes a token", "target": f"<= {MOST_BYTES:g}", "value": f"{seen[PEAK]:.2f}",
             "met": seen[PEAK] <= MOST_BYTES},
        ],
        "notes": ["A completion token is 8 bytes: its id, and its log-prob. Samples are handed over in "
                  f"portions of {PORTION_BYTES >> 10} KiB a rank, there twice until it has them."],
    }  # fmt: skip


if __name__ == "__main__":
    child(int(sys.argv[1]), int(sys.argv[2]))
