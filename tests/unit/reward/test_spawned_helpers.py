"""A reward function may spawn processes that call functions of its own file."""

import asyncio
from pathlib import Path

from yatt.adapters.inputs.user_module import load_module

TEXT = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import spawned_helper_{name}


def double(number):
    return spawned_helper_{name}.TIMES * number


def compute_score(numbers):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(double, numbers))
"""


def test_a_spawned_process_finds_the_module(tmp_path: Path) -> None:
    """Of two files with the same name."""
    found = []
    for times in (2, 3):
        folder = tmp_path / str(times)
        folder.mkdir()
        (folder / f"spawned_helper_{times}.py").write_text(f"TIMES = {times}\n")
        (folder / "reward.py").write_text(TEXT.replace("{name}", str(times)))
        found.append(load_module(folder / "reward.py", "rewards[a].path"))

    async def called() -> list[list[int]]:
        return [module.compute_score([1, 2]) for module in found]

    assert asyncio.run(called()) == [[2, 4], [3, 6]]
