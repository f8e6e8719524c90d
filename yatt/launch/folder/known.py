"""The runs that a user has started, for `yatt list`: one run folder per line, in the user's state folder."""

import os
import sys
from pathlib import Path

from yatt.adapters.files.files import append_line, make_private
from yatt.adapters.files.lines import lines_of, make_ready
from yatt.errors import ConfigError
from yatt.plain_files import open_regular


def known_file() -> Path:
    """Path of the list: $XDG_STATE_HOME/yatt/runs, usually ~/.local/state/yatt/runs."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "yatt" / "runs"


def remember_run(root: Path) -> None:
    """Adds a run folder to the list. If the list cannot be written, the run starts anyway."""
    path = known_file()
    try:
        make_private(path.parent)
        make_ready(path)
        append_line(path, str(root))
    except (OSError, ConfigError) as error:
        sys.stderr.write(
            f"yatt: note: {path} cannot be written ({error}); to list this run, use `yatt list FOLDER`\n"
        )


def known_runs() -> list[Path]:
    """Run folders in the list that still exist, without duplicates: the one that was started last comes
    last."""
    try:
        with open_regular(known_file()) as file:
            lines = [line.rstrip(b"\n") for line in lines_of(file) if line is not None]
    except OSError:
        return []
    roots = dict.fromkeys(os.fsdecode(line) for line in reversed(lines) if line.startswith(b"/"))
    return [Path(root) for root in reversed(roots) if os.path.exists(f"{root}/config.yaml")]
