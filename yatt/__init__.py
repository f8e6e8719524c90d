"""Reinforcement learning of language models with generative reward models, as Slurm batch jobs."""

from typing import TYPE_CHECKING, Any

from yatt.version import __version__

__all__ = ["__version__", "check", "load_config", "open_run", "run", "submit"]

if TYPE_CHECKING:
    from yatt.launch.commands.api import check, load_config, open_run, run, submit


def __getattr__(name: str) -> Any:
    """Imports a function of `yatt.launch.commands.api` on first use: the command must start without its
    libraries."""
    if name in __all__:
        from yatt.launch.commands import api

        return getattr(api, name)
    raise AttributeError(f"module 'yatt' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What there is, for completion in a shell or notebook."""
    return sorted(__all__)
