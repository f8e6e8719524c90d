"""The runs a person has started, for `yatt list`: one line a run folder in the person's own state folder."""

import os
from pathlib import Path

from yatt.adapters.files import append_line, make_private


def known_file() -> Path:
    """Where they are noted: $XDG_STATE_HOME/yatt/runs, usually ~/.local/state/yatt/runs."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "yatt" / "runs"


def remember(root: Path) -> None:
    """Note a run folder."""
    path = known_file()
    make_private(path.parent)
    append_line(path, str(root))


def known_runs() -> list[Path]:
    """Every noted run folder that is still there, oldest first, each once."""
    try:
        lines = known_file().read_text().splitlines()
    except FileNotFoundError:
        return []
    return [root for root in dict.fromkeys(map(Path, lines)) if (root / "config.yaml").exists()]
