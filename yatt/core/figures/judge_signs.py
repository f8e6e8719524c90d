"""Signs that a GenRM's verdicts say little, or that a policy pleases it and not the rule beside it, with the
sentences of their alarms. Pure.

A *gap* between a judge and a rule: the running median of the rule's mean has fallen clearly below its best,
and the judge's has not fallen since. A policy that has found what its judge likes shows only this: the
judge's own curve stays where it is.

*Clearly* is both a share of what the rule has reached, and more than the noise of its means: an extreme of
many medians lies above the others by chance.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from yatt.core.figures.drop_counters import counter_name
from yatt.core.samples.rewards import EQUAL_REWARDS

Row = Mapping[str, Any]

MEDIAN_ROWS = 5
LEAST_FALL = 0.1
"""Smallest fall, as a share of the largest of the rule's best value and the range of its medians."""

NOISES = 4.0
"""Smallest fall, in standard deviations of one mean."""

SIGMA_OF_STEP = 0.886
"""Standard deviation of normal values by the mean absolute difference of two: the root of pi, halved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTrack:
    """Means of one score, as far as they were seen: the last ones, extremes of their medians, and the sum and
    number of absolute differences between neighbours."""

    last: tuple[float, ...] = ()
    lowest: float = 0.0
    highest: float = 0.0
    steps_sum: float = 0.0
    num_steps: int = 0

    def longer(self, value: float) -> "ScoreTrack":
        """This track with one more mean."""
        last = (*self.last, value)[-MEDIAN_ROWS:]
        median = statistics.median(last)
        if not self.last:
            return ScoreTrack(last=last, lowest=median, highest=median)
        return ScoreTrack(
            last=last,
            lowest=min(self.lowest, median) if self.is_known else median,  # fewer values make no median
            highest=max(self.highest, median) if self.is_known else median,
            steps_sum=self.steps_sum + abs(value - self.last[-1]),
            num_steps=self.num_steps + 1,
        )

    @property
    def median(self) -> float:
        """Running median."""
        return statistics.median(self.last)

    @property
    def is_known(self) -> bool:
        """Whether enough means were seen for a median."""
        return len(self.last) == MEDIAN_ROWS

    @property
    def noise(self) -> float:
        """Standard deviation of one mean."""
        return SIGMA_OF_STEP * self.steps_sum / max(1, self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The highest median of a rule, and the judges' medians at that iteration."""

    value: float
    judges: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A judge and a rule, with their medians when the rule's was best, and now."""

    judge: str
    rule: str
    judge_then: float
    judge_now: float
    rule_then: float
    rule_now: float

    def in_words(self) -> str:
        """Returns what happened."""
        return (
            f"'{self.rule}' fell from {self.rule_then:.3f} to {self.rule_now:.3f} while the judge "
            f"'{self.judge}' went from {self.judge_then:.3f} to {self.judge_now:.3f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreState:
    """What was seen of all scores, and of the length of completions."""

    tracks: Mapping[str, ScoreTrack] = field(default_factory=dict)
    best: Mapping[str, Best] = field(default_factory=dict)
    length: ScoreTrack = field(default_factory=ScoreTrack)

    def after(self, row: Mapping[str, Any], judges: Sequence[str], rules: Sequence[str]) -> "ScoreState":
        """Returns the state after an iteration's row; a score that the row lacks keeps what it had."""
        tracks = dict(self.tracks)
        for name in (*judges, *rules):
            value = row.get(f"critic/score/{name}/mean")
            if isinstance(value, int | float):
                tracks[name] = tracks.get(name, ScoreTrack()).longer(float(value))
        known = {
            judge: tracks[judge].median for judge in judges if judge in tracks and tracks[judge].is_known
        }
        best = dict(self.best)
        for rule in rules:
            track = tracks.get(rule)
            if track is None or not track.is_known:
                continue
            if rule not in best or track.median >= best[rule].value:
                best[rule] = Best(value=track.median, judges=known)
        length = row.get("response_length/mean")
        longer = self.length.longer(float(length)) if isinstance(length, int | float) else self.length
        return replace(self, tracks=tracks, best=best, length=longer)

    @property
    def has_longer_texts(self) -> bool:
        """Whether completions have become clearly longer than they were."""
        return self.length.is_known and self.length.median > LEAST_GROWTH * self.length.lowest

    def gaps(self) -> list[Gap]:
        """Returns the gaps that there are now."""
        return [
            Gap(
                judge=judge,
                rule=rule,
                judge_then=then,
                judge_now=self.tracks[judge].median,
                rule_then=best.value,
                rule_now=self.tracks[rule].median,
            )
            for rule, best in self.best.items()
            for judge, then in best.judges.items()
            if _has_fallen(self.tracks[rule], best.value) and _holds(self.tracks[judge], then)
        ]


def _has_fallen(track: ScoreTrack, best: float) -> bool:
    share = LEAST_FALL * max(abs(best), track.highest - track.lowest)
    return best - track.median > max(share, NOISES * track.noise)


def _holds(track: ScoreTrack, then: float) -> bool:
    return track.median >= then - 2 * track.noise


# ---- one row ------------------------------------------------------------------------------------

MOST_UNREADABLE, LEAST_ASKED = 0.2, 5
"""Share of a GenRM's answers without a verdict that is an alarm, and answers of which it is taken."""

MOST_CONTRADICTIONS, MOST_FIRST, LEAST_PAIRS = 0.4, 0.65, 20
"""Share of pairs in which the place decided, share of decided comparisons that the completion shown first
won, and comparisons of which they are taken."""

LEAST_CONFIDENCE = 0.7
"""Mean probability of the word that a soft verdict writes, below which verdicts say little."""

LEAST_GROUPS = 4
"""Groups of which it is said that a criterion or a score differs in none."""

MOST_LONGER, LEAST_GROWTH = 0.75, 1.2
"""Share of pairs in which the longer completion has the higher score, and growth of completions, above which
a judge may be pleased by length."""

MOST_SAME = 0.9
"""Share of groups in which all scores of a judge are equal, above which it says nothing."""

LONGER, SAME = "longer_wins", "same"


def judge_measures(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """Returns what a judge's scores of a group's completions say of the judge: `same`, 1 if all are equal,
    else 0; and `longer_wins`, of the pairs that differ in both, the share in which the longer completion has
    the higher score, if there are any.

    Args:
        lengths: tokens of the completions.
    """
    longer = total = 0
    for (score, length), (other, its_length) in itertools.combinations(zip(scores, lengths, strict=True), 2):
        if length != its_length and abs(score - other) >= EQUAL_REWARDS:
            total += 1
            longer += (score > other) == (length > its_length)
    found = {SAME: float(max(scores) - min(scores) < EQUAL_REWARDS)}
    return found | ({LONGER: longer / total} if total else {})


def order_agreement(scores: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the share of pairs of a group's completions that two scores order alike, of those that both
    tell apart; None: there are none."""
    alike = total = 0
    for (score, other), (its_score, its_other) in itertools.combinations(zip(scores, others, strict=True), 2):
        if min(abs(score - its_score), abs(other - its_other)) >= EQUAL_REWARDS:
            total += 1
            alike += (score > its_score) == (other > its_other)
    return alike / total if total else None


def unreadable_judges(row: Row) -> list[str]:
    """Returns the GenRMs whose share of answers without a verdict is too large, with it."""
    found = []
    for name, asked in _counted(row, "/asked", LEAST_ASKED):
        kinds = (_count(row, f"genrm/{name}/{kind}") for kind in ("unparsable", "truncated"))
        if (share := sum(kinds) / asked) > MOST_UNREADABLE:
            found.append(f"'{name}' to {share:.0%}")
    return found


def place_signs(row: Row) -> list[str]:
    """Returns what each GenRM that judges by the place of a completion does, in words."""
    found = []
    for name, pairs in _counted(row, "/pairs", LEAST_PAIRS):
        share = _count(row, f"genrm/{name}/contradictions") / pairs
        if share > MOST_CONTRADICTIONS:
            found.append(
                f"GenRM '{name}' contradicted itself in {share:.0%} of the pairs shown in both orders"
            )
    for name, decided in _counted(row, "/decided", LEAST_PAIRS):
        first = _count(row, f"genrm/{name}/first_won") / decided
        for which, share in (("first", first), ("second", 1 - first)):
            if share > MOST_FIRST:
                found.append(f"GenRM '{name}' preferred the {which} place in {share:.0%} of its comparisons")
    return found


def unsure_judges(row: Row) -> list[str]:
    """Returns the GenRMs whose soft verdicts say little, with the mean share of their likeliest word."""
    found = []
    for key in row:
        name = counter_name(key, "critic/score/", "/confidence/mean")
        if name and f"critic/score/{name}/elsewhere/mean" in row and _count(row, key) < LEAST_CONFIDENCE:
            found.append(f"'{name}' ({_count(row, key):.2f})")
    return found


def same_criteria(row: Row) -> list[str]:
    """Returns the criteria of rubrics whose values differed in no group."""
    found = []
    for name, groups in _counted(row, "/groups", LEAST_GROUPS):
        judge, _, criterion = name.partition("/criterion/")
        if criterion and _count(row, f"genrm/{name}/same") >= groups:
            found.append(f"'{criterion}' of GenRM '{judge}'")
    return found


def length_judges(row: Row, judges: Sequence[str]) -> list[str]:
    """Returns the judges that mostly score the longer of two completions higher, with the share."""
    found = _measured(row, judges, LONGER, MOST_LONGER)
    return [f"'{name}' in {share:.0%} of the pairs" for name, share in found]


def same_judges(row: Row, judges: Sequence[str]) -> list[str]:
    """Returns the judges that score all completions of a group alike in nearly every group."""
    return [f"'{name}' in {share:.0%}" for name, share in _measured(row, judges, SAME, MOST_SAME)]


def _measured(row: Row, judges: Sequence[str], measure: str, least: float) -> Iterator[tuple[str, float]]:
    """Yields the judges with a measure above `least`: functions may have a number of its name."""
    for name in judges if _count(row, "rollout/groups") >= LEAST_GROUPS else ():
        if (share := _count(row, f"critic/score/{name}/{measure}/mean")) > least:
            yield name, share


def signs_by_alarm(row: Row, judges: Sequence[str]) -> dict[str, list[str]]:
    """Returns what a row says of GenRMs, in words, by name of the alarm.

    Args:
        judges: names of the GenRMs whose scores are part of the reward.
    """
    return {
        "judge.unreadable": unreadable_judges(row),
        "judge.place": place_signs(row),
        "judge.unsure": unsure_judges(row),
        "judge.criterion": same_criteria(row),
        "judge.length": length_judges(row, judges),
        "judge.same": same_judges(row, judges),
    }


def _counted(row: Row, end: str, least: float) -> Iterator[tuple[str, float]]:
    """Yields the GenRMs with a counter of this name that is large enough, and its value; or criteria, as
    GENRM/criterion/NAME."""
    for key in row:
        name = counter_name(key, "genrm/", end)
        if name and (count := _count(row, key)) >= least:
            yield name, count


def _count(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


# ---- sentences ----------------------------------------------------------------------------------

JUDGE_WORDS = {
    "judge.unreadable": (
        "a GenRM gave answers without a readable verdict ({judges} of the questions)",
        "They teach nothing, or a score that says nothing. Look at genrms[].max_tokens, at verdict, and at "
        "the template; events.jsonl (judge.unreadable) has examples.",
    ),
    "judge.gap": (
        "{gaps}, seen",
        "The policy may have found what the judge likes and nobody wants. Read completions with high scores "
        "(`yatt show`), put a rule before the judge, or go on from a checkpoint before it: "
        "run.from_checkpoint.",
    ),
    "judge.place": ("{judges}", "It sees no difference, or prefers a place (judging.orders: both)."),
    "judge.unsure": (
        "the likeliest word of soft verdicts of {judges} was no likelier than that, on the average",
        "If critic/score/NAME/elsewhere/mean is large, the template does not lead to the verdict's words.",
    ),
    "judge.criterion": ("the value of {judges} differed in no prompt group", "Write it harder."),
    "judge.length": (
        "completions have become longer, and the longer one had the higher score: {judges}, seen",
        "The policy may learn to write more instead of better. Compare a short and a long completion "
        "(`yatt show`), say in the template that length does not count, or set "
        "algorithm.overlong_buffer_tokens.",
    ),
    "judge.same": (
        "all completions of a prompt had the same score of GenRM {judges} of the groups",
        "Such a judge teaches nothing. Let it compare (judging.by: pairwise), or ask it single questions "
        "(judging.by: rubric).",
    ),
}
"""Of each alarm by its name: what was seen, and the cure."""
