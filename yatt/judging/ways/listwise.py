"""Completions of a group are ranked, all at once or in overlapping lists."""

from collections.abc import Mapping
from dataclasses import dataclass

from yatt.config.schema import GenRMSection
from yatt.judging.comparison import comparisons_of, in_orders, lists_of, scores_of
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question
from yatt.judging.template import numbered_completions


@dataclass(frozen=True, slots=True)
class Listwise:
    """The verdict names every completion that was shown once, by its number, the best first."""

    genrm: GenRMSection
    needs_group: bool = True
    fields: tuple[str, ...] = ("completions",)
    rules: tuple[str, ...] = ()

    def questions(self, group: JudgedGroup) -> list[Question]:
        """Returns one question a list and order."""
        return [
            Question(
                key=f"list/{number}",
                fields={"completions": numbered_completions([group.completions[i] for i in order])},
                about=order,
                num_ranked=len(order),
            )
            for number, order in enumerate(self._orders(group))
        ]

    def read(self, group: JudgedGroup, answers: Mapping[str, Answer | None]) -> GroupScores:
        """Returns scores in [0, 1] from the comparisons that the rankings imply. A list without a verdict
        implies none."""
        outcomes = []
        for number, order in enumerate(self._orders(group)):
            answer = answers[f"list/{number}"]
            for ranking in answer.rankings if answer else ():
                outcomes += comparisons_of([order[i] for i in ranking])
        return GroupScores(
            scores=tuple(scores_of(self.genrm.judging.scores_by, outcomes, len(group.completions)))
        )

    def _orders(self, group: JudgedGroup) -> list[tuple[int, ...]]:
        section = self.genrm.judging
        return in_orders(
            section.orders, lists_of(section.list_size, len(group.completions), group.seed), group.seed
        )
