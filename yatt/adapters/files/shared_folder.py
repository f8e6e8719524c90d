"""Measures the guarantees of a shared folder, with the same calls that a run makes on it.

Several processes, on one or more nodes, use the folder together and measure: are exclusive creates exclusive,
are renamed files complete, when does one process see another's write, how long does a durable write take.
Times are round trips on one clock: clocks of two nodes are never compared.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from yatt.adapters.files.files import create_exclusively, read_or_none, write_atomically
from yatt.errors import DeadlineExceeded

POLL_S = 0.002
WAIT_S = 60.0
CLAIM_ROUNDS, ECHO_ROUNDS, WRITES = 40, 10, 20
CLAIMS_S, READING_S = 10.0, 1.0
WHOLE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and maximum of several measurements, in seconds."""

    median_s: float
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all members."""

    members: int
    nodes: int
    claim_rounds: int
    claim_faults: int
    """Rounds with no winner or with several."""

    reads: int
    torn: int
    """Number of reads of an incomplete file."""

    backward: int
    """Number of reads of an older version than a previous read."""

    new_name: Spread
    """Seconds from writing a new file to seeing all answers: twice the delay, and the writing."""

    new_content: Spread
    """The same for a file that is replaced."""

    write: Spread
    """Seconds of one durable write of a small file: temporary file, fsync, rename, fsync of the folder."""


class Member:
    """One of `count` processes that test `folder`; number 0 leads."""

    def __init__(self, folder: Path, *, index: int, count: int, node: str) -> None:
        self._folder, self._index, self._count, self._node = folder, index, count, node

    def measure(self) -> Report | None:
        """Runs the whole test; returns the report in the leader, None in the others.

        Raises:
            DeadlineExceeded: another member did not answer in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._meet("start")
        won = self._claims()
        self._meet("claimed")
        seen = self._whole()
        self._meet("read")
        names = self._echo(new_names=True)
        contents = self._echo(new_names=False)
        writes = self._writes()
        mine = {"node": self._node, "won": won, "seen": seen, "names": names, "contents": contents}
        self._publish(f"result-{self._index}", json.dumps({**mine, "writes": writes}))
        if self._index:
            self._publish(f"end-{self._index}", "")
            return None
        report = self._summary()
        for other in range(1, self._count):  # afterwards no member uses the folder
            self._text(f"end-{other}", owner=other)
        return report

    def _claims(self) -> list[int]:
        """Returns the rounds that this member won. The leader opens each round and closes the last."""
        won, until_s = [], time.monotonic() + CLAIMS_S
        for turn in range(CLAIM_ROUNDS + 1):
            is_last = turn == CLAIM_ROUNDS or time.monotonic() > until_s
            self._publish(f"ready-{turn}-{self._index}", "")
            if self._index == 0:
                self._all(f"ready-{turn}")
                self._publish(f"go-{turn}", "stop" if is_last else str(turn))
            if self._text(f"go-{turn}", owner=0) == "stop":
                break
            if create_exclusively(self._folder / f"claim-{turn}", f"{self._index}".encode()):
                won.append(turn)
        self._publish(f"turns-{self._index}", str(turn))
        return won

    def _whole(self) -> tuple[int, int, int]:
        """Returns the numbers of all, incomplete and outdated reads of a file that the leader keeps
        replacing."""
        reads = torn = backward = newest = version = 0
        path, until_s = self._folder / "whole", time.monotonic() + READING_S
        while time.monotonic() < until_s:
            if self._index == 0:
                version += 1
                write_atomically(path, f"{version:08d}".encode() * (WHOLE_BYTES // 8))
            elif (data := read_or_none(path)) is not None:
                reads += 1
                if len(data) != WHOLE_BYTES or data != data[:8] * (WHOLE_BYTES // 8):
                    torn += 1
                    continue
                backward += int(data[:8]) < newest
                newest = max(newest, int(data[:8]))
        return reads, torn, backward

    def _echo(self, *, new_names: bool) -> list[float]:
        """Returns the seconds until the leader has all answers to its write."""
        took = []
        for turn in range(ECHO_ROUNDS):
            word = f"{turn}"
            ask, answer = (f"ask-{turn}", f"answer-{turn}") if new_names else ("question", "reply")
            if self._index == 0:
                start_s = time.monotonic()
                self._publish(ask, word)
                for other in range(1, self._count):
                    self._text(f"{answer}-{other}", owner=other, wanted=word)
                took.append(time.monotonic() - start_s)
            else:
                self._text(ask, owner=0, wanted=word)
                self._publish(f"{answer}-{self._index}", word)
        return took

    def _writes(self) -> list[float]:
        took = []
        for turn in range(WRITES):
            start_s = time.monotonic()
            self._publish(f"write-{self._index}-{turn}", "x" * 4096)
            took.append(time.monotonic() - start_s)
        return took

    def _summary(self) -> Report:
        results = [json.loads(self._text(f"result-{other}", owner=other)) for other in range(self._count)]
        turns = int(self._text("turns-0", owner=0))
        winners = [sum(turn in result["won"] for result in results) for turn in range(turns)]
        return Report(
            members=self._count,
            nodes=len({result["node"] for result in results}),
            claim_rounds=turns,
            claim_faults=sum(count != 1 for count in winners),
            reads=sum(result["seen"][0] for result in results),
            torn=sum(result["seen"][1] for result in results),
            backward=sum(result["seen"][2] for result in results),
            new_name=_spread(results[0]["names"]),
            new_content=_spread(results[0]["contents"]),
            write=_spread([took for result in results for took in result["writes"]]),
        )

    def _meet(self, where: str) -> None:
        self._publish(f"{where}-{self._index}", "")
        self._all(where)

    def _all(self, name: str) -> None:
        for other in range(self._count):
            self._text(f"{name}-{other}", owner=other)

    def _publish(self, name: str, text: str) -> None:
        write_atomically(self._folder / name, f"{text}\n".encode())

    def _text(self, name: str, *, owner: int, wanted: str | None = None) -> str:
        """Waits for a file, with content `wanted` if given; returns its content."""

        def there() -> str | None:
            data = read_or_none(self._folder / name)
            text = None if data is None else data.decode().rstrip("\n")
            return text if wanted is None or text == wanted else None

        return _wait(there, who=f"process {owner} of {self._count}", where=self._folder)


def _spread(took: list[float]) -> Spread:
    return Spread(median_s=median(took), longest_s=max(took))


def _wait(there: Callable[[], str | None], *, who: str, where: Path) -> str:
    until_s = time.monotonic() + WAIT_S
    while (found := there()) is None:
        if time.monotonic() > until_s:
            raise DeadlineExceeded(
                f"{who} wrote nothing to {where} for {WAIT_S:g} s. It has ended, or its node has another "
                "folder at this path, which is then not shared."
            )
        time.sleep(POLL_S)
    return found
