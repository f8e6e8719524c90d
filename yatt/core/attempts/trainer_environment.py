"""Environment variables that megatron-core, torch and Transformer Engine want in a trainer rank on a GPU.

They are set where the user has not set them. The user's value is kept if it costs speed only, and refused if
it breaks a guarantee of the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from yatt.config.schema import RunConfig

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DETERMINISTIC: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
}
"""Values with which a rank gives bit-equal results; the first one is set.

Sources: torch.use_deterministic_algorithms (CUBLAS_WORKSPACE_CONFIG); megatron-core's TEDotProductAttention,
which refuses deterministic_mode otherwise; Megatron-LM's check of --deterministic-mode (NCCL_ALGO).
"""


@dataclass(frozen=True, slots=True)
class Contrary:
    """A variable that the user has set against what a trainer rank wants.

    Attributes:
        is_refused: whether it breaks a guarantee of the run.
    """

    name: str
    says: str
    is_refused: bool


def trainer_variables(config: RunConfig) -> dict[str, str]:
    """Returns the variables of trainer ranks on GPUs."""
    wanted = {CONNECTIONS: "1"} if _overlaps(config) else {}
    if config.run.deterministic:
        wanted |= {name: values[0] for name, values in DETERMINISTIC.items()}
    return wanted


def contrary_variables(config: RunConfig, env: Mapping[str, str]) -> Iterator[Contrary]:
    """Returns the variables of the user that differ.

    Args:
        env: of the process that starts the ranks.
    """
    connections = env.get(CONNECTIONS, "1")
    if _overlaps(config) and connections != "1":
        says = (
            f"is {connections}; with tensor or context parallelism on GPUs before Blackwell, megatron-core "
            "overlaps communication with matrix products only if it is 1. Unset it there."
        )
        yield Contrary(CONNECTIONS, says, False)
    for name, values in DETERMINISTIC.items() if config.run.deterministic else ():
        if env.get(name, values[0]) not in values:
            says = (
                f"is {env[name]}, with which run.deterministic gives no equal results; unset it, or write "
                f"{' or '.join(values)}."
            )
            yield Contrary(name, says, True)


def _overlaps(config: RunConfig) -> bool:
    layout = config.trainer
    return layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
