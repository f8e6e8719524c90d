"""Where the workers of this node keep compiled code: with the user's other runs, or for this attempt only."""

import logging
from pathlib import Path

from yatt.adapters.compiler_cache import CompilerCache, cache_variables
from yatt.control.node import Node

_LOG = logging.getLogger(__name__)


class CompiledCode:
    """Caches of the engines and trainer ranks on GPUs. Without GPUs nothing is compiled."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._cache = _user_cache(Path(node.config.launch.scratch_dir)) if node.device == "cuda" else None

    def variables(self) -> dict[str, str]:
        """Returns environment variables of workers; the user's settings have priority."""
        if self._node.device != "cuda":
            return {}
        return self._cache.variables() if self._cache else cache_variables(self._node.scratch)

    def close(self) -> None:
        """Allows the removal of the user's cache, when no worker runs any more."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _user_cache(folder: Path) -> CompilerCache | None:
    try:
        return CompilerCache(folder)
    except OSError as error:
        _LOG.warning(
            "compiled code is not kept for the next start: no private folder in launch.scratch_dir (%s): %s. "
            "Remove what is at its place, or name another node-local folder.", folder, error,
        )  # fmt: skip
        return None
