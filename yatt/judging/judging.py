"""The ways of judging, by `genrms[].judging.by`."""

from collections.abc import Callable, Mapping
from typing import Any

from yatt.config.schema import GenRMSection
from yatt.judging.outside import Outside
from yatt.judging.protocol import Asking, JudgedGroup, Judging, Question, shown_fields
from yatt.judging.template import ShownText, check_template
from yatt.judging.ways.listwise import Listwise
from yatt.judging.ways.pairwise import Pairwise
from yatt.judging.ways.pointwise import Pointwise
from yatt.judging.ways.rubric import Rubric

WAYS: dict[str, Callable[[GenRMSection], Judging]] = {
    "pointwise": Pointwise,
    "pairwise": Pairwise,
    "listwise": Listwise,
    "rubric": Rubric,
}
"""A new way is a module in `yatt.judging.ways`, a line here, and its name in the config."""


def judging_of(genrm: GenRMSection) -> Judging:
    """Returns the way of judging of a GenRM with a template, which is none of the user's."""
    return WAYS[genrm.judging.by](genrm)


def asking_of(genrm: GenRMSection) -> Asking:
    """Returns what is known of the way of judging of a GenRM with a template, also of a user's."""
    return judging_of(genrm) if genrm.has_known_questions else Outside(genrm)


def check_asked(genrm: GenRMSection, key: str) -> None:
    """Refuses a template that cannot show what the way of judging asks.

    Args:
        key: the template's key in the run file.

    Raises:
        ConfigError: see `check_template`.
    """
    fields, sees = asking_of(genrm).fields, genrm.sees != "none"
    check_template(genrm.template, key, fields, genrm.judging.by, sees=sees)


def shown_about(
    genrm: GenRMSection,
    completions: tuple[ShownText, ...],
    prompt: str,
    truth: str,
    data_source: str,
    row: Mapping[str, Any],
) -> tuple[Question, dict[str, ShownText]]:
    """Returns the longest question about completions of a prompt, which meet all rules, and what the GenRM is
    shown with it.

    Raises:
        UnusableRow: see `Judging.questions`.
    """
    judging = asking_of(genrm)
    group = _group_of(judging, completions, prompt, truth, data_source, row)
    questions = [(each, shown_fields(group, each)) for each in judging.questions(group)]
    return max(questions, key=lambda each: sum(map(len, each[1].values())))


def _group_of(
    judging: Asking,
    completions: tuple[ShownText, ...],
    prompt: str,
    truth: str,
    data_source: str,
    row: Mapping[str, Any],
) -> JudgedGroup:
    size = len(completions)
    return JudgedGroup(
        prompt=prompt,
        ground_truth=truth,
        data_source=data_source,
        completions=completions,
        indexes=tuple(range(size)),
        row=row,
        scores=(dict.fromkeys(judging.rules, 1.0),) * size,
    )


def questions_per_completion(genrm: GenRMSection, num_completions: int) -> float:
    """Returns how often a GenRM is asked for each completion of a group of so many which meet all rules, if
    every answer can be read; of what only the user's code knows, and of a data row's criteria, one each."""
    if not genrm.template or genrm.kind != "text":
        return 1.0
    judging = asking_of(genrm)
    size = num_completions if judging.needs_group else 1
    group = _group_of(judging, ("a",) * size, "a", "a", "a", _shortest_row(genrm))
    return len(judging.questions(group)) * genrm.votes / size


def shortest_shown(genrm: GenRMSection, num_completions: int) -> dict[str, ShownText]:
    """Returns the shortest that a GenRM is shown: prompt and completions of one letter; what a client of the
    user's code shows is unknown, and taken for one letter."""
    if genrm.asks_by_client:
        return {"completion": "a"}
    return _shortest(genrm, num_completions)[1]


def most_shown(genrm: GenRMSection, num_completions: int) -> int:
    """Returns the most completions of a group of so many that one question shows."""
    return len(_shortest(genrm, num_completions)[0].about)


def _shortest(genrm: GenRMSection, num_completions: int) -> tuple[Question, dict[str, ShownText]]:
    return shown_about(genrm, ("a",) * num_completions, "a", "a", "a", _shortest_row(genrm))


def _shortest_row(genrm: GenRMSection) -> Any:
    row: Any = [{"text": "a"}]
    for part in reversed(genrm.judging.criteria_key.split(".")):
        row = {part: row}
    return row
