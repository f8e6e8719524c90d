"""Reads the logs of a run's processes: time and level of each line, filters, and the end of large files.

A line without a time continues the line before it, and has its time. Of libraries, only warnings and errors
are shown by default: their other lines, warnings that come in each run, and progress bars say little about a
run. A log can have anything in
it: a line that is too long is cut, bytes that are no text are replaced, and no error is raised.
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from yatt.plain_files import open_regular

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
FIRST_BYTES = 256 << 10
MOST_BYTES = 64 << 20
"""Bytes at the end of a log that are searched at most."""

MOST_POLLED = 4 << 20
MOST_CHARS = 8192
"""Longest line that is shown whole."""

_NAMES = "|".join(LEVELS)
_OURS = re.compile(
    r"(?:submitit (?P<early>[A-Z]+) \()?"
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?)\)?"
    rf"(?:\s+(?P<level>{_NAMES})\s+(?P<logger>[^\s:]+))?"
)
_VLLM = re.compile(
    rf"(?:\([^()]{{1,80}}\)\s+)?(?P<level>{_NAMES})\s+(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?\s"
)
LIBRARIES = {
    "aiobotocore",
    "asyncio",
    "botocore",
    "datasets",
    "filelock",
    "fsspec",
    "httpx",
    "huggingface_hub",
    "matplotlib",
    "megatron",
    "numexpr",
    "s3fs",
    "safetensors",
    "torch",
    "torchao",
    "transformers",
    "urllib3",
    "vllm",
}
"""First names of loggers whose lines below a warning are left out."""

HARMLESS = (
    "sleep mode is not supported on CPU",  # weights are loaded again, and memory is given back without it
    "RotaryEmbedding: Failed to load weights",  # it has none
    "Model Runner V2 requires Triton",
    "Triton is not installed",
    "TORCH_COMPILE_DISABLE is set",  # nothing is compiled on CPU, and with rollout.enforce_eager
    "Enforce eager set",
    "Inductor compilation was disabled by user settings",
    "Passing raw prompts to InputProcessor is deprecated",
    "does not officially support disabling chunked prefill",  # seeded sampling on CPU needs it
    "The global random seed is set to",  # each request has a seed of its own
    "NUMA binding: Using MEMBIND policy",
    "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",  # vLLM's own
)
"""Parts of warnings that libraries give in each run on CPU, and that ask for nothing."""

_HARMLESS = re.compile("|".join(map(re.escape, HARMLESS)))
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
_ALARMING = re.compile(r"traceback|error|fatal|terminate|abort|kill|\[rank|\[[WEF]\d{4}", re.IGNORECASE)
"""In a line that may be a failure: a library's message of several lines is left out, but not this."""

