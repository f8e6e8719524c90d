"""Completions are judged by criteria: each is a question, or a function of the run (a rule).

After Gunjal et al., "Rubrics as Rewards" (arXiv 2507.17746): the score is the weighted share of the criteria
that are met. Criteria are left out by lot after "Rubric Dropout" (arXiv 2608.11669), against policies that
learn to please the judge. Required rules are looked at before any question is asked: without one a policy was
seen to learn its task and then to leave it for texts that only please the judge.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yatt.config.schema import GenRMSection
from yatt.config.sections.judges import MOST_CRITERIA, MOST_WEIGHT, CriterionSection
from yatt.config.sections.scoring import MEASURES
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question, UnusableRow

MET = 0.5
"""A required criterion with a smaller value is not met."""

MOST_TEXT, MOST_NAME = 4096, 64


@dataclass(frozen=True, slots=True)
class Rubric:
    """A verdict says how far one criterion is met; or one for all, as JSON."""

    genrm: GenRMSection
    needs_group: bool = True

    @property
    def fields(self) -> tuple[str, ...]:
        """The completion, and the criterion or all of them."""
        return "completion", "criteria" if self.genrm.judging.asks == "together" else "criterion"

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the functions that are criteria."""
        return tuple(dict.fromkeys(each.rule for each in self.genrm.judging.criteria if each.rule))

    def questions(self, group: JudgedGroup) -> list[Question]:
        """Returns the questions about completions whose required rules are met.

        Raises:
            UnusableRow: the row's criteria cannot be used.
        """
        asked = [each for each in self._criteria(group) if not each.rule]
        found = []
        for place, (index, text) in enumerate(zip(group.indexes, group.completions, strict=True)):
            if not self._fails_rule(group, place):
                found += self._about(index, place, text, asked)
        return found

    def _about(self, index: int, place: int, text: Any, asked: Sequence[CriterionSection]) -> list[Question]:
        if self.genrm.judging.asks == "each":
            return [
                Question(
                    key=f"{index}/{each.name}",
                    fields={"completion": text, "criterion": each.text},
                    about=(place,),
                )
                for each in asked
            ]
        names = tuple(each.name for each in asked)
        listed = "\n".join(f"{each.name}: {each.text}" for each in asked)
        fields = {"completion": text, "criteria": listed}
        return [Question(key=str(index), fields=fields, about=(place,), criteria=names)] if names else []

    def read(self, group: JudgedGroup, answers: Mapping[str, Answer | None]) -> GroupScores:
        """Returns the weighted shares, and the value of each criterion.

        Raises:
            UnusableRow: as in `questions`.
        """
        criteria = self._criteria(group)
        values = [self._values(group, place, criteria, answers) for place in range(len(group.indexes))]
        counts: dict[str, int] = {}
        for each in self.genrm.judging.criteria:  # of rows' there would be a counter for each name
            seen = [round(found[each.name], 6) for found in values if each.name in found]
            if each.text and len(seen) > 1:
                counts |= {f"criterion/{each.name}/groups": 1}
                counts |= {f"criterion/{each.name}/same": int(len(set(seen)) == 1)}
        scores = tuple(weighted_share(criteria, found) for found in values)
        return GroupScores(scores=scores, extras=tuple(values), counts=counts)

    def _values(
        self,
        group: JudgedGroup,
        place: int,
        criteria: Sequence[CriterionSection],
        answers: Mapping[str, Answer | None],
    ) -> dict[str, float]:
        """Returns the criteria's values of one completion; only rules' if no question was asked about it."""
        index, is_asked = group.indexes[place], not self._fails_rule(group, place)
        found = {}
        for each in criteria:
            if each.rule:
                found[each.name] = min(1.0, max(0.0, group.scores[place][each.rule]))
            elif is_asked:
                found[each.name] = self._value(answers, str(index), each.name)
        return found

    def _value(self, answers: Mapping[str, Answer | None], index: str, name: str) -> float:
        answer = answers[index if self.genrm.judging.asks == "together" else f"{index}/{name}"]
        verdict = self.genrm.verdict
        if answer is None:
            return self.genrm.unparsable_score
        if self.genrm.judging.asks == "together":
            given = [values[name] for values in answer.values]
            value = math.fsum(given) / len(given)
        else:
            value = answer.value
        if verdict.scores:
            return value
        return (value - verdict.minimum) / (verdict.maximum - verdict.minimum)

    def _criteria(self, group: JudgedGroup) -> list[CriterionSection]:
        """Returns the criteria of this group, without those that are left out of it by lot."""
        section = self.genrm.judging
        found = list(section.criteria)
        if section.criteria_key:
            found += criteria_of_row(group.row, section.criteria_key, may_lack=bool(section.criteria))
        _check_names(found, section.criteria_key)
        draw = random.Random(f"criteria/{group.seed}")
        kept = [each for each in found if draw.random() >= section.drop or each.required or each.rule]
        return kept if any(each.weight > 0 and each.text for each in kept) else found

    def _fails_rule(self, group: JudgedGroup, place: int) -> bool:
        """Whether a required rule is not met: nothing is asked then."""
        return any(
            each.required and each.rule and group.scores[place][each.rule] < MET
            for each in self.genrm.judging.criteria
        )


