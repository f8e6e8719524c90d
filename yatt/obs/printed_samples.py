"""A sample now and then among the lines of a run: whoever reads along sees what the policy writes."""

from pathlib import Path

from yatt.adapters.lines import Record, Tail, is_number
from yatt.obs.metrics import STEP
from yatt.obs.rollouts import ends_of
from yatt.obs.samples import as_sample, spoken


class PrintedSamples:
    """Reads new lines of `samples.jsonl`.

    Args:
        path: that file.
        every: one sample is given of each iteration that is a multiple of it; 0: none.
    """

    def __init__(self, path: Path, every: int) -> None:
        self._tail, self._every = Tail(path, as_sample), every
        self._last: tuple[object, object] = (None, None)

    def new(self) -> list[str]:
        """Returns lines about what was written since the last call. Of an iteration that another attempt
        trains again a sample is given again."""
        found: list[str] = []
        for record in self._tail.read()[0] if self._every else ():
            one = record.get("attempt"), record[STEP]
            if record[STEP] % self._every or record.get("dropped") or one == self._last:
                continue
            self._last = one
            found += lines_about(record)
        return found


def lines_about(record: Record) -> list[str]:
    """Returns lines about a recorded sample; long texts are shown by both ends."""
    reward, failed = record.get("reward"), record.get("failed")
    says = f"reward {reward:.3f}" if is_number(reward) else f"no reward{f': {failed}' if failed else ''}"
    head = f"  iteration {record[STEP]}, sample {record.get('sample', '-')}: {says}"
    prompt = record.get("prompt")
    texts = [*([("prompt", prompt)] if isinstance(prompt, str) else []), *spoken(record)]
    return [head, *(f"    {who}: {ends_of(' '.join(text.split()))}" for who, text in texts)]
