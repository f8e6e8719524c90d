"""What an evaluation of a GenRM has found: figures, a table of confusion, and the most certain errors."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from yatt.config.schema import GenRMSection
from yatt.core.figures.evaluation import TRUNCATED, EvaluatedSample, JudgedAnswer
from yatt.evaluation.labels import LabelledRow, LabelledRows
from yatt.evaluation.result import WIDTH, aligned_rows
from yatt.judging.bootstrap import Figure
from yatt.judging.quality import (
    AskedOnce,
    LabelledPair,
    LabelledText,
    ReliabilityBin,
    answer_figures,
    nearest_value,
    pair_figures,
    pair_reliability,
    side_of,
    text_figures,
    text_reliability,
)
from yatt.printable import all_digits, printable

MOST_ERRORS, MOST_CELLS = 10, 36
CUT = " ... (cut)"
ENOUGH_PAIRS = 100
"""Of fewer pairs a preference for a place may not be seen."""

SIDES = {1: "chosen", 0: "tie", -1: "rejected"}

MEANINGS = {
    "agreement": "verdicts that are as labelled; a tie is half",
    "auc": "pairs of completions with different labels that scores have in the right order",
    "consistency": "the same verdict when asked again with other seeds",
    "place": "how much more often the one shown first wins",
    "flips": "pairs in which the two orders have different winners",
    "length": "preference for longer completions, beyond the labels",
    "brier": "mean square of what was said less the label",
    "too_sure": "mean confidence less agreement",
    "confidence": "probability of the likeliest word",
    "unreadable": "answers without a verdict",
    "cut": "answers that were cut at max_tokens",
    "thought_cut": "thoughts that were cut at think.budget",
    "tokens": "written for each verdict",
}
"""Figures in the order in which they are shown."""


class JudgedExample(msgspec.Struct, frozen=True, kw_only=True):
    """One row, as a person is shown it. `said`: score, or share that the preferred one has won. `thoughts`:
    one before each answer; empty: it does not think."""

    place: str
    prompt: str
    texts: tuple[str, ...]
    label: float
    said: float | None
    answers: tuple[str, ...]
    thoughts: tuple[str, ...] = ()


class ConfusionCell(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with the same label (of a pair: winner with the preferred one shown first) and the same verdict
    (winner with it shown second)."""

    label: str
    verdict: str
    rows: int
    example: JudgedExample


