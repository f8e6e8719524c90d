"""What a nursery imports for engines; see `yatt.adapters.processes.nursery`."""

from typing import Literal, cast

from yatt.engine.build import import_library
from yatt.engine.environment import prepare_environment
from yatt.engine.protocol import EngineKind


def preload(kind: str, device: str, threads: int) -> None:
    """Imports what the process of an engine imports before its first order.

    Args:
        kind: of the engine. Scripted engines come from the nursery of reward processes, so for them the
            environment is left as it is; the child prepares its own.
        device: cpu or cuda.
        threads: `launch.threads_per_worker`.
    """
    if kind != "scripted":
        prepare_environment(device=cast(Literal["cpu", "cuda"], device), threads=threads)
    import_library(cast(EngineKind, kind))
    if kind == "vllm":
        import yatt.engine.vllm
    elif kind == "transformers":
        import yatt.engine.transformers
    else:
        import yatt.engine.scripted  # noqa: F401
