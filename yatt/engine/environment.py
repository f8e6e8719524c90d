"""What engine libraries read from the process environment, set before they are imported.

torch fixes its thread count and vLLM its process model at import, so this runs first in an engine's
process and imports neither.
"""

import importlib.util
import os
from typing import Literal

from yatt.engine.protocol import EngineKind
from yatt.errors import ConfigError


def prepare(*, device: Literal["cpu", "cuda"], threads: int) -> None:
    """Set the variables of this process; they outrank what the user's shell had."""
    variables = {
        # The engine lives in this process: its memory and its death are this worker's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables |= {
            # More OpenMP threads than free cores spin against each other: 5 to 30 times slower.
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # Small @torch.compile helpers cost seconds at first use even with enforce_eager.
            "TORCH_COMPILE_DISABLE": "1",
            # Engines of several workers would each bind their threads to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    os.environ.update(variables)


def choose_engine(wanted: str, key: str) -> EngineKind:
    """The engine of the run file's word; `auto` is vllm where it can be imported, else transformers.

    Raises:
        ConfigError: the library is not installed.
    """
    if wanted == "scripted":
        return "scripted"
    kinds: tuple[EngineKind, ...] = ("vllm", "transformers")
    for kind in kinds:
        if wanted in ("auto", kind) and importlib.util.find_spec(kind) is not None:
            return kind
    raise ConfigError(
        f"{key}: {wanted} needs "
        + ("vllm or transformers, and neither" if wanted == "auto" else f"the package {wanted}, which")
        + " can be imported here; install yatt[engine] in the environment of the nodes."
    )


def choose_device(wanted: str) -> Literal["cpu", "cuda"]:
    """The device of the run file's word, without importing torch.

    auto is CUDA where the driver is loaded, unless the controller gave this process no GPU, which it
    says by an empty CUDA_VISIBLE_DEVICES.
    """
    if wanted == "auto":
        may_see_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        return "cuda" if may_see_gpus and os.path.exists("/dev/nvidiactl") else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"
