"""``samples.jsonl``: some completions with their scores per iteration, for the report."""

from yatt.adapters.files.lines import Record, is_number
from yatt.obs.metrics import of_iteration


def as_sample(record: Record) -> Record | None:
    """Returns the record if the report can show it: scores are numbers, scores and verdicts are objects."""
    scores, verdicts = record.get("scores") or {}, record.get("verdicts") or {}
    is_shown = isinstance(scores, dict) and isinstance(verdicts, dict)
    if of_iteration(record) is None or not is_shown:
        return None
    numbers = (record.get("reward", 0.0), *scores.values())
    return record if all(value is None or is_number(value) for value in numbers) else None


COMPLETION, THOUGHT = "completion", "/thought"


def judge_said(name: str) -> str:
    """Returns what an entry of a sample's `verdicts` is: the answer of a GenRM, or the thought before it."""
    of = name.removesuffix(THOUGHT)
    return f"answer of GenRM {name}" if of == name else f"thought of GenRM {of}"


def spoken_turns(record: Record) -> list[tuple[str, str]]:
    """Returns what followed the prompt of a sample, with who said it: `COMPLETION`, or each turn with its
    role (policy, environment); torn turns are left out."""
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        text = record.get("completion")
        return [(COMPLETION, text)] if isinstance(text, str) else []
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    return [(str(role), text) for role, text in pairs if isinstance(text, str)]


def picture_list(record: Record) -> list[str]:
    """Returns the paths of a sample's pictures, or the digests of those without one."""
    media = record.get("media")
    return [each for each in media if isinstance(each, str)] if isinstance(media, list) else []


def pictures_in_words(record: Record) -> str:
    """Returns a sample's pictures with their sizes; empty: it has none."""
    names, sizes = picture_list(record), record.get("media_sizes")
    found = sizes if isinstance(sizes, list) and len(sizes) == len(names) else [None] * len(names)
    words = []
    for name, size in zip(names, found, strict=True):
        is_size = isinstance(size, list) and len(size) == 2 and all(type(side) is int for side in size)
        words.append(f"{name} ({size[0]} x {size[1]})" if is_size else name)
    return ", ".join(words)
