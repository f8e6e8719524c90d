"""A run on a terminal: a live line for people who watch, plain lines where nobody can.

Plain lines are one an iteration and one for each thing worth knowing; they are the same text that
stands above the live line.
"""

import contextlib
import math
import sys
from typing import Any, TextIO

from yatt.obs.metrics import STEP
from yatt.obs.view import RunView
from yatt.printable import printable, printable_lines


class Console:
    """Shows a `RunView`.

    Args:
        out: where to; a terminal gets the live line.
    """

    def __init__(self, view: RunView, out: TextIO = sys.stdout) -> None:
        self._view, self._out = view, out
        self._live: Any = None
        self._has_failed = False
        if out.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(console=RichConsole(file=out), refresh_per_second=4, transient=True)
            self._live.start()

    def update(self) -> None:
        """Take in what is new and show it. What goes wrong here is said once and never ends the run."""
        try:
            self._update()
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if not self._has_failed:
                self._has_failed = True
                self.say(f"the display failed, the run goes on: {error!r}")

    def _update(self) -> None:
        rows = self._view.refresh()
        for sentence in self._view.news:
            self.say(sentence)
        for row in rows:
            self.say(row_line(row, self._view.total_iterations))
        if self._live is not None:
            self._live.update(printable(live_line(self._view)))

    def say(self, sentence: str) -> None:
        """One line that stays. A terminal that is gone is no reason to stop."""
        sentence = printable_lines(sentence)
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.console.print(sentence, markup=False, highlight=False)
            else:
                self._out.write(sentence + "\n")
                self._out.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.stop()


def row_line(row: dict[str, Any], total: int) -> str:
    """One iteration in a line."""
    parts = [f"iteration {row[STEP]}/{total}"]
    shown = (
        ("reward", "critic/rewards/mean", ".3f"), ("length", "response_length/mean", ".1f"),
        ("loss", "actor/pg_loss", ".4f"), ("kl", "actor/ppo_kl", ".4f"),
        ("grad norm", "actor/grad_norm", ".3f"), ("tokens/s", "perf/throughput", ".0f"),
        ("step s", "timing_s/step", ".1f"),
    )  # fmt: skip
    parts += [
        f"{name} {row[key]:{form}}" for name, key, form in shown if row.get(key) is not None and row[STEP]
    ]
    for key, value in row.items():
        if key.startswith("val-core/") and value is not None:
            source = key.removeprefix("val-core/").rsplit("/", 2)[0]  # may have slashes of its own
            parts.append(f"{source} {value:.3f}")
    return "  ".join(parts)


def live_line(view: RunView) -> str:
    """Where the run is now."""
    holders = " ".join(f"{slab}:{role}" for slab, role in sorted(view.holders.items()))
    eta_s = view.eta_s()
    eta = "" if eta_s is None else f"  left {duration(eta_s)}"
    return f"{view.phase}  {view.iteration}/{view.total_iterations}{eta}  {holders}"


def duration(seconds: float) -> str:
    """Seconds as 1h02m, 3m05s or 7s; what is not finite as it is."""
    if not math.isfinite(seconds):
        return str(seconds)
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
