"""How good a judge is: figures of its verdicts about labelled completions and pairs. Pure.

Every figure has a 95 % interval, by the bootstrap over prompts (`yatt.judging.bootstrap`).
Agreement alone hides what spoils training: judges that like the first place or the longer text agree with
labels nearly as often as honest ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from yatt.judging.bootstrap import (
    SAME,
    Figure,
    SummedFigure,
    Sums,
    figures_with_intervals,
    mean_measure,
    mean_of_ratios,
    order_figure,
    ratio_of_sums,
    scaled_values,
)
from yatt.judging.ways.pairwise import TIE

NUM_BINS = 10


class ReliabilityBin(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts of about the same confidence: their mean confidence, and the share that agrees with labels."""

    low: float
    high: float
    items: int
    confidence: float
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledText:
    """What a judge has said about a completion with a label.

    Attributes:
        prompt: number of its prompt.
        length: of the completion, in characters.
        said: its score; None: there is none. `again`: asked with other seeds.
    """

    prompt: int
    label: float
    length: int
    said: float | None
    again: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPair:
    """What a judge has said about a pair, as shares that the preferred completion has won, from 0 to 1.

    Attributes:
        prompt: number of its prompt.
        lengths: of the preferred completion and of the other one, in characters.
        said: with the preferred one shown first, and shown second; of a judge that is not shown pairs, once.
            None: there is no verdict. `again`: asked with other seeds.
    """

    prompt: int
    lengths: tuple[int, int]
    said: tuple[float | None, ...]
    again: tuple[float | None, ...] = ()

    @property
    def share(self) -> float | None:
        """The mean of the orders; None if one has no verdict."""
        return _mean_of(self.said)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOnce:
    """One answer of a judge.

    Attributes:
        prompt: number of the prompt that it is about.
        num_tokens: that it has written; None: the service does not tell.
        confidence: of a soft verdict.
        is_thought_cut: whether its thought was cut; None: it does not think.
    """

    prompt: int
    is_readable: bool
    is_cut: bool
    num_tokens: int | None = None
    confidence: float | None = None
    is_thought_cut: bool | None = None


def side_of(share: float) -> int:
    """Which one of a pair has won: 1 the preferred one, -1 the other, 0 none."""
    return 0 if abs(share - TIE) < SAME else 1 if share > TIE else -1


