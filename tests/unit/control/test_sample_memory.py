"""What a controller keeps of a token: tests/bench/memory.py at a small size."""

import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc

from hypothesis import given, strategies as st

from tests.bench.memory import KEPT, PEAK, SAMPLES, filled, travelled
from tests.runs import HANG_S
from yatt.control.training import orders_of_rank, sample_portions
from yatt.records import cluster as c, message as m

TOKEN_BYTES = 8
"""An id and a log-prob, packed."""


def test_a_completion_token_is_kept_in_little_more_than_its_packed_bytes() -> None:
    draw, num_groups, num_tokens = random.Random(7), 8, 1024
    filled(0, draw, num_tokens)
    tracemalloc.start()
    try:
        groups = [filled(number, draw, num_tokens) for number in range(num_groups)]
        told = travelled(groups)
        kept = tracemalloc.get_traced_memory()[0] / (num_groups * SAMPLES * num_tokens)
    finally:
        tracemalloc.stop()
    assert len(told[1].facts) == num_groups * SAMPLES
    assert TOKEN_BYTES <= kept <= 12, f"{kept:.2f} bytes a token"


def test_samples_on_their_way_to_the_ranks_are_a_portion_at_a_time() -> None:
    """And not a third and fourth time, in a frame kept to be sent again and in a copy of zmq's."""
    argv = [sys.executable, "-m", "tests.bench.memory", "128", "8192"]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=HANG_S, env=env)
    seen = json.loads(done.stdout)
    assert seen[KEPT] <= seen[PEAK] <= 12, seen


def rollout(number: int, size: int) -> m.Rollout:
    return m.Rollout(
        sample_id=number,
        turns=(m.Turn(bytes(4)), m.Turn(bytes(size), is_sampled=True, logprobs=bytes(size))),
    )  # fmt: skip


@given(st.lists(st.integers(1, 40).map(lambda words: 4 * words), max_size=20))
def test_portions_hold_every_sample_once_and_are_as_few_as_the_order_allows(sizes: list[int]) -> None:
    rollouts = tuple(rollout(number, size) for number, size in enumerate(sizes))
    cut = sample_portions(rollouts, most_bytes=200)
    assert tuple(r for portion in cut for r in portion) == rollouts
    weights = [[4 + 2 * len(r.turns[1].token_ids) for r in portion] for portion in cut]
    assert all(sum(each) <= 200 or len(each) == 1 for each in weights)
    assert all(sum(each) + after[0] > 200 for each, after in itertools.pairwise(weights))


def test_a_rank_without_samples_is_sent_only_its_order() -> None:
    order = c.TrainOrder(iteration=3, facts=(), plan=(), dp_lead_ranks=(0,))
    assert orders_of_rank(order, ()) == ([], m.Train(iteration=3, facts=(), plan=()))
