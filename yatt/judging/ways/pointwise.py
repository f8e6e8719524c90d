"""Each completion is judged alone, as soon as it is complete."""

from collections.abc import Mapping
from dataclasses import dataclass

from yatt.config.schema import GenRMSection
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question


@dataclass(frozen=True, slots=True)
class Pointwise:
    """The verdict is the score."""

    genrm: GenRMSection
    needs_group: bool = False
    fields: tuple[str, ...] = ("completion",)
    rules: tuple[str, ...] = ()

    def questions(self, group: JudgedGroup) -> list[Question]:
        """Returns one question a completion."""
        return [
            Question(key=str(index), fields={"completion": text}, about=(place,))
            for place, (index, text) in enumerate(zip(group.indexes, group.completions, strict=True))
        ]

    def read(self, group: JudgedGroup, answers: Mapping[str, Answer | None]) -> GroupScores:
        """Returns the means of the votes."""
        found = [answers[str(index)] for index in group.indexes]
        return GroupScores(
            scores=tuple(each.value if each else self.genrm.unparsable_score for each in found)
        )