def _mean_of(shares: Sequence[float | None]) -> float | None:
    known = [each for each in shares if each is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(shares) else None


# ---- pairs --------------------------------------------------------------------------------------


def pair_figures(items: Sequence[LabelledPair]) -> dict[str, Figure]:
    """Returns the figures of verdicts about pairs, by name; those that cannot be made are left out.

    agreement: share in which the preferred one has won, a tie is half. consistency: share with the same
    winner when asked again. place: how much more often the place shown first wins, from -1 to 1. flips: share
    in which the orders have different winners. length: how much more often the longer one wins than is
    labelled, the mean of pairs whose preferred one is longer and of those whose preferred one is shorter:
    what is wrong by chance is wrong in both and cancels, whatever the labels prefer. brier: mean square of
    the share's distance from 1. too_sure: mean confidence (the winner's share) less agreement, where verdicts
    are graded.
    """
    known = [(each, each.share) for each in items]
    read = [(each, share) for each, share in known if share is not None]
    both = [(each.prompt, each.said[0], each.said[1]) for each, _ in read if len(each.said) > 1]
    orders = [(prompt, a, b) for prompt, a, b in both if a is not None and b is not None]
    repeated = [(each.prompt, share, _mean_of(each.again)) for each, share in read]
    uneven = [(each, share) for each, share in read if each.lengths[0] != each.lengths[1]]
    measures = {
        "agreement": mean_measure([(each.prompt, _pair_agreement(share)) for each, share in read]),
        "consistency": mean_measure(
            [(p, side_of(share) == side_of(again)) for p, share, again in repeated if again is not None]
        ),
        "place": mean_measure([(prompt, first - swapped) for prompt, first, swapped in orders]),
        "flips": mean_measure([(prompt, side_of(a) != side_of(b)) for prompt, a, b in orders]),
        "length": SummedFigure(
            [(each.prompt, _longer(each, share)) for each, share in uneven], mean_of_ratios
        ),
        "brier": mean_measure([(each.prompt, (share - 1) ** 2) for each, share in read]),
    }
    if any(said not in (0.0, TIE, 1.0) for each, _ in read for said in each.said):
        sure = [(each.prompt, max(share, 1 - share) - _pair_agreement(share)) for each, share in read]
        measures["too_sure"] = mean_measure(sure)
    return figures_with_intervals(measures)


def _pair_agreement(share: float) -> float:
    return (1 + side_of(share)) / 2


def _longer(pair: LabelledPair, share: float) -> Sums:
    """The longer one's share less that by the label, and 1; zeros before them for a shorter preferred one,
    after them for a longer one."""
    if pair.lengths[0] > pair.lengths[1]:
        return share - 1, 1.0, 0.0, 0.0
    return 0.0, 0.0, 1 - share, 1.0


def pair_reliability(items: Sequence[LabelledPair]) -> list[ReliabilityBin]:
    """Returns how often pairs of each confidence are judged as labelled."""
    shares = [share for each in items if (share := each.share) is not None]
    return _bins([(max(share, 1 - share), _pair_agreement(share)) for share in shares])


# ---- single completions -------------------------------------------------------------------------


def text_figures(items: Sequence[LabelledText], values: Sequence[float] = ()) -> dict[str, Figure]:
    """Returns the figures of verdicts about single completions, by name; those that cannot be made are left
    out.

    agreement: share whose verdict is the label. auc: the chance that of two completions with different labels
    the one with the larger has the higher score, a tie is half. consistency: share with the same verdict when
    asked again. length: partial correlation of score and length, given the label. brier: mean square of
    score less label, both scaled to [0, 1]. too_sure: mean confidence less agreement, where labels are the
    least and the largest value and verdicts are graded between them.

    Args:
        values: those that labels and verdicts have, from the least; empty: labels only say an order. Scores
            between two values count as the nearest one.
    """
    read = [(each, each.said) for each in items if each.said is not None]
    again = [(each, said, each.again) for each, said in read if each.again is not None]
    measures = {
        "consistency": mean_measure(
            [(e.prompt, nearest_value(s, values) == nearest_value(a, values)) for e, s, a in again]
        ),
        "length": SummedFigure(_length_terms(read), _partial),
    }
    if values:
        agreed = [(each.prompt, _text_agreement(each.label, said, values)) for each, said in read]
        measures = {"agreement": mean_measure(agreed), **measures}
        scaled = [(each.prompt, _scaled(said, values), _scaled(each.label, values)) for each, said in read]
        if all(label in (0.0, 1.0) for *_, label in scaled):
            measures["brier"] = mean_measure([(prompt, (p - label) ** 2) for prompt, p, label in scaled])
            if any(SAME < p < 1 - SAME for _, p, _ in scaled):
                hits = [hit for _, hit in agreed]
                sure = [(x, max(p, 1 - p) - hit) for (x, p, _), hit in zip(scaled, hits, strict=True)]
                measures["too_sure"] = mean_measure(sure)
    order = order_figure([(each.prompt, said, each.label) for each, said in read])
    return figures_with_intervals(measures) | ({"auc": order} if order is not None else {})


def nearest_value(score: float, values: Sequence[float]) -> float:
    """Returns the value that is nearest to a score, the lower of two; the score itself without values."""
    return min(values, key=lambda value: (round(abs(value - score), 9), value)) if values else round(score, 9)


def _text_agreement(label: float, said: float, values: Sequence[float]) -> float:
    """1 if the label is the nearest value, half if another one is as near."""
    least = min(abs(value - said) for value in values)
    near = [value for value in values if abs(value - said) < least + SAME]
    return sum(abs(value - label) < SAME for value in near) / len(near)


def _scaled(number: float, values: Sequence[float]) -> float:
    low, high = values[0], values[-1]
    return (number - low) / ((high - low) or 1.0)


def text_reliability(items: Sequence[LabelledText], values: Sequence[float]) -> list[ReliabilityBin]:
    """Returns how often completions of each confidence are judged as labelled; empty where labels are not the
    least and the largest of `values`."""
    if not values or any(each.label not in (values[0], values[-1]) for each in items):
        return []
    known = [(each.label, each.said) for each in items if each.said is not None]
    scaled = [(_scaled(said, values), _text_agreement(label, said, values)) for label, said in known]
    return _bins([(min(1.0, max(p, 1 - p)), hit) for p, hit in scaled])


def _length_terms(read: Sequence[tuple[LabelledText, float]]) -> list[tuple[int, Sums]]:
    said = scaled_values([score for _, score in read])
    lengths = scaled_values([float(each.length) for each, _ in read])
    labels = scaled_values([each.label for each, _ in read])
    scaled = zip(read, said, lengths, labels, strict=True)
    return [(each.prompt, _moments(score, length, label)) for (each, _), score, length, label in scaled]


def _moments(score: float, length: float, label: float) -> Sums:
    return (1.0, score, length, label, score**2, length**2, label**2, score * length, score * label,
            length * label)  # fmt: skip


def _partial(sums: Sequence[float]) -> float | None:
    """The partial correlation of score and length, given the label: 0 where the label leaves no differences
    of scores; None where lengths do not differ."""
    n, s, h, y, ss, hh, yy, sh, sy, hy = sums
    if n < 3:
        return None

    def left(product: float, one: float, other: float) -> float:
        return product / n - one / n * (other / n)

    var_y = left(yy, y, y)
    share = (left(sy, s, y) / var_y, left(hy, h, y) / var_y) if var_y > SAME else (0.0, 0.0)
    rest_s = left(ss, s, s) - share[0] * left(sy, s, y)
    rest_h = left(hh, h, h) - share[1] * left(hy, h, y)
    if rest_h <= SAME * max(1.0, hh / n):
        return None
    if rest_s <= SAME * max(1.0, ss / n):
        return 0.0
    return (left(sh, s, h) - share[0] * left(hy, h, y)) / math.sqrt(rest_s * rest_h)


# ---- answers ------------------------------------------------------------------------------------


def answer_figures(answers: Sequence[AskedOnce]) -> dict[str, Figure]:
    """Returns the figures of all answers: `unreadable` and `cut`, shares of them; `confidence`, the mean of
    soft verdicts; `thought_cut`, share of the thoughts; `tokens`, written for each readable
    verdict."""
    sure = [(each.prompt, each.confidence) for each in answers if each.confidence is not None]
    thoughts = [(each.prompt, each.is_thought_cut) for each in answers if each.is_thought_cut is not None]
    counted = [(each, each.num_tokens) for each in answers if each.num_tokens is not None]
    measures = {
        "unreadable": mean_measure([(each.prompt, not each.is_readable) for each in answers]),
        "cut": mean_measure([(each.prompt, each.is_cut) for each in answers]),
        "thought_cut": mean_measure(thoughts),
        "confidence": mean_measure(sure),
        "tokens": SummedFigure(
            [(each.prompt, (float(size), float(each.is_readable))) for each, size in counted], ratio_of_sums
        ),
    }
    return figures_with_intervals(measures)


def _bins(items: Sequence[tuple[float, float]]) -> list[ReliabilityBin]:
    """Returns bins of equal width of confidence and agreement, without those that are empty."""
    found: dict[int, list[tuple[float, float]]] = {}
    for confidence, hit in items:
        found.setdefault(min(int(confidence * NUM_BINS + SAME), NUM_BINS - 1), []).append((confidence, hit))
    return [
        ReliabilityBin(
            low=number / NUM_BINS,
            high=(number + 1) / NUM_BINS,
            items=len(each),
            confidence=math.fsum(confidence for confidence, _ in each) / len(each),
            agreement=math.fsum(hit for _, hit in each) / len(each),
        )
        for number, each in sorted(found.items())
    ]
