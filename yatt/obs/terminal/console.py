"""Output of a run: a live line on a terminal, plain lines elsewhere.

There is one plain line per iteration and one per notable event; on a terminal they appear above the live
line.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from yatt.obs.metrics import FAILED_SHARE, STEP, amount_in, is_validation
from yatt.obs.story.view import RunView
from yatt.obs.story.words import duration_in_words, phase_in_words
from yatt.obs.terminal.printed_samples import PrintedSamples
from yatt.printable import printable, printable_lines


class Console:
    """Shows a `RunView`.

    Args:
        out: output stream; a terminal gets the live line.
        samples: what is shown of them.
    """

    def __init__(
        self, view: RunView, out: TextIO = sys.stdout, samples: PrintedSamples | None = None
    ) -> None:
        self._view, self._out, self._samples = view, out, samples
        self._live: Any = None
        self._has_failed = False
        if out.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(console=RichConsole(file=out), refresh_per_second=4, transient=True)
            self._live.start()

    def pass_over(self) -> None:
        """Reads all events that are there, and shows none: an earlier start has shown them."""
        with self._guarded():
            self._view.refresh()
            if self._samples is not None:
                self._samples.pass_over()

    def update(self) -> None:
        """Reads and shows new events. An error is reported once and never ends the run."""
        with self._guarded():
            self._update()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if not self._has_failed:
                self._has_failed = True
                self.say(f"the display failed, the run continues: {error!r}")

    def _update(self) -> None:
        rows = self._view.refresh()
        for sentence in self._view.news:
            self.say(sentence)
        for row in rows:
            self.say(row_line(row, self._view.total_iterations))
        for line in self._samples.new() if self._samples is not None else ():
            self.say(line)
        if self._live is not None:
            self._live.update(printable(live_line(self._view)))

    def say(self, sentence: str) -> None:
        """Prints one permanent line. A closed terminal is not an error."""
        encoding = self._out.encoding or "utf-8"
        sentence = printable_lines(sentence).encode(encoding, "backslashreplace").decode(encoding)
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.console.print(sentence, markup=False, highlight=False, emoji=False)
            else:
                self._out.write(sentence + "\n")
                self._out.flush()

    def close(self) -> None:
        """Removes the live line."""
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.stop()


def row_line(row: dict[str, Any], total: int) -> str:
    """Returns one line about an iteration."""
    parts = [f"iteration {row[STEP]}/{total}"]
    shown = (
        ("reward", "critic/rewards/mean", ".3f"),
        ("length", "response_length/mean", ".1f"),
        ("loss", "train/loss", ".4f"),
        ("accuracy", "train/accuracy", ".3f"),
        ("held-out loss", "val/loss", ".4f"),
        ("held-out accuracy", "val/accuracy", ".3f"),
        ("loss", "actor/pg_loss", ".4f"),
        ("kl", "actor/ppo_kl", ".4f"),
        ("grad norm", "actor/grad_norm", ".3f"),
        ("tokens/s", "perf/throughput", ".0f"),
        ("step s", "timing_s/step", ".1f"),
    )
    parts += [
        f"{name} {row[key]:{form}}" for name, key, form in shown if row.get(key) is not None and row[STEP]
    ]
    return "  ".join([*parts, *validation_words(row)])


def validation_words(row: dict[str, Any]) -> list[str]:
    """Returns each data source's mean over held-out prompts, and how many of its completions failed."""
    means = {_source(key): value for key, value in row.items() if is_validation(key) and value is not None}
    shares = {_source(key): key for key in row if key.startswith("val-aux/") and key.endswith(FAILED_SHARE)}
    found = []
    for source in {**means, **shares}:
        mean = f"{means[source]:.3f}" if source in means else "unknown"
        key = shares.get(source, "")
        share, failed = amount_in(row, key), amount_in(row, f"{key.removesuffix(FAILED_SHARE)}failed")
        lost = f" ({failed:.0f} of {failed / share:.0f} failed)" if share and failed else ""
        found.append(f"validation {source} {mean}{lost}")
    return found


def _source(key: str) -> str:
    """The data source in a key of validation; it may have slashes of its own."""
    return key.partition("/")[2].rsplit("/", 2)[0]


def live_line(view: RunView) -> str:
    """Returns the live line: phase, iteration, time left, lease holders."""
    holders = " ".join(f"{slab}:{role}" for slab, role in sorted(view.story.slabs.holders.items()))
    eta_s = view.eta_s()
    eta = "" if eta_s is None else f"  left {duration_in_words(eta_s)}"
    return (
        f"{phase_in_words(view.story.phase)}  {view.story.iteration}/{view.total_iterations}{eta}  {holders}"
    )