_PROGRESS = re.compile(r"\d%\|.{0,200}\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines are shown.

    Args:
        level: least level; lines whose level is unknown are shown.
        text: part of the line; empty: any.
        since_s: least time, in seconds since 1970.
        is_all: also INFO lines and harmless warnings of libraries, and progress bars.
    """

    level: int = 0
    text: str = ""
    since_s: float = 0.0
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that is shown; `at_s`: its time, or that of the line that it continues."""

    at_s: float
    name: str
    text: str


class LogLines:
    """Decides line by line which lines of one log are shown.

    Args:
        begin_s: time of lines before the first one with a time.
    """

    def __init__(self, name: str, chosen: LogFilter, begin_s: float) -> None:
        self._name, self._chosen = name, chosen
        self.at_s, self._is_shown, self._is_in_noise = begin_s, False, False

    def of(self, lines: Iterable[bytes]) -> Iterator[LogLine]:
        """Yields the lines that are shown, of these next lines of the log."""
        for line in lines:
            text = _text(line)
            if self._shows(text):
                yield LogLine(self.at_s, self._name, text)

    def _shows(self, text: str) -> bool:
        head = _head(text, self.at_s)
        is_progress = not self._chosen.is_all and _PROGRESS.search(text) is not None
        if head is None:
            if not self._chosen.is_all and text.startswith("[W") and _HARMLESS.search(text) is not None:
                return False  # a warning of torch, which is whole; any other line may end a traceback
            is_new = bool(text) and not text[0].isspace() and self._is_wanted(text)
            is_new = is_new and (not self._is_in_noise or _ALARMING.search(text) is not None)
            self._is_shown = self._is_shown or (is_new and not is_progress)
            return self._is_shown and not is_progress
        self.at_s = max(self.at_s, head.at_s)  # a clock that is set back does not change the order
        is_noise = not self._chosen.is_all and head.is_noise
        self._is_in_noise = is_noise and head.may_continue
        is_low = 0 < head.level < self._chosen.level
        self._is_shown = not (is_noise or is_low or is_progress) and self._is_wanted(text)
        return self._is_shown

    def _is_wanted(self, text: str) -> bool:
        return self.at_s >= self._chosen.since_s and self._chosen.text in text


@dataclass(frozen=True, slots=True)
class _Head:
    """`level` is 0 if the line has none. vLLM gives each line of a message a time, so none continues one."""

    at_s: float
    level: int
    is_noise: bool
    may_continue: bool = True


def _head(text: str, before_s: float) -> _Head | None:
    """Returns time and level of a line; None if it has no time.

    Args:
        before_s: time of the line before it, from which a time without a year gets its year.
    """
    plain = _COLOURS.sub("", text[:400])
    if (match := _OURS.match(plain)) is not None:
        at_s = _seconds(match["time"].replace(",", "."))
        level = LEVELS.get(match["level"] or match["early"] or "", 0)
        is_library = (match["logger"] or "").partition(".")[0] in LIBRARIES
        return None if at_s is None else _Head(at_s, level, is_library and _is_noise(level, plain))
    if (match := _VLLM.match(plain)) is not None:
        year = datetime.fromtimestamp(before_s).year
        times = [_seconds(f"{each}-{match['time']}") for each in (year - 1, year, year + 1)]
        at_s = min(
            (each for each in times if each is not None), key=lambda t: abs(t - before_s), default=None
        )
        level = LEVELS[match["level"]]
        return None if at_s is None else _Head(at_s, level, _is_noise(level, plain), False)
    return None


def _is_noise(level: int, text: str) -> bool:
    """Whether a library's line says little about a run."""
    is_harmless = level == LEVELS["WARNING"] and _HARMLESS.search(text) is not None
    return level < LEVELS["WARNING"] or is_harmless


def _seconds(text: str) -> float | None:
    """Returns an ISO time as seconds since 1970; without an offset it is of this machine's time zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _text(line: bytes) -> str:
    """Returns a line as text: without its end, without what a progress bar has overwritten, cut if long."""
    text = line.rstrip(b"\r\n").rpartition(b"\r")[2].replace(b"\0", b"")
    shown = text[:MOST_CHARS].decode(errors="replace").expandtabs()
    return shown if len(text) <= MOST_CHARS else f"{shown} [{len(text) - MOST_CHARS} more bytes]"


class LogFile:
    """One log: its last lines, then the lines that are added.

    Args:
        is_new: read it from the beginning.
    """

    def __init__(self, name: str, path: Path, chosen: LogFilter, *, is_new: bool = False) -> None:
        self._name, self._path, self._chosen = name, path, chosen
        self._lines = LogLines(name, chosen, 0.0)
        self._offset = 0
        self._is_begun = is_new
        self.is_cut = False
        """Whether the log is larger than what was searched, and older lines might have been shown too."""

    def last(self, most: int, *, is_growing: bool) -> list[LogLine]:
        """Returns the last lines that are shown, at most `most`; later calls of `new` continue after them.

        Args:
            is_growing: leave an unfinished last line to `new`.
        """
        size, back = self._size(), FIRST_BYTES
        while True:
            begin = max(0, size - back)
            found, first_s = self._block(begin, size, most, is_growing=is_growing)
            is_old = first_s is not None and first_s < self._chosen.since_s
            if begin == 0 or len(found) >= most or is_old or back >= MOST_BYTES:
                self.is_cut = begin > 0 and len(found) < most and not is_old
                self._is_begun = True
                return found
            back *= 4

    def new(self) -> list[LogLine]:
        """Returns complete lines that were added and are shown."""
        size = self._size()
        if not self._is_begun or size < self._offset:  # it was written anew
            self._offset, self._is_begun = 0, True
        data = self._read(self._offset, min(size, self._offset + MOST_POLLED))
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= MOST_POLLED:  # no line is so long
            end = len(data)
        self._offset += end
        if not self._lines.at_s:
            self._lines.at_s = self._changed_s()
        return list(self._lines.of(data[:end].removesuffix(b"\n").split(b"\n"))) if end else []

    def _block(
        self, begin: int, end: int, most: int, *, is_growing: bool
    ) -> tuple[list[LogLine], float | None]:
        data = self._read(begin, end)
        skipped = data.find(b"\n") + 1 if begin else 0
        whole = data.rfind(b"\n") + 1 if is_growing else len(data)
        self._offset = begin + whole
        lines = data[skipped:whole].split(b"\n")
        changed_s = self._changed_s()
        first_s = next(filter(None, (_time_of(line, changed_s) for line in lines)), None)
        self._lines = LogLines(self._name, self._chosen, first_s or changed_s)
        if lines and not lines[-1]:
            lines.pop()
        return list(deque(self._lines.of(lines), maxlen=most)), first_s

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _changed_s(self) -> float:
        try:
            return os.stat(self._path).st_mtime
        except OSError:
            return 0.0

    def _read(self, begin: int, end: int) -> bytes:
        try:
            with open_regular(self._path) as file:
                file.seek(begin)
                return file.read(max(0, end - begin))
        except OSError:
            return b""


def _time_of(line: bytes, before_s: float) -> float | None:
    head = _head(_text(line), before_s)
    return head.at_s if head is not None else None


def merged_lines(logs: Iterable[Iterable[LogLine]], most: int) -> list[LogLine]:
    """Returns the last lines of all logs by time, at most `most`. Lines of one log keep their order."""
    found: list[LogLine] = []
    for lines in logs:
        found = sorted([*found, *lines], key=lambda line: line.at_s)[-most:]
    return found
