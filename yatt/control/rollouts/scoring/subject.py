"""A completion to score, with what functions and GenRMs may know of it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from yatt.adapters.inputs.dataset import Row, conversation_of, prompt_text, truth_text
from yatt.config.schema import GenRMSection
from yatt.control.rollouts.groups.groups import PromptGroup, SampleState
from yatt.judging.template import Shown, ShownText, conversation_text
from yatt.records import message as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One answer of a GenRM about samples of a group. `verdict` is None if it could not be read; `tries`
    counts the answers to one question, over its votes and retries, from 1."""

    genrm: str
    about: tuple[int, ...]
    """Indexes of the samples in their group, in the order in which they were shown."""

    shown: Shown
    answer: str
    finish_reason: str
    tries: int
    verdict: m.Scored | None
    criteria: tuple[str, ...] = ()
    """Those of which the verdict has a value each, instead of a score."""

    thought: str = ""
    """What the GenRM thought before it answered."""

    is_thought_cut: bool = False

    num_tokens: int = 0
    """That the GenRM has written; 0 if a service does not tell."""

    span_s: tuple[float, float] = (0.0, 0.0)
    """When it was asked and had answered, in monotonic seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One completion to score, and its data row."""

    group: PromptGroup
    sample: SampleState
    row: Row
    ref: m.RowRef
    counters: "Counter[str]" = field(default_factory=Counter)
    judged: list[Judged] | None = None
    """Gets the answers about the group, if they are recorded."""

    preds: dict[str, str] = field(default_factory=dict)
    """Answers that functions read in the completion, by name of the score."""

    unreadable: dict[str, dict[int, tuple[int, str]]] = field(default_factory=dict)
    """What a GenRM was asked and said, where no verdict was found in it, by the GenRM's name: of the first
    such question, by the numbers of question and try, because the order of answers depends on timing."""

    is_held_out: bool = False
    turns: tuple[tuple[str, str], ...] = ()
    """With an environment: role and text of all turns after the prompt."""

    def note_unreadable(self, genrm: str, number: tuple[int, int], why: str) -> None:
        """Notes an answer without a verdict, with the numbers of its question and try."""
        of_genrm, (question, attempt) = self.unreadable.setdefault(genrm, {}), number
        of_genrm[question] = min(of_genrm.get(question, (attempt, why)), (attempt, why))

    @property
    def place(self) -> str:
        """Name of the sample in messages."""
        return f"prompt {self.group.number}, sample {self.sample.index}"

    def completion(self, genrm: GenRMSection) -> ShownText:
        """The completion as this GenRM is shown it: what the policy has said; with `sees: all` also the
        environment's answers, with their pictures."""
        sample = self.sample
        if genrm.sees != "all" or not self.turns:
            return sample.text
        turns = zip(self.turns, sample.turns, strict=True)
        return conversation_text([(text, [each.ref for each in turn.media]) for (_, text), turn in turns])

    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the prompt, and what was said after it: for models that are shown conversations."""
        return conversation_of(self.row.prompt, *(self.turns or (("assistant", self.sample.text),)))

    def shown(self, **completions: ShownText) -> Shown:
        """What a GenRM is shown: the data row, and `completions` by the names of the template's fields."""
        row = self.row
        return {
            "prompt": prompt_text(row.prompt),
            "ground_truth": truth_text(row.ground_truth),
            "data_source": row.data_source,
            **completions,
        }

    def order(self, name: str, text: str, *, num_ranked: int = 0, criteria: tuple[str, ...] = ()) -> m.Score:
        """The order to score `text`: the completion, or a GenRM's verdict on it."""
        group, sample = self.group, self.sample
        return m.Score(
            reward=name,
            prompt=group.prompt_text,
            completion=text,
            row=self.ref,
            is_held_out=self.is_held_out,
            finish_reason=sample.finish_reason,
            num_prompt_tokens=group.num_prompt_tokens,
            num_completion_tokens=sample.num_tokens,
            turns=self.turns,
            num_ranked=num_ranked,
            criteria=criteria,
        )
