"""Labelled questions of a GenRM, as rows to train it on (`run.kind: sft`).

A row has what the GenRM is asked, and the verdict that the label says. Questions are those of its way of
judging, about whole prompt groups; nothing is asked.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from yatt.adapters.inputs.dataset import Row, prompt_text, truth_text
from yatt.adapters.processes.watched_trial import Stages, answer_watched, run_watched
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sections.judges import VerdictSection
from yatt.errors import ConfigError
from yatt.evaluation.labels import BINARY
from yatt.judging.judging import judging_of
from yatt.judging.protocol import JudgedGroup, Question, UnusableRow, shown_fields
from yatt.judging.reading import parse_verdict
from yatt.judging.template import render_template
from yatt.judging.ways.pairwise import TIE
from yatt.printable import all_digits

WORD = "{word}"
WAYS = ("pointwise", "pairwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledGroup:
    """Completions of a prompt with labels: what is better has a larger one; None: there is none.

    Attributes:
        number: gives the seed.
        place: where it is, for messages.
    """

    row: Row
    number: int
    texts: tuple[str, ...]
    labels: tuple[float | None, ...]
    place: str


class TaughtRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row for training a judge."""

    prompt: str | list[dict[str, str]]
    completion: str
    label: float


@dataclass(slots=True)
class Skipped:
    """Questions without a verdict that the label could say, by reason; and samples of groups that are not
    recorded whole."""

    ties: int = 0
    between: int = 0
    unlabelled: int = 0
    left_out: int = 0


def check_taught(genrm: GenRMSection, index: int) -> None:
    """Refuses a GenRM whose questions have no single verdict that a label says.

    Args:
        index: of the GenRM in the run file.

    Raises:
        ConfigError: it is one.
    """
    if genrm.kind != "text" or genrm.path or genrm.judging.by not in WAYS:
        by = genrm.kind if genrm.kind != "text" else "a function" if genrm.path else genrm.judging.by
        raise ConfigError(
            f"genrms[{genrm.name}] is {by}: no label says what it should write; rows are made for a template "
            f"that is judged {' or '.join(WAYS)}."
        )
    if genrm.sees != "none":
        raise ConfigError(f"genrms[{genrm.name}].sees: rows with pictures cannot be trained on yet.")
    if genrm.think.budget:
        raise ConfigError(
            f"genrms[{genrm.name}] thinks before its verdict, and no label says what: rows would teach it to "
            "write none. Name a run file in which this is 0.",
            key=f"genrms[{index}].think.budget",
        )
    if genrm.judging.by == "pairwise" and genrm.judging.pairs == "ground_truth":
        raise ConfigError(
            f"genrms[{genrm.name}] compares each completion with the ground truth, for which there is no "
            "label; write another value, such as all, in a copy of the run file, and name that.",
            key=f"genrms[{index}].judging.pairs",
        )


def pair_labels(genrm: GenRMSection, index: int, place: str) -> tuple[float, float]:
    """Returns the labels of a preferred completion and of the other one.

    Raises:
        ConfigError: the GenRM is asked about one completion at a time, and its verdicts are not two words:
            that one is better says no number.
    """
    if genrm.judging.by == "pairwise":
        return 1.0, 0.0
    scores = sorted(set(genrm.verdict.scores.values()))
    if len(scores) != len(BINARY):
        has = f"has {len(scores)} scores" if scores else "is a number"
        raise ConfigError(
            f"{place}: genrms[{genrm.name}] is asked about one completion, and its verdict {has}: which one "
            "chosen and rejected should get is not known. Write rows with completion and label.",
            key=f"genrms[{index}].verdict.scores",
        )
    return scores[1], scores[0]


