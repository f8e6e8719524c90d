"""Completions of a group are compared two by two."""

from collections.abc import Mapping
from dataclasses import dataclass

from yatt.config.schema import GenRMSection
from yatt.judging.comparison import PairOutcome, in_orders, pairs_of, scores_of
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question

TIE = 0.5
"""Outcome of a comparison without a verdict."""


@dataclass(frozen=True, slots=True)
class Pairwise:
    """The verdict is the share of the comparison that the completion shown first has won, from 0 to 1."""

    genrm: GenRMSection
    needs_group: bool = True
    fields: tuple[str, ...] = ("completion_a", "completion_b")
    rules: tuple[str, ...] = ()

    def questions(self, group: JudgedGroup) -> list[Question]:
        """Returns the questions about the pairs, each in one or both orders."""
        texts = (*group.completions, group.ground_truth)
        return [
            Question(
                key=f"{first}:{second}/{number}",
                fields={"completion_a": texts[first], "completion_b": texts[second]},
                about=tuple(place for place in (first, second) if place < len(group.completions)),
            )
            for number, (first, second) in enumerate(self._orders(group))
        ]

    def read(self, group: JudgedGroup, answers: Mapping[str, Answer | None]) -> GroupScores:
        """Returns scores in [0, 1] from all comparisons."""
        outcomes = []
        for number, (first, second) in enumerate(self._orders(group)):
            answer = answers[f"{first}:{second}/{number}"]
            outcomes.append(PairOutcome(first, second, answer.value if answer else TIE))
        section = self.genrm.judging
        counts = {}
        if section.orders != "one":  # else the first place may be the better one's
            decided = [each.outcome for each in outcomes if each.outcome != TIE]
            counts = {"decided": len(decided), "first_won": sum(each > TIE for each in decided)}
        if section.orders == "both":
            counts |= {"pairs": len(outcomes) // 2, "contradictions": _contradictions(outcomes)}
        return GroupScores(
            scores=tuple(scores_of(section.scores_by, outcomes, len(group.completions))), counts=counts
        )

    def _orders(self, group: JudgedGroup) -> list[tuple[int, ...]]:
        section = self.genrm.judging
        pairs = pairs_of(section.pairs, len(group.completions), group.seed, section.matchings)
        return in_orders(section.orders, pairs, group.seed)


def _contradictions(outcomes: list[PairOutcome]) -> int:
    """Counts pairs in which the completion shown first won, or lost, in both orders."""
    both = zip(outcomes[::2], outcomes[1::2], strict=True)
    return sum((one.outcome - TIE) * (other.outcome - TIE) > 0 for one, other in both)
