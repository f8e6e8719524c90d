"""Reinforcement learning of language models with generative reward models, as Slurm batch jobs."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "check", "load_config", "open_run", "run", "submit"]

if TYPE_CHECKING:
    from yatt.launch.api import check, load_config, open_run, run, submit


def __getattr__(name: str) -> Any:
    """Imports a function of `yatt.launch.api` on first use: the command must start without its libraries."""
    if name in __all__:
        from yatt.launch import api

        return getattr(api, name)
    raise AttributeError(f"module 'yatt' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What there is, for completion in a shell or notebook."""
    return sorted(__all__)
