"""Sets the environment variables that engine libraries read, before they are imported.

torch sets its thread count and vLLM its process model at import, so this runs first in an engine's
process and imports neither.
"""

import importlib.util
import os
from typing import Literal

from yatt.engine.protocol import EngineKind
from yatt.errors import ConfigError


def prepare_environment(*, device: Literal["cpu", "cuda"], threads: int) -> None:
    """Sets the variables of this process; they override those of the user's shell."""
    variables = {
        # The engine runs in this process, so the controller can measure its memory and end it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables |= {
            # With more OpenMP threads than free cores, spinning makes it 5 to 30 times slower.
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # Small @torch.compile helpers take seconds at first use even with enforce_eager.
            "TORCH_COMPILE_DISABLE": "1",
            # Engines of several workers would each bind their threads to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        # FlashInfer's sampler has no seeds of requests and no log-probs of the sampled distribution, so our
        # requests never use it, installed or not. But vLLM imports it at start, and ends if it is missing.
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.update(variables)


def prepare_rank(rank: int, num_ranks: int) -> None:
    """Sets the variables by which vLLM knows this process's place in an engine of several processes. Each
    process sees its own GPU only."""
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()})


def choose_engine(wanted: str, key: str) -> EngineKind:
    """Returns the configured engine; `auto` is vllm if it can be imported, else transformers.

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
    """Returns the configured device, without importing torch.

    auto is CUDA if the driver is loaded, unless CUDA_VISIBLE_DEVICES is empty: then the controller
    assigned no GPU to this process.
    """
    if wanted == "auto":
        may_see_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        return "cuda" if may_see_gpus and os.path.exists("/dev/nvidiactl") else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"
