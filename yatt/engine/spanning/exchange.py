"""How vLLM's ranks of one engine exchange what they need at their start."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def rank_exchange() -> Iterator[None]:
    """Keeps pickles from the network between the ranks of an engine, in this context: what vLLM's set-up
    sends are literals; its message queue, over plain TCP, is not used by these ranks and is not opened. Nor
    is the shared memory of its CPU build: all engines of a machine would have it under one name."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.platforms import current_platform

    from yatt.collectives.exchange import literal_exchange

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(_without(MessageQueue, "create_from_process_group"))
        if current_platform.is_cpu():
            replaced.enter_context(_without(CpuCommunicator, "_all_group_ranks_share_shm_group_name"))
        replaced.enter_context(literal_exchange())
        yield


@contextlib.contextmanager
def _without(owner: type, name: str) -> Iterator[None]:
    """Replaces a method by one that returns None, in this context."""
    original = owner.__dict__[name]
    setattr(owner, name, staticmethod(_nothing))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _nothing(*_: Any, **__: Any) -> None:
    return None
