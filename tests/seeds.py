"""Seeds of the tests that draw something: a failed test tells what repeats it."""

import os
import sys
import time


class Seed(int):
    """A seed, and the environment variable that sets it."""

    variable: str


def seed_of(variable: str) -> Seed:
    """Returns what the environment variable holds. Without it, the seed of the whole run, which is new each
    time: all processes of a run draw the same, so that they agree on the parameters of their tests."""
    seed = Seed(os.environ.get(variable) or os.environ.get("YATT_DRAW") or time.time_ns() % 1_000_000)
    seed.variable = variable
    tell(seed)
    return seed


def tell(seed: Seed) -> None:
    """Prints it: pytest shows what a failed test printed."""
    sys.stdout.write(f"drawn with {seed.variable}={seed}\n")