class JudgeResult(msgspec.Struct, frozen=True, kw_only=True):
    """How good a GenRM is.

    Attributes:
        form: texts or pairs.
        values: those that labels and verdicts have; empty: labels only say an order.
        main: name of the figure that --min-agreement is about.
        without: rows without a verdict, for any reason.
        too_long: rows whose prompt is longer than data.max_prompt_tokens.
        seconds_a_verdict: of the whole time in which it was asked; None: nothing was read.
        errors: the most certain ones, the worst first.
        reasons: why verdicts are missing, one for each row at most.
    """

    judge: str
    data: tuple[str, ...]
    form: str
    settings: dict[str, Any]
    rows: int
    without: int
    too_long: int
    values: tuple[float, ...]
    main: str
    figures: dict[str, Figure]
    seconds_a_verdict: float | None
    reliability: list[ReliabilityBin]
    confusion: list[ConfusionCell]
    errors: list[JudgedExample]
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A row, and the samples that it became when it was asked first and again; empty: it was too long."""

    row: LabelledRow
    prompt: int
    first: Sequence[EvaluatedSample]
    again: Sequence[EvaluatedSample]


def judge_result(
    labelled: LabelledRows,
    samples: Sequence[EvaluatedSample],
    genrm: GenRMSection,
    data: tuple[str, ...],
    settings: Mapping[str, Any],
) -> JudgeResult:
    """Returns what was found.

    Args:
        samples: of all rows, and of all once more (`asked_twice`).
    """
    asked = list(_asked_rows(labelled, samples))
    is_paired = labelled.form == "pairs"
    pairs = [_pair(each, genrm) for each in asked if is_paired]
    texts = [_text(each, genrm) for each in asked if not is_paired]
    said: Sequence[LabelledText | LabelledPair] = [*texts, *pairs]
    found = pair_figures(pairs) if is_paired else text_figures(texts, labelled.values)
    answers = list(_answers(asked))
    found |= answer_figures([_once(prompt, each, genrm) for prompt, each in answers])
    examples = [_example(each, one) for each, one in zip(asked, said, strict=True) if each.first]
    return JudgeResult(
        judge=genrm.name,
        data=tuple(map(printable, data)),
        form=labelled.form,
        settings=dict(settings),
        rows=len(labelled.rows),
        without=sum(_said_of(each) is None for each in said),
        too_long=sum(not each.first for each in asked),
        values=labelled.values,
        main="agreement" if "agreement" in found else "auc",
        figures={name: found[name] for name in MEANINGS if name in found},
        seconds_a_verdict=_seconds([each for _, each in answers]),
        reliability=pair_reliability(pairs) if is_paired else text_reliability(texts, labelled.values),
        confusion=_confusion(labelled, said, examples),
        errors=_errors(labelled, examples),
        reasons=[reason for each in asked if (reason := _reason(each, genrm.name))],
    )


def _asked_rows(labelled: LabelledRows, samples: Sequence[EvaluatedSample]) -> Iterator[_Asked]:
    groups: dict[int, list[EvaluatedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_number, []).append(sample)
    prompts: dict[str, int] = {}
    for number, row in enumerate(labelled.rows):
        key = repr(row.prompt)
        again = groups.get(len(labelled.rows) + number, [])
        yield _Asked(row, prompts.setdefault(key, len(prompts)), groups.get(number, []), again)


def _pair(asked: _Asked, genrm: GenRMSection) -> LabelledPair:
    first, second = asked.row.texts
    return LabelledPair(
        prompt=asked.prompt,
        lengths=(len(first), len(second)),
        said=_shares(asked.first, genrm),
        again=_shares(asked.again, genrm),
    )


def _text(asked: _Asked, genrm: GenRMSection) -> LabelledText:
    first, again = (
        next((sample.scores.get(genrm.name) for sample in samples), None)
        for samples in (asked.first, asked.again)
    )
    return LabelledText(
        prompt=asked.prompt,
        label=asked.row.label,
        length=len(asked.row.texts[0]),
        said=first,
        again=again,
    )


def _shares(samples: Sequence[EvaluatedSample], genrm: GenRMSection) -> tuple[float | None, ...]:
    """The shares that the preferred completion has won: shown first and shown second, where pairs are shown;
    else by the scores of both."""
    if genrm.judging.by in ("pairwise", "listwise"):
        judged = [each for sample in samples for each in sample.judged]
        return tuple(_share_shown(judged, order) for order in ((0, 1), (1, 0)))
    scores = [sample.scores.get(genrm.name) for sample in samples]
    known = [score for score in scores if score is not None]
    if len(known) != len(scores) or not scores:
        return (None,)
    first, second = (round(score, 9) for score in known)
    return ((1 + (first > second) - (first < second)) / 2,)


def _share_shown(judged: Sequence[JudgedAnswer], order: tuple[int, int]) -> float | None:
    """The preferred one's share of the votes on a pair shown in this order; None: none is readable."""
    votes = [_vote(each) for each in judged if each.is_readable and each.about == order]
    if not votes:
        return None
    share = math.fsum(votes) / len(votes)
    return share if order == (0, 1) else 1 - share


def _vote(answer: JudgedAnswer) -> float:
    """The share of the completion shown first."""
    if answer.ranking:
        return float(answer.ranking[0] == 0)
    return answer.score or 0.0


def _said_of(said: LabelledText | LabelledPair) -> float | None:
    return said.said if isinstance(said, LabelledText) else said.share


def _answers(asked: Sequence[_Asked]) -> Iterator[tuple[int, JudgedAnswer]]:
    for each in asked:
        for sample in (*each.first, *each.again):
            yield from ((each.prompt, answer) for answer in sample.judged)


def _once(prompt: int, answer: JudgedAnswer, genrm: GenRMSection) -> AskedOnce:
    is_unasked = answer.is_thought_cut and genrm.think.on_cut == "unreadable"
    return AskedOnce(
        prompt=prompt,
        is_readable=answer.is_readable,
        is_cut=answer.finish_reason == TRUNCATED and not is_unasked,
        num_tokens=answer.num_tokens or None,
        confidence=answer.measures.get("confidence"),
        is_thought_cut=answer.is_thought_cut if genrm.think.budget else None,
    )


def _seconds(answers: Sequence[JudgedAnswer]) -> float | None:
    """Seconds a readable verdict, from the first question to the last answer; on one machine."""
    readable, spans = sum(each.is_readable for each in answers), [each.span_s for each in answers]
    known = [(begin, end) for begin, end in spans if end > 0]
    if not readable or not known:
        return None
    return (max(end for _, end in known) - min(begin for begin, _ in known)) / readable


def _reason(asked: _Asked, name: str) -> str:
    for sample in (*asked.first, *asked.again):
        if why := sample.failed or sample.no_score.get(name, ""):
            return f"{asked.row.place}: {why}"
    return ""


