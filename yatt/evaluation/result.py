"""The folder of an evaluation's result, and the result as a table."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from yatt.checkpoint.convert.hf_folder import whole_folder
from yatt.core.figures.evaluation import RESULT_NAME, SAMPLES_NAME, EvalResult, EvaluatedSample
from yatt.printable import printable

COPY_BYTES = 1 << 20

OVERALL = "overall"
WIDTH = 80
LEAST_NAME = 6
"""Characters of a name that are always shown."""


def read_result(folder: Path) -> EvalResult:
    """Returns the result in a folder."""
    return msgspec.json.decode((folder / RESULT_NAME).read_bytes(), type=EvalResult)


def read_samples(folder: Path, *, with_texts: bool = False) -> Iterator[EvaluatedSample]:
    """Yields the samples in a folder, by default without their texts."""
    decoder = msgspec.json.Decoder(EvaluatedSample)
    with (folder / SAMPLES_NAME).open("rb") as file:
        for line in file:
            sample = decoder.decode(line)
            yield sample if with_texts else sample.without_texts()


def copy_result(found: Path, out: Path) -> None:
    """Copies samples and result into a new folder, which appears when it is whole.

    Raises:
        ConfigError: the folder exists and is not empty.
        OSError: a disk is full, or fails.
    """
    with whole_folder(out) as folder:
        for name in (SAMPLES_NAME, RESULT_NAME):
            with (found / name).open("rb") as source, (folder / name).open("xb") as file:
                while part := source.read(COPY_BYTES):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())


def result_table(result: EvalResult, width: int = WIDTH) -> list[str]:
    """Returns the lines of the table: one row per data source and reward, then lengths per data source."""
    sources = [*((printable(name), one) for name, one in result.sources.items()), (OVERALL, result.overall)]
    if len(result.sources) == 1:
        sources = sources[:1]
    ks = next(iter(result.overall.rewards.values())).pass_at
    head = ["SOURCE", "REWARD", "MEAN", "STD.ERR", "FAILED", *(f"PASS@{k}" for k in ks)]
    rows = [
        [
            source,
            name,
            _number(found.mean),
            _number(found.std_err),
            str(found.failed),
            *(_number(each.mean) for each in found.pass_at.values()),
        ]
        for source, one in sources
        for name, found in one.rewards.items()
    ]
    second_head = ["SOURCE", "PROMPTS", "SAMPLES", "FAILED", "TRUNCATED", "TOKENS"]
    second = [
        [
            source,
            str(one.prompts),
            str(one.samples),
            str(one.failed),
            _number(one.truncated),
            "-" if one.mean_tokens is None else f"{one.mean_tokens:.1f}",
        ]
        for source, one in sources
    ]
    return [*aligned_rows([head, *rows], 2, width), "", *aligned_rows([second_head, *second], 1, width)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) >= 1000 else f"{value:.4f}"


def aligned_rows(rows: Sequence[Sequence[str]], names: int, width: int) -> list[str]:
    """Aligns columns; the first `names` are cut at the end so that a row fits."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths[:names]) > LEAST_NAME:
        widest = max(range(names), key=lambda column: widths[column])
        widths[widest] -= 1
    return [
        "  ".join(
            _cut(cell, size).ljust(size) if column < names else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}~"
