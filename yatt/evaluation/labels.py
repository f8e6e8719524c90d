"""Labelled completions and pairs, which say how good a judge is, as rows for an evaluation.

Rows have the forms of training on given completions (docs/given.md): `prompt` and `completion` with `label`,
or `prompt`, `chosen` and `rejected`.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from yatt.adapters.inputs.data_rows import ASSISTANT, data_row, raw_rows
from yatt.config.schema import DataSection, GenRMSection
from yatt.core.figures.evaluation import GIVEN, GivenTexts
from yatt.errors import ConfigError
from yatt.printable import all_digits, printable, value_in_words

LABEL, CHOSEN, PROMPT = "label", "chosen", "yatt_prompt"
Form = Literal["texts", "pairs"]
ENDED = "stop"

BINARY = (0.0, 1.0)
MOST_LABEL = 1e9
TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """A row: what is judged, and what people have said of it.

    Attributes:
        raw: its columns.
        texts: the completion; or the preferred one, and the other one.
        label: of a completion; 1 for a pair.
    """

    raw: dict[str, Any]
    prompt: str | list[dict[str, Any]]
    texts: tuple[str, ...]
    label: float
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRows:
    """All rows. `values`: those that labels and verdicts have, from the least; empty: labels only say an
    order."""

    form: Form
    rows: tuple[LabelledRow, ...]
    values: tuple[float, ...] = ()


def read_labelled(
    files: Sequence[str], data: DataSection, genrm: GenRMSection, names: Sequence[str] = ()
) -> LabelledRows:
    """Reads labelled rows.

    Args:
        data: of the run file; its columns and pictures.
        names: of the files, for messages, if they were made of others.

    Raises:
        ConfigError: there are none, one has another form, or this GenRM's verdicts cannot be compared with
            their labels.
        OSError: a transient error.
    """
    rows = list[LabelledRow]()
    form: Form | None = None
    for file, name in zip(files, names or files, strict=True):
        for raw, made_place in raw_rows(Path(file)):
            form = form or ("pairs" if CHOSEN in raw else "texts")
            place = printable(f"{name}{made_place.removeprefix(file)}")
            rows.append(_labelled(raw, place, form, data, genrm))
    if form is None:
        raise ConfigError(
            f"{', '.join(names or files)}: no rows. Write rows with prompt, completion and label, "
            "or with prompt, chosen and rejected."
        )
    if form == "texts" and genrm.judging.by in ("pairwise", "listwise"):
        raise ConfigError(
            f"{rows[0].place}: genrms[{genrm.name}] compares completions ({genrm.judging.by}), and the rows "
            "have one each; write rows with prompt, chosen and rejected."
        )
    return LabelledRows(
        form=form, rows=tuple(rows), values=_values(rows, genrm) if form == "texts" else BINARY
    )


def _labelled(
    raw: dict[str, Any], place: str, form: Form, data: DataSection, genrm: GenRMSection
) -> LabelledRow:
    row = data_row(raw, place, replace(data, form="pairs" if form == "pairs" else "completions"))
    texts = tuple(_said(given, place) for given in row.given)
    label = 1.0 if form == "pairs" else _label_of(raw, place, genrm)
    if row.is_equal_pair:
        raise ConfigError(f"{place}: chosen and rejected are the same; leave such rows out.")
    return LabelledRow(raw=raw, prompt=row.prompt, texts=texts, label=label, place=place)


def _said(given: str | list[dict[str, Any]], place: str) -> str:
    """What the model has said in a completion: a text, or its turns with an empty line between each two."""
    if isinstance(given, str):
        return given
    if any(message["role"] != ASSISTANT for message in given):
        raise ConfigError(
            f"{place}: its completion has turns of others ({value_in_words(given)}); judges are shown what "
            "the model has said: give each turn a row of its own."
        )
    return "\n\n".join(str(message["content"]) for message in given)


def _label_of(raw: dict[str, Any], place: str, genrm: GenRMSection) -> float:
    found, words = raw.get(LABEL), genrm.verdict.scores
    if isinstance(found, str) and found in words:
        return words[found]
    if isinstance(found, int | float) and abs(found) <= MOST_LABEL:
        return float(found)
    named = f", or one of the verdict's words {', '.join(words)}" if words else ""
    has = "no column" if found is None else f"{value_in_words(found)} in column"
    raise ConfigError(f"{place} has {has} '{LABEL}'; write a number from -1e9 to 1e9{named}.")


def _values(rows: Sequence[LabelledRow], genrm: GenRMSection) -> tuple[float, ...]:
    """Returns the values that labels and verdicts have; none if labels only say an order.

    Raises:
        ConfigError: no verdict can equal a label, and there are too few labels for an order.
    """
    labels = sorted({row.label for row in rows})
    known = _verdict_values(genrm)
    strange = next((row for row in rows if row.label not in known), None)
    if known and strange is None:
        return known
    if len(labels) < TWO:
        raise ConfigError(
            f"{rows[0].place}: all labels are {all_digits(labels[0])}, which says nothing about what is "
            "better; add rows with another one."
        )
    if known and len(labels) == TWO and strange is not None:
        raise ConfigError(
            f"{strange.place}: label {all_digits(strange.label)} is none that a verdict of "
            f"genrms[{genrm.name}] can be: {', '.join(map(all_digits, known))}. Write these; or "
            "numbers of more than two values, which are compared by their order."
        )
    return ()


def _verdict_values(genrm: GenRMSection) -> tuple[float, ...]:
    """The values of verdicts that are words; those of a rubric, whose scores lie between, are its ends."""
    if genrm.kind != "text" or genrm.path:
        return ()
    if genrm.judging.by == "rubric":
        return BINARY
    return tuple(sorted(set(genrm.verdict.scores.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRow:
    """A data row whose completions are judged: its columns and prompt, and the completions."""

    raw: dict[str, Any]
    prompt: str | list[dict[str, Any]]
    given: GivenTexts


def asked_twice(labelled: LabelledRows) -> Iterator[GivenRow]:
    """Yields all rows, and then all once more under other numbers, so with other seeds."""
    count = len(labelled.rows)
    for begin in (0, count):
        for number, row in enumerate(labelled.rows):
            given = GivenTexts(
                number=begin + number, texts=row.texts, finish_reasons=(ENDED,) * len(row.texts)
            )
            yield GivenRow(raw=row.raw, prompt=row.prompt, given=given)


def write_given(path: Path, rows: Iterator[GivenRow]) -> None:
    """Writes the data file of an evaluation of given completions.

    Raises:
        OSError: the disk is full, or fails.
    """
    with path.open("x", encoding="utf-8") as file:
        for row in rows:
            columns = {**row.raw, PROMPT: row.prompt, GIVEN: msgspec.to_builtins(row.given)}
            file.write(json.dumps(columns, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def of_given(data: DataSection, path: Path) -> DataSection:
    """Returns the section of data with such a file."""
    files = (str(path),)
    return replace(data, train_files=files, val_files=files, form="groups", prompt_key=PROMPT, map="")
