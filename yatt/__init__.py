"""Reinforcement learning of language models with generative reward models, as Slurm batch jobs."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `yatt.submit` on first use, because it needs libraries that the package itself does not."""
    if name == "submit":
        from yatt.launch.api import submit

        return submit
    raise AttributeError(f"module 'yatt' has no attribute '{name}'")
