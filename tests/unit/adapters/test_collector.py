"""Passes of the garbage collector while many requests are under way."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from yatt.adapters.machine.collector import collect_rarely, without_collections, without_final_collections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def passes_of_a_switch() -> int:
    """Passes while 2,048 tasks wait, as when 1,024 nodes are ordered to prepare and to enter."""
    counted = 0

    def count(phase: str, _: dict[str, int]) -> None:
        nonlocal counted
        counted += phase == "start"

    async def switch() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(2048)]

        async def waits(future: "asyncio.Future[None]") -> None:
            await future

        tasks = [loop.create_task(waits(future)) for future in futures]
        await asyncio.sleep(0)
        for future in futures:
            future.set_result(None)
        await asyncio.gather(*tasks)

    gc.callbacks.append(count)
    try:
        asyncio.run(switch())
    finally:
        gc.callbacks.remove(count)
    return counted


def test_a_switch_among_a_thousand_nodes_is_not_gone_through_for_garbage() -> None:
    assert passes_of_a_switch() >= 3, "by default it is"
    collect_rarely()
    assert passes_of_a_switch() <= 1


def test_cyclic_garbage_is_found_all_the_same() -> None:
    collect_rarely()
    before = len(gc.get_objects())
    for _ in range(400_000):
        cycle: list[object] = []
        cycle.append(cycle)
    assert len(gc.get_objects()) - before < 100_000


def test_an_import_is_not_gone_through_and_what_it_made_never_again() -> None:
    counted = []
    gc.callbacks.append(lambda phase, _: counted.append(phase))
    try:
        with pytest.raises(ImportError), without_collections():
            kept: list[list[object]] = [[] for _ in range(200_000)]
            raise ImportError
    finally:
        gc.callbacks.pop()
    assert counted == []
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


def test_who_collects_by_itself_goes_on_doing_so() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_end_may_ask_for_a_collection_in_any_way() -> None:
    counted = []
    gc.callbacks.append(lambda phase, _: counted.append(phase))
    try:
        with without_final_collections():
            assert [gc.collect(), gc.collect(1), gc.collect(generation=2)] == [0, 0, 0]
    finally:
        gc.callbacks.pop()
    assert counted == []
