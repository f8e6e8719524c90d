"""A sample now and then among the lines of a run: whoever reads along sees what the policy writes."""

from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.files.lines import Record, Tail, is_number
from yatt.obs.metrics import STEP
from yatt.obs.rollouts import ends_of
from yatt.obs.samples import as_sample, spoken_turns

MOST_BYTES = 4 << 20
"""What is read of the file at a time: a run may have gigabytes of samples."""

MOST_TURNS = 6


class PrintedSamples:
    """Reads new lines of `samples.jsonl`.

    Args:
        path: that file. Each attempt writes it anew, without the iterations that it trains again.
        every: one sample is given of each iteration that is a multiple of it; 0: none.
    """

    def __init__(self, path: Path, every: int) -> None:
        self._tail, self._every = Tail(path, as_sample), every
        self._last = (0, 0)

    def new(self) -> list[str]:
        """Returns lines about what was written since the last call. Of an iteration that another attempt
        trains again a sample is given again."""
        return [line for record in self._unread() for line in self._lines(record)]

    def pass_over(self) -> None:
        """Notes what is there: it was given before."""
        for record in self._unread():
            self._lines(record)

    def _unread(self) -> Iterator[Record]:
        has_more = bool(self._every)
        while has_more:
            records, _ = self._tail.read(MOST_BYTES)
            yield from records
            has_more = self._tail.has_more

    def _lines(self, record: Record) -> list[str]:
        attempt = record.get("attempt")
        one = attempt if type(attempt) is int else 0, record[STEP]
        if record[STEP] % self._every or record.get("dropped") or one <= self._last:
            return []
        self._last = one
        return lines_about(record)


def lines_about(record: Record) -> list[str]:
    """Returns lines about a recorded sample; long texts are shown by both ends, and so are many turns."""
    reward, failed = record.get("reward"), record.get("failed")
    says = f"reward {reward:.3f}" if is_number(reward) else f"no reward{f': {failed}' if failed else ''}"
    head = f"  iteration {record[STEP]}, sample {record.get('sample', '-')}: {says}"
    prompt, said = record.get("prompt"), spoken_turns(record)
    if (left_out := len(said) - MOST_TURNS) > 0:
        half = MOST_TURNS // 2
        said = [*said[:half], ("...", f"{left_out} turns"), *said[-half:]]
    texts = [*([("prompt", prompt)] if isinstance(prompt, str) else []), *said]
    return [head, *(f"    {who}: {ends_of(' '.join(text.split()))}" for who, text in texts)]
