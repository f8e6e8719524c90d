"""Ways of judging from a user's file: how they are asked from another process, and what they may answer.

Such a way is loaded in reward processes only, which a controller can kill. Groups and scores travel as bytes
of msgpack, with types on both sides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from yatt.config.schema import GenRMSection
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Judging, Question
from yatt.judging.template import ROW_FIELDS, numbered_completions, shown_fields_of
from yatt.records.episode import MediaRef

MOST_QUESTIONS, MOST_KEY = 4096, 128
"""Most questions about a group, and most characters of a question's key."""

Answers = dict[str, Answer | None]
_GROUP = msgspec.msgpack.Decoder(tuple[JudgedGroup, Answers | None])
_QUESTIONS = msgspec.msgpack.Decoder(list[Question])
_SCORES = msgspec.msgpack.Decoder(GroupScores)


@dataclass(frozen=True, slots=True)
class Outside:
    """What is known of a user's way without its code: it gets whole groups."""

    genrm: GenRMSection
    needs_group: bool = True
    rules: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All that the template shows."""
        return tuple(sorted(shown_fields_of(self.genrm.template) - {*ROW_FIELDS, "media"}))

    def questions(self, group: JudgedGroup) -> list[Question]:
        """A question about all completions, with the fields of the template: one that is as long as can be.
        A run asks the user's."""
        text = numbered_completions(group.completions)
        fields = dict.fromkeys(self.fields, text)
        return [Question(key="0", fields=fields, about=tuple(range(len(group.completions))))]


def way_name(genrm: str) -> str:
    """Returns the name of the function that is a GenRM's own way of judging."""
    return f"{genrm}:way"


def packed_group(group: JudgedGroup, answers: Mapping[str, Answer | None] | None = None) -> bytes:
    """Returns a group, without its data row, and the answers to its questions if there are some."""
    return msgspec.msgpack.encode((replace(group, row={}), answers))


def ask_way(way: Judging, payload: bytes, row: Mapping[str, Any]) -> bytes:
    """Returns the questions about a packed group; or with answers its scores.

    Raises:
        ValueError: the way gives what is none of these.
    """
    packed, answers = _GROUP.decode(payload)
    group = replace(packed, row=row)
    if answers is None:
        return msgspec.msgpack.encode(checked_questions(way.questions(group), group))
    return msgspec.msgpack.encode(checked_scores(way.read(group, answers), group))


def unpacked_questions(payload: bytes) -> list[Question]:
    """Returns what `ask_way` gave without answers."""
    return _QUESTIONS.decode(payload)


def unpacked_scores(payload: bytes) -> GroupScores:
    """Returns what `ask_way` gave for answers."""
    return _SCORES.decode(payload)


def checked_questions(found: Any, group: JudgedGroup) -> list[Question]:
    """Returns the questions of a user's way.

    Raises:
        ValueError: they are none, with one sentence.
    """
    if not isinstance(found, list | tuple) or not all(isinstance(each, Question) for each in found):
        raise ValueError("questions() gives no list of yatt.judging.protocol.Question")
    if len(found) > MOST_QUESTIONS:
        raise ValueError(
            f"questions() gives {len(found)} questions about a group, more than {MOST_QUESTIONS}"
        )
    seen = set[str]()
    for each in found:
        if not isinstance(each.key, str) or not 0 < len(each.key) <= MOST_KEY or each.key in seen:
            raise ValueError(f"the key {each.key!r} of a question is empty, too long, or there twice")
        seen.add(each.key)
        if not each.about or not all(
            type(place) is int and 0 <= place < len(group.completions) for place in each.about
        ):
            raise ValueError(
                f"question {each.key!r} is about completions {each.about!r}, which are not there"
            )
        if not isinstance(each.fields, Mapping) or not all(
            isinstance(name, str) and _is_shown(text) for name, text in each.fields.items()
        ):
            raise ValueError(f"a field of question {each.key!r} is no text")
        if each.num_ranked and each.num_ranked != len(each.about):
            raise ValueError(f"question {each.key!r} ranks others than it is about")
    return list(found)


def _is_shown(text: Any) -> bool:
    return isinstance(text, str) or (
        isinstance(text, tuple) and all(isinstance(each, str | MediaRef) for each in text)
    )


def checked_scores(found: Any, group: JudgedGroup) -> GroupScores:
    """Returns the scores of a user's way, as plain floats.

    Raises:
        ValueError: they are none, with one sentence.
    """
    if not isinstance(found, GroupScores) or len(found.scores) != len(group.completions):
        raise ValueError("read() gives no yatt.judging.protocol.GroupScores with a score for each completion")
    if found.extras and len(found.extras) != len(group.completions):
        raise ValueError("read() gives extras of another number of completions")
    scores = tuple(None if score is None else _number(score, "score") for score in found.scores)
    extras = tuple(
        {str(key): _number(value, str(key)) for key, value in each.items()} for each in found.extras
    )
    counts = {str(key): max(0, int(count)) for key, count in found.counts.items()}
    return GroupScores(scores=scores, extras=extras, counts=counts)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(f"read() gives {value!r} as {name}, which is no finite number")
    return float(value)


def refuse_fields(template_fields: set[str], question: Question) -> None:
    """Refuses a question that gives a template's field no value.

    Raises:
        ValueError: one is missing.
    """
    missing = sorted(template_fields - {*ROW_FIELDS, "media", *question.fields})
    if missing:
        raise ValueError(f"question {question.key!r} has no field {missing[0]!r}, which the template shows")
