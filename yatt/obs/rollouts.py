"""Recorded rollouts: the files in ``rollouts/`` of the run folder, their lines, and their reader.

A file has the rollouts of one iteration and one trainer node: JSON lines, compressed by gzip. The first line
is the head (`kind: iteration`). Then there is a line for each sample (`kind: sample`) and for each answer of
a GenRM (`kind: judged`). An iteration that is repeated after a failure replaces its files, so the names are
the same in each attempt. Files are telemetry: a reader skips and counts what it cannot read.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from yatt.adapters.files.lines import Record, accept_all, is_number, lines_of, parsed_line, read_records
from yatt.obs.metrics import STEP, of_iteration
from yatt.obs.samples import as_sample
from yatt.paths import RunPaths
from yatt.plain_files import open_regular

HEAD, SAMPLE, JUDGED = "iteration", "sample", "judged"
_NAME = re.compile(r"([0-9]{6,12})\.([0-9]{1,6})\.jsonl\.gz")
CHUNK_BYTES = 1 << 20
LEVEL = 3
"""Level of compression: fast. Text is a third to a fifth of its size afterwards."""


def iterations_of(folder: Path) -> dict[int, list[Path]]:
    """Returns the files in the folder by iteration, by the node's index; empty if it cannot be listed."""
    found: dict[int, list[tuple[int, Path]]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        found.setdefault(int(match[1]), []).append((int(match[2]), folder / match[0]))
    return {iteration: [path for _, path in sorted(found[iteration])] for iteration in sorted(found)}


def compressed_file(records: Iterable[Record]) -> Iterator[bytes]:
    """Yields the content of a file; it holds one record and about a MiB at a time."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    for record in records:
        data = packer.compress(record_line(record).encode() + b"\n")
        if data:
            yield data
    yield packer.flush()


def record_line(record: Record) -> str:
    """Returns a record as one line of strict JSON in ASCII."""
    return json.dumps(strict_value(record), default=str, allow_nan=False)


def strict_value(value: Any) -> Any:
    """Returns the value for strict JSON: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): strict_value(each) for key, each in value.items()}
    return [strict_value(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(slots=True)
class RecordedIteration:
    """What is recorded of one iteration, of the newest attempt that trained it.

    Attributes:
        is_whole: whether it has every sample; else it has the few of `samples.jsonl`.
        samples: all samples, or only the chosen one; with `without_text`, without prompts and completions.
        num_unreadable: lines and ends of files that could not be read.
        num_replaced: files of earlier attempts, which are left out.
        num_missing: trainer nodes without a file.
    """

    iteration: int
    attempt: int = 0
    is_whole: bool = True
    samples: list[Record] = field(default_factory=list)
    judged: list[Record] = field(default_factory=list)
    num_unreadable: int = 0
    num_replaced: int = 0
    num_missing: int = 0


def read_iteration(paths: RunPaths, iteration: int, sample: int | None = None) -> RecordedIteration | None:
    """Returns what is recorded of an iteration; None if nothing is.

    Args:
        sample: keep only this sample, with its texts and the GenRMs' answers about it; None: keep all
            samples, without their texts.
    """
    found = _from_files(paths, iteration, sample)
    return found or _from_sample_lines(paths, iteration, sample)


def whole_samples(paths: RunPaths, iteration: int) -> Iterator[Record]:
    """Yields the samples of an iteration with their texts: every one if they were recorded, else those of
    `samples.jsonl`."""
    found = _from_files(paths, iteration, -1)
    if found is None:
        of_report, _ = read_records(paths.samples, as_sample)
        yield from (sample for sample in of_report if sample[STEP] == iteration)
        return
    for path in iterations_of(paths.rollouts)[iteration]:
        attempt = None
        for record in _records(path, RecordedIteration(iteration)):
            if record.get("kind") == HEAD:
                attempt = record.get("attempt")
            elif record.get("kind") == SAMPLE and attempt == found.attempt and as_recorded(record):
                yield record


def _from_files(paths: RunPaths, iteration: int, sample: int | None) -> RecordedIteration | None:
    files = [_one_file(path, iteration, sample) for path in iterations_of(paths.rollouts).get(iteration, [])]
    newest = max((file.attempt for file in files), default=0)
    if not newest:
        return None
    mine = [file for file in files if file.attempt == newest]
    samples = [each for file in mine for each in file.samples]
    return RecordedIteration(
        iteration,
        attempt=newest,
        samples=sorted(samples, key=lambda each: cast(int, each["sample"])),
        judged=[each for file in mine for each in file.judged],
        num_unreadable=sum(file.num_unreadable for file in files),
        num_replaced=sum(0 < file.attempt < newest for file in files),
        num_missing=max(0, max(file.num_missing for file in mine) - len(mine)),
    )


def _one_file(path: Path, iteration: int, sample: int | None) -> RecordedIteration:
    """Reads one file; attempt 0 if its head cannot be read. `num_missing` is the number of all nodes."""
    found = RecordedIteration(iteration)
    for record in _records(path, found):
        kind = record.get("kind")
        if kind == HEAD and type(record.get("attempt")) is int:
            found.attempt, nodes = record["attempt"], record.get("num_nodes")
            found.num_missing = nodes if type(nodes) is int else 0
        elif kind == SAMPLE:
            each = as_recorded(record)
            if each is None:
                found.num_unreadable += 1
            elif sample is None:
                found.samples.append(_without_texts(each))
            elif each["sample"] == sample:
                found.samples.append(each)
        elif kind == JUDGED and sample is not None and sample in _about(record):
            found.judged.append(record)
    return found


def _records(path: Path, found: RecordedIteration) -> Iterator[Record]:
    """Yields the readable records of a compressed file, and counts the rest."""
    try:
        with open_regular(path) as file, gzip.open(file) as text:
            for line in lines_of(cast(Any, text)):
                record, num_bad = parsed_line(line, accept_all)
                found.num_unreadable += num_bad
                if record is not None:
                    yield record
    except (OSError, EOFError, zlib.error):
        found.num_unreadable += 1


def _about(record: Record) -> list[int]:
    about = record.get("samples")
    return [each for each in about if type(each) is int] if isinstance(about, list) else []


def _without_texts(record: Record) -> Record:
    kept = {key: value for key, value in record.items() if key not in TEXTS}
    ends = {key: ends_of(record[key]) for key in ("prompt", "completion") if isinstance(record.get(key), str)}
    return {**kept, "texts": ends}


def ends_of(text: str) -> str:
    """Returns a text, or both ends of a long one."""
    return (
        text if len(text) <= MOST_PREVIEW else f"{text[: MOST_PREVIEW // 2]} ... {text[-MOST_PREVIEW // 2 :]}"
    )


MOST_PREVIEW = 400
"""Characters of a prompt or completion that the table of an iteration has: their ends, under `texts`."""

TEXTS = ("prompt", "completion", "verdicts", "turns", "ground_truth")


def as_recorded(record: Record) -> Record | None:
    """Returns the record if it is a sample that can be shown; its own names for what older lines lack."""
    if as_sample(record) is None:
        return None
    numbers = [record.get(key) for key in ("sample", "group", "num_tokens", "advantage")]
    is_shown = all(each is None or is_number(each) for each in numbers)
    extras = record.get("extras") or {}
    return record if is_shown and isinstance(extras, dict) and type(record.get("sample")) is int else None


def _from_sample_lines(paths: RunPaths, iteration: int, sample: int | None) -> RecordedIteration | None:
    """Reads `samples.jsonl`, in which an iteration that was repeated has lines of several attempts."""
    lines, _ = read_records(paths.samples, of_iteration)
    lines = [line for line in lines if line[STEP] == iteration]
    for number, line in enumerate(lines):
        line.setdefault("sample", number)
    shown = [each for each in map(as_recorded, lines) if each is not None]
    attempts = [each["attempt"] if type(each.get("attempt")) is int else 0 for each in shown]
    if not shown:
        return None
    newest = max(attempts)
    shown = [each for each, attempt in zip(shown, attempts, strict=True) if attempt == newest]
    samples = [_without_texts(each) for each in shown]
    if sample is not None:
        samples = [each for each in shown if each["sample"] == sample]
    return RecordedIteration(
        iteration, attempt=newest, is_whole=False, samples=samples, num_unreadable=len(lines) - len(attempts)
    )
