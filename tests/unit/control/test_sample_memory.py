"""What a controller keeps of a token: tests/bench/memory.py at a small size."""

import json
import os
import random
import subprocess
import sys
import tracemalloc

from tests.bench.memory import KEPT, SAMPLES, filled, travelled

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


def test_samples_on_their_way_to_the_ranks_are_there_twice_at_most() -> None:
    """Not a third and fourth time, in a frame kept to be sent again and in a copy of zmq's."""
    argv = [sys.executable, "-m", "tests.bench.memory", "32", "8192"]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60, env=env)
    seen = json.loads(done.stdout)
    assert seen[KEPT] <= 12, seen
    # A third copy would be TOKEN_BYTES more; half of that is left to the allocator.
    assert seen["handing over, at most"] <= seen[KEPT] + 1.5 * TOKEN_BYTES, seen