def weighted_share(criteria: Sequence[CriterionSection], values: Mapping[str, float]) -> float:
    """Returns sum(weight * value) / sum(positive weights), in [0, 1]; 0 if a required criterion is not met or
    has no value."""
    if any(each.required and values.get(each.name, 0.0) < MET for each in criteria):
        return 0.0
    total = math.fsum(each.weight * values[each.name] for each in criteria if each.name in values)
    most = math.fsum(each.weight for each in criteria if each.weight > 0 and each.name in values)
    return min(1.0, max(0.0, total / most)) if most else 0.0


def refuse_row(genrm: GenRMSection, row: Mapping[str, Any]) -> None:
    """Refuses a data row whose criteria could not be used.

    Raises:
        UnusableRow: see `criteria_of_row`.
    """
    key = genrm.judging.criteria_key
    if key:
        own = genrm.judging.criteria
        _check_names([*own, *criteria_of_row(row, key, may_lack=bool(own))], key)


def criteria_of_row(row: Mapping[str, Any], key: str, *, may_lack: bool = False) -> list[CriterionSection]:
    """Returns the criteria that stand in a data row.

    Args:
        key: their place, with dots.
        may_lack: the row need not have any.

    Raises:
        UnusableRow: there are none, or they cannot be used.
    """
    found: Any = row
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, str):  # as columns of parquet files have it
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise UnusableRow(f"{key} is no list of criteria, nor one as JSON") from error
    if may_lack and (found is None or found == []):
        return []
    if not isinstance(found, list) or not found:
        raise UnusableRow(f"{key} is no list of criteria")
    if len(found) > MOST_CRITERIA:
        raise UnusableRow(f"{key} has {len(found)} criteria, more than {MOST_CRITERIA}")
    return [_criterion(each, f"{key}[{number}]", number) for number, each in enumerate(found)]


def _criterion(given: Any, place: str, number: int) -> CriterionSection:
    """Returns one criterion of a row: an object with text, and as it likes name, weight and required."""
    if not isinstance(given, Mapping):
        raise UnusableRow(f"{place} is no object with text and weight")
    known = {name: value for name, value in given.items() if value is not None}  # parquet fills up with nulls
    extra = sorted(set(known) - {"name", "text", "weight", "required"}, key=str)
    if extra:
        raise UnusableRow(f"{place} has {extra[0]!r}; known are name, text, weight and required")
    name, text = known.get("name", f"row_{number + 1}"), known.get("text")
    weight, required = known.get("weight", 1.0), known.get("required", False)
    if not isinstance(text, str) or not text.strip() or len(text) > MOST_TEXT or not is_encodable(text):
        raise UnusableRow(f"{place}.text is no text of 1 to {MOST_TEXT} characters")
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MOST_NAME:
        raise UnusableRow(f"{place}.name is no name of 1 to {MOST_NAME} characters")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= MOST_WEIGHT:
        raise UnusableRow(f"{place}.weight is no number from -{MOST_WEIGHT:g} to {MOST_WEIGHT:g}")
    if not isinstance(required, bool):
        raise UnusableRow(f"{place}.required is neither true nor false")
    if required and weight < 0:
        raise UnusableRow(f"{place} is required and has a weight below 0")
    return CriterionSection(name=name, text=text, weight=float(weight), required=required)


def is_encodable(text: str) -> bool:
    """Whether a text has no half of a character."""
    return text == text.encode(errors="replace").decode()


def _check_names(criteria: Sequence[CriterionSection], key: str) -> None:
    """Refuses what only a row can have: the config's own criteria were checked before."""
    names = [each.name for each in criteria]
    if taken := [name for name in names if name in MEASURES]:
        raise UnusableRow(f"{key}: the name {taken[0]!r} is that of one of a judge's own measures")
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise UnusableRow(f"{key}: two criteria are named {twice[0]!r}")
    if not any(each.weight > 0 and each.text for each in criteria):
        raise UnusableRow(f"{key}: no criterion has a weight above 0")
