"""Where the workers of this node keep compiled code: with the user's other runs, or for this attempt only.

If `launch.scratch_dir` is mounted noexec, it is where the libraries put it.
"""

import logging
from pathlib import Path

from yatt.adapters.compiler_cache import CompilerCache, cache_variables, can_load_code
from yatt.control.node import Node

_LOG = logging.getLogger(__name__)


class CompiledCode:
    """Caches of the engines and trainer ranks on GPUs. Without GPUs nothing is compiled."""

    def __init__(self, node: Node) -> None:
        self._node = node
        folder = Path(node.config.launch.scratch_dir)
        self._is_kept = node.device == "cuda" and _is_loadable(folder)
        self._cache = _user_cache(folder) if self._is_kept else None

    def variables(self) -> dict[str, str]:
        """Returns environment variables of workers, which may be none; the user's settings have priority."""
        if not self._is_kept:
            return {}
        return self._cache.variables() if self._cache else cache_variables(self._node.scratch)

    def close(self) -> None:
        """Allows the removal of the user's cache, when no worker runs any more."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _is_loadable(folder: Path) -> bool:
    if can_load_code(folder):
        return True
    _LOG.warning(
        "launch.scratch_dir (%s) is mounted noexec, so compiled code could not be loaded from there: it is "
        "where the libraries put it, often under the home folder. Name another node-local folder.", folder,
    )  # fmt: skip
    return False


def _user_cache(folder: Path) -> CompilerCache | None:
    try:
        return CompilerCache(folder)
    except OSError as error:
        _LOG.warning(
            "compiled code is not kept for the next start: no private folder in launch.scratch_dir (%s): %s. "
            "Remove what is at its place, or name another node-local folder.", folder, error,
        )  # fmt: skip
        return None
