"""The screen of `yatt watch`: one steady picture of a run on a terminal, redrawn in place."""

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

from yatt.obs.metrics import STEP
from yatt.obs.story.view import RunView
from yatt.obs.story.words import duration_in_words, phase_in_words, short_number
from yatt.obs.terminal.console import row_line
from yatt.printable import printable

MOST_SAID = 200
LEAST_ROWS = 12
SHOWN_SLABS = 8
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
FULL, EMPTY = "\u2588", "\u2591"
CURVES = (
    ("reward", "critic/rewards/mean"),
    ("loss", "train/loss"),
    ("accuracy", "train/accuracy"),
    ("length", "response_length/mean"),
    ("entropy", "actor/entropy"),
    ("kl", "actor/ppo_kl"),
    ("grad norm", "actor/grad_norm"),
    ("tokens/s", "perf/throughput"),
    ("step s", "timing_s/step"),
)


class Screen:
    """Shows a `RunView`; has the methods of `yatt.obs.terminal.console.Console`.

    Args:
        out: a terminal.
    """

    def __init__(self, view: RunView, out: TextIO = sys.stdout) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._view = view
        self._said: deque[str] = deque(maxlen=MOST_SAID)
        self._terminal = RichConsole(file=out, highlight=False, markup=False)
        self._live = Live(console=self._terminal, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def update(self) -> None:
        """Reads new events and draws. It is no error if the terminal is closed or the run folder fails."""
        rows = self._view.refresh()
        self._said += [row_line(row, self._view.total_iterations) for row in rows]
        self._said += self._view.news
        self._draw()

    def say(self, sentence: str) -> None:
        """Adds one line to the newest ones."""
        self._said.append(sentence)
        self._draw()

    def close(self) -> None:
        """Leaves the last picture on the terminal."""
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()

    def _draw(self) -> None:
        from rich.text import Text

        with contextlib.suppress(OSError, ValueError):  # of the terminal, or of the run folder
            width, height = self._terminal.size
            lines = screen_lines(self._view, list(self._said), width, height - 1)
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)


def screen_lines(view: RunView, said: Sequence[str], width: int, height: int) -> list[str]:
    """Returns the picture: at most `height` lines of at most `width` characters, without control characters.

    Args:
        said: sentences about the run, oldest first; as many of the newest are shown as there is room for.
    """
    attempt = f"  attempt {view.story.attempt}" if view.story.attempt else ""
    lines = [f"{view.paths.root}  {view.state}{attempt}", progress_line(view, width), ""]
    lines += _curve_lines(view.rows, width)
    lines += _state_lines(view)
    room = max(height, LEAST_ROWS) - len(lines) - 1
    if room > 0 and said:
        lines += ["", *list(said)[-room:]]
    return [_cut(printable(line), width) for line in lines][: max(height, 1)]


def progress_line(view: RunView, width: int) -> str:
    """Returns the bar of iterations, their number, the share, the phase and the time left."""
    done, total = view.story.iteration, max(view.total_iterations, 1)
    if view.rows:
        done = max(done if view.story.phase != "ended" else 0, int(max(row[STEP] for row in view.rows)))
    share = min(1.0, done / total)
    eta_s = view.eta_s()
    left = f"  left {duration_in_words(eta_s)}" if eta_s and share < 1 else ""
    text = f" {done}/{total}  {100 * share:.0f}%  {phase_in_words(view.story.phase)}{left}"
    cells = max(8, min(40, width - len(text) - 2))
    filled = int(share * cells)
    return f"{FULL * filled}{EMPTY * (cells - filled)}{text}"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Returns the newest values as one line of bars."""
    newest = list(values)[-cells:]
    if not newest:
        return ""
    low, high = min(newest), max(newest)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in newest)


def _curve_lines(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for name, key in CURVES:
        values = [row[key] for row in rows if row[STEP] and _is_drawn(row.get(key))]
        if values:
            cells = max(8, min(60, width - 24))
            lines.append(f"{name:<10} {short_number(values[-1]):>9}  {sparkline(values, cells)}")
    return lines


def _is_drawn(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e100  # also False for NaN


def _state_lines(view: RunView) -> list[str]:
    story, saves = view.story, view.story.saves
    uploading = f"; {saves.uploading} is being uploaded" if saves.uploading else ""
    lines = [f"{'checkpoint':<10} {saves.committed or 'none yet'}{uploading}"]
    slabs = [] if story.ended else sorted(story.slabs.holders.items())
    lines += [f"{'GPUs ' + slab:<10} {role}" for slab, role in slabs[:SHOWN_SLABS]]
    if len(slabs) > SHOWN_SLABS:
        lines.append(f"{'':<10} and {len(slabs) - SHOWN_SLABS} more GPU sets")
    lines += [f"{'waits':<10} {who} for the checkpoint store: {error}" for who, error in saves.waits.items()][
        :1
    ]
    lines += [f"{'waits':<10} for {who}: {error}" for who, error in story.judging.silent.items()]
    return lines + [f"{'ALARM':<10} {alarm.name}: {alarm.message}" for alarm in story.judging.alarms.values()]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "\u2026"