# ---- examples -----------------------------------------------------------------------------------


def _example(asked: _Asked, said: LabelledText | LabelledPair) -> JudgedExample:
    sample = asked.first[0]
    return JudgedExample(
        place=asked.row.place,
        prompt=sample.prompt,
        texts=asked.row.texts,
        label=asked.row.label,
        said=_said_of(said),
        answers=tuple(each.answer for each in sample.judged) or tuple(sample.verdicts.values()),
        thoughts=tuple(map(_thought, sample.judged)) if any(each.thought for each in sample.judged) else (),
    )


def _thought(answer: JudgedAnswer) -> str:
    return f"{answer.thought}{CUT if answer.is_thought_cut else ''}"


def _errors(labelled: LabelledRows, examples: Sequence[JudgedExample]) -> list[JudgedExample]:
    """The rows whose verdict is farthest from the label; where labels only say an order, whose place among
    the scores is farthest from that among the labels."""
    known = [(each, each.said) for each in examples if each.said is not None]
    if labelled.values:
        span = labelled.values[-1] - labelled.values[0] or 1.0
        far = [(abs(said - each.label) / span, each) for each, said in known]
        wrong = [(by, each) for by, each in far if by >= _half_a_step(labelled.values, span)]
    else:
        scores, labels = sorted(said for _, said in known), sorted(each.label for each, _ in known)
        wrong = [(abs(_rank(scores, said) - _rank(labels, each.label)), each) for each, said in known]
    ordered = sorted(wrong, key=lambda one: (-one[0], one[1].place))
    return [each for by, each in ordered[:MOST_ERRORS] if by]


def _half_a_step(values: Sequence[float], span: float) -> float:
    steps = [high - low for low, high in itertools.pairwise(values)]
    return min(steps, default=span) / span / 2


def _rank(ordered: Sequence[float], value: float) -> float:
    """The mean place of a value among all, from 0 to 1."""
    return (bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)) / 2 / len(ordered)


def _confusion(
    labelled: LabelledRows,
    said: Sequence[LabelledText | LabelledPair],
    examples: Sequence[JudgedExample],
) -> list[ConfusionCell]:
    """Counts of labels and verdicts, each with one row; none where labels only say an order."""
    cells: dict[tuple[str, str], list[JudgedExample]] = {}
    by_place = {each.place: each for each in examples}
    for row, each in zip(labelled.rows, said, strict=True):
        if (example := by_place.get(row.place)) is not None and (names := _cell(each, labelled.values)):
            cells.setdefault(names, []).append(example)
    if len(cells) > MOST_CELLS:
        return []
    return [
        ConfusionCell(label=label, verdict=verdict, rows=len(found), example=found[0])
        for (label, verdict), found in sorted(cells.items())
    ]


def _cell(said: LabelledText | LabelledPair, values: Sequence[float]) -> tuple[str, str] | None:
    if isinstance(said, LabelledText):
        if not values:
            return None
        verdict = "none" if said.said is None else all_digits(nearest_value(said.said, values))
        return all_digits(said.label), verdict
    sides = ["none" if share is None else SIDES[side_of(share)] for share in said.said]
    return (sides[0], sides[-1]) if len(sides) > 1 else ("chosen", sides[0])


# ---- the terminal -------------------------------------------------------------------------------


def quality_table(figures: Mapping[str, Figure], width: int = WIDTH) -> list[str]:
    """Returns the lines of a table of figures with their intervals."""
    rows = [["FIGURE", "VALUE", "95 % INTERVAL", "OF"]]
    for name, each in figures.items():
        rows.append([name, f"{each.value:.3f}", interval_in_words(each), str(each.items)])
    return aligned_rows(rows, 1, width)


def interval_in_words(figure: Figure) -> str:
    """Returns the interval of a figure; '-': there is none."""
    if figure.low is None or figure.high is None:
        return "-"
    return f"{figure.low:.3f} to {figure.high:.3f}"


def order_advice(result: JudgeResult, genrm: GenRMSection) -> str:
    """Returns what the preference for a place says about the key `judging.orders`; empty: nothing."""
    place = result.figures.get("place")
    if place is None or place.low is None or place.high is None or place.items < ENOUGH_PAIRS:
        return ""
    if place.low <= 0 <= place.high and genrm.judging.orders == "both":
        return "no preference for a place was seen: judging.orders: drawn asks half as much."
    if not place.low <= 0 <= place.high and genrm.judging.orders != "both":
        return "it prefers a place: judging.orders: both lets that cancel."
    return ""
