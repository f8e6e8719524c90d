"""``samples.jsonl``: some completions with their scores per iteration, for the report."""

from yatt.adapters.lines import Record, is_number
from yatt.obs.metrics import of_iteration


def as_sample(record: Record) -> Record | None:
    """Returns the record if the report can show it: scores are numbers, scores and verdicts are objects."""
    scores, verdicts = record.get("scores") or {}, record.get("verdicts") or {}
    is_shown = isinstance(scores, dict) and isinstance(verdicts, dict)
    if of_iteration(record) is None or not is_shown:
        return None
    numbers = (record.get("reward", 0.0), *scores.values())
    return record if all(value is None or is_number(value) for value in numbers) else None
