"""What a way of judging is: questions about a group, and scores from their answers.

A way has one round: all questions are known before the first answer. Who needs an answer to ask the next
question writes a function with a client instead (`genrms[].path`). Both methods are pure functions of their
arguments, so that an interrupted group asks the same questions again, with the same seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from yatt.judging.template import ShownText


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """Completions of one prompt, which are judged.

    Attributes:
        completions: as the GenRM is shown them.
        indexes: index of each completion in its prompt group.
        row: the data row's columns.
        scores: of each completion, those of the functions that the way looks at (`Judging.rules`).
        seed: of the run and the prompt, for what is drawn.
    """

    prompt: str
    ground_truth: str
    data_source: str
    completions: tuple[ShownText, ...]
    indexes: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Mapping[str, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to the GenRM.

    Attributes:
        key: names it within its prompt group, for its seed and its record.
        fields: values of the template's fields beside {prompt}, {ground_truth} and {data_source}.
        about: places in `JudgedGroup.completions` of those that it shows, in their order.
        num_ranked: above 0: its verdict is a ranking of so many completions, instead of a number.
        criteria: its verdict is JSON with a value for each of these names, instead of a number.
    """

    key: str
    fields: Mapping[str, ShownText]
    about: tuple[int, ...]
    num_ranked: int = 0
    criteria: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one question, of each readable vote: a number, a ranking (the best first), or a
    value for each criterion. `measures`: what soft verdicts say
    of themselves, means over the votes."""

    votes: tuple[float, ...] = ()
    rankings: tuple[tuple[int, ...], ...] = ()
    values: tuple[Mapping[str, float], ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The mean of the votes."""
        return math.fsum(self.votes) / len(self.votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """Scores of a group's completions.

    Attributes:
        scores: one for each completion; None: it has none.
        extras: further numbers of each completion, which become metrics (NAME/KEY); empty: none.
        counts: what is added to the counters genrm/NAME/KEY.
    """

    scores: tuple[float | None, ...]
    extras: tuple[Mapping[str, float], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


class UnusableRow(ValueError):
    """What a data row says about judging cannot be used."""


class Asking(Protocol):
    """What is known of a way of judging before its questions are answered."""

    @property
    def needs_group(self) -> bool:
        """Whether it needs all completions of a prompt; else each is judged as soon as it is complete, in a
        group of its own."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that a template must show, of those that questions give values for."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the run's functions whose scores it looks at."""

    def questions(self, group: JudgedGroup) -> Sequence[Question]:
        """Returns the questions about a group; their keys differ.

        Raises:
            UnusableRow: the data row has no use for this way.
        """


class Judging(Asking, Protocol):
    """A way of judging."""

    def read(self, group: JudgedGroup, answers: Mapping[str, Answer | None]) -> GroupScores:
        """Returns the scores.

        Args:
            answers: of every question, by key. None: it has no readable verdict, and the run file says that
                there is a score all the same (`on_unparsable`).
        """


def shown_fields(group: JudgedGroup, question: Question) -> dict[str, ShownText]:
    """Returns the values of all fields that a template may have for this question."""
    row: dict[str, ShownText] = {
        "prompt": group.prompt,
        "ground_truth": group.ground_truth,
        "data_source": group.data_source,
    }
    return row | dict(question.fields)