def taught_rows(
    groups: Iterable[LabelledGroup], genrm: GenRMSection, answer: str, run_seed: int, skipped: Skipped
) -> Iterator[TaughtRow]:
    """Yields a row for each question whose verdict follows from the labels.

    Args:
        answer: what the GenRM writes, with `WORD` where the verdict stands.
        skipped: gets the number of the others.

    Raises:
        ConfigError: a data row has no use for this GenRM.
    """
    way, words = judging_of(genrm), _words(genrm.verdict)
    is_pair = genrm.judging.by == "pairwise"
    for each in groups:
        group = JudgedGroup(
            prompt=prompt_text(each.row.prompt),
            ground_truth=truth_text(each.row.ground_truth),
            data_source=each.row.data_source,
            completions=each.texts,
            indexes=tuple(range(len(each.texts))),
            row=each.row.raw,
            seed=run_seed + each.number,
        )
        try:
            questions = way.questions(group)
        except UnusableRow as error:
            raise ConfigError(f"{each.place}: {error}.") from error
        for question in questions:
            value = _value(question, each.labels, is_pair=is_pair)
            if value is None:
                skipped.unlabelled += 1
                continue
            word = words.get(round(value, 9)) if words else all_digits(value)
            if word is None:
                is_tie = is_pair and value == TIE
                skipped.ties += is_tie
                skipped.between += not is_tie
                continue
            text = "".join(part for part, _ in render_template(genrm.template, shown_fields(group, question)))
            prompt: Any = [{"role": "user", "content": text}] if genrm.chat else text
            yield TaughtRow(prompt=prompt, completion=answer.replace(WORD, word), label=value)


def _words(verdict: VerdictSection) -> dict[float, str]:
    """The first word of each score."""
    found: dict[float, str] = {}
    for word, score in verdict.scores.items():
        found.setdefault(round(score, 9), word)
    return found


def _value(question: Question, labels: Sequence[float | None], *, is_pair: bool) -> float | None:
    """The score that the verdict should have; None: a completion has no label."""
    if not is_pair:
        return labels[question.about[0]]
    first, second = (labels[place] for place in question.about)
    if first is None or second is None:
        return None
    return TIE if math.isclose(first, second) else float(first > second)


def balanced_rows(rows: Sequence[TaughtRow], seed: int) -> list[TaughtRow]:
    """Returns as many rows of each completion as the rarest one has, drawn by the seed, in their order."""
    by_answer: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        by_answer.setdefault(row.completion, []).append(place)
    least, draw = min(map(len, by_answer.values()), default=0), random.Random(seed)
    kept = sorted(place for places in by_answer.values() for place in draw.sample(places, least))
    return [rows[place] for place in kept]


def check_answers(config: RunConfig, genrm: GenRMSection, index: int, rows: Mapping[str, float]) -> None:
    """Refuses answers in which the run would read another verdict, or none. The user's pattern is searched in
    a process with limits.

    Args:
        index: of the GenRM in the run file.
        rows: what the GenRM is to write, and the score of it.

    Raises:
        ConfigError: one is read otherwise.
    """
    text = json.dumps(asdict(genrm.verdict))
    key = f"genrms[{index}].verdict"
    run_watched("yatt.evaluation.judge_rows", [text, dict(rows), key], config.launch.start_timeout_s, CURE)


CURE = "Change the verdict's pattern."


def _check(
    stages: Stages, text: str, rows: dict[str, float], key: str
) -> tuple[list[ConfigError], list[str]]:
    verdict = msgspec.convert(json.loads(text), VerdictSection)
    for answer, score in rows.items():
        with stages.doing(f"{key}: reading {answer!r} by it", verdict.timeout_s):
            found = parse_verdict(answer, verdict)
        if found is None or not math.isclose(found, score, abs_tol=1e-6):
            read = "no verdict" if found is None else all_digits(found)
            says = f"a run reads {read} in {answer!r}, not {all_digits(score)}"
            return [ConfigError(f"{says}; write --answer, such as '[[{WORD}]]'.", key=key)], []
    return [], []


if __name__ == "__main__":
    answer_watched(_check)
