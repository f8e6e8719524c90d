"""Where scores come from: functions in reward processes, GenRMs by a way of judging, models with numbers.

A source scores one completion as soon as it is complete, or all completions of a prompt together.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from yatt.adapters.inputs.dataset import prompt_text, truth_text
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sections.functions import RewardSection
from yatt.control.rollouts.scoring.asked import AskedQuestion, Unscored
from yatt.control.rollouts.scoring.asking import scalar_scores, taught_score
from yatt.control.rollouts.scoring.judging import CallReward, Judge, users_failure
from yatt.control.rollouts.scoring.subject import Subject
from yatt.errors import words_of
from yatt.judging.judging import asking_of, judging_of
from yatt.judging.outside import (
    checked_questions,
    checked_scores,
    packed_group,
    unpacked_questions,
    unpacked_scores,
    way_name,
)
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question, UnusableRow, shown_fields
from yatt.records import message as m

MANY = 200
"""Questions about a group whose scores are computed in a thread."""

MOST_COUNTERS = 64
"""Names of counters that a user's way of judging may have; others are left out."""

Call = Callable[[m.ScoreMany], Awaitable[m.Message]]


class ScoreSource(Protocol):
    """What gives one score of a run."""

    @property
    def needs_group(self) -> bool:
        """Whether it scores all completions of a prompt together."""

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Returns the scores of completions: of one, or of a whole group.

        Raises:
            Unscored: there is no score, and a machine did not cause it.
            Interrupted: see `Judge.interrupt`.
            WorkerFailed | DeadlineExceeded | OSError: machines failed.
        """


def score_sources(config: RunConfig, judge: Judge, call_reward: CallReward) -> dict[str, ScoreSource]:
    """Returns the sources of a run, by the names of the scores, in their order."""
    found: dict[str, ScoreSource] = {r.name: FunctionSource(r, call_reward) for r in config.rewards}
    for genrm in config.genrms:
        if genrm.asks_by_client:
            found[genrm.name] = ClientSource(genrm, call_reward)
        elif genrm.judging.by == "own":
            found[genrm.name] = JudgedSource(genrm, judge, OwnWay(genrm, call_reward), {}, config.run.seed)
        elif genrm.kind == "scalar":
            found[genrm.name] = ScalarSource(genrm, judge)
        elif genrm.kind == "teacher":
            found[genrm.name] = TeacherSource(genrm, judge)
        else:
            way = InsideWay(genrm)
            found[genrm.name] = JudgedSource(genrm, judge, way, found, config.run.seed)
    return found


# ---- functions ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    items: list[m.Score] = field(default_factory=list)
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Batches:
    """The batches of one function.

    A batch is sent when it is full or its time is over. If the function fails on a batch, each sample is
    scored alone, so that one sample that cannot be scored costs no others.
    """

    def __init__(self, reward: RewardSection, call: Call) -> None:
        self._reward, self._call = reward, call
        self._open: tuple[_Batch, asyncio.Task[m.Message]] | None = None

    async def score(self, item: m.Score) -> m.Message:
        """Returns Scored, or Failed with the reason."""
        if self._open is None:
            batch = _Batch()
            self._open = batch, asyncio.create_task(self._send(batch))
        batch, sending = self._open
        place = len(batch.items)
        batch.items.append(item)
        if len(batch.items) >= self._reward.batch_size:
            self._open = None
            batch.is_full.set()
        batch.waiting += 1
        try:
            answer = await asyncio.shield(sending)  # other samples wait for it too
        finally:
            batch.waiting -= 1
        if isinstance(answer, m.Failed) and answer.user and len(batch.items) > 1:
            answer = await self._call(m.ScoreMany(reward=self._reward.name, items=(item,)))
            place = 0
        return answer.scores[place] if isinstance(answer, m.ScoredMany) else answer

    async def _send(self, batch: _Batch) -> m.Message:
        try:
            async with asyncio.timeout(self._reward.batch_wait_s):
                await batch.is_full.wait()
        except TimeoutError:
            if self._open is not None and self._open[0] is batch:
                self._open = None
        if not batch.waiting:
            return m.Failed(error="nobody waits for the batch any more")
        return await self._call(m.ScoreMany(reward=self._reward.name, items=tuple(batch.items)))


class FunctionSource:
    """A reward function."""

    def __init__(self, reward: RewardSection, call: CallReward) -> None:
        self._name, self._call = reward.name, call
        self._batches = Batches(reward, call) if reward.effective_scope == "batch" else None
        self.needs_group = reward.effective_scope == "group"

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Calls the function; see `ScoreSource`."""
        orders = tuple(subject.order(self._name, subject.sample.text) for subject in subjects)
        if self.needs_group:
            answer = await self._call(m.ScoreMany(reward=self._name, items=orders))
        elif self._batches is not None:
            answer = await self._batches.score(orders[0])
        else:
            answer = await self._call(orders[0])
        return _function_scores(self._name, subjects[0], answer)


class ClientSource:
    """A function that asks a GenRM by a client."""

    needs_group = False

    def __init__(self, genrm: GenRMSection, call: CallReward) -> None:
        self._name, self._call = genrm.name, call

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Calls the function; see `ScoreSource`."""
        (subject,) = subjects
        answer = await self._call(subject.order(self._name, subject.sample.text))
        scores = _function_scores(self._name, subject, answer)
        subject.counters[f"genrm/{self._name}/asked"] += scores[0].asked
        return scores


def _function_scores(name: str, subject: Subject, answer: m.Message) -> Sequence[m.Scored]:
    if isinstance(answer, m.ScoredMany):
        return answer.scores
    if isinstance(answer, m.Scored):
        return [answer]
    subject.counters[f"reward/{name}/failed"] += 1
    raise Unscored(users_failure(answer).error)


# ---- GenRMs -------------------------------------------------------------------------------------


class JudgedSource:
    """A GenRM that is asked by template, and whose verdicts are read.

    Args:
        functions: sources that its way of judging may look at, by name.
    """

    def __init__(
        self,
        genrm: GenRMSection,
        judge: Judge,
        way: "InsideWay | OwnWay",
        functions: Mapping[str, ScoreSource],
        run_seed: int,
    ) -> None:
        self._genrm, self._judge, self._run_seed = genrm, judge, run_seed
        self._way, self._functions = way, functions
        self.needs_group = way.known.needs_group

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Asks all questions; see `ScoreSource`."""
        genrm, group = self._genrm, await self._group(subjects)
        questions = await self._way.questions(group, subjects[0])
        asked = [
            AskedQuestion(
                subjects=tuple(subjects), question=each, number=number, shown=shown_fields(group, each)
            )
            for number, each in enumerate(questions)
        ]
        found = await asyncio.gather(
            *(self._judge.answer(genrm, each) for each in asked), return_exceptions=True
        )
        answers: dict[str, Answer | None] = {}
        for each, answer in zip(asked, found, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            answers[each.question.key] = answer
        if genrm.on_unparsable != "score":
            for each in asked:
                if answers[each.question.key] is None:
                    raise Unscored(subjects[0].unreadable[genrm.name][each.number][1])
        scores = await self._way.scores(group, answers, subjects[0])
        for key, count in scores.counts.items():
            subjects[0].counters[f"genrm/{genrm.name}/{key}"] += count
        measured = _measures(asked, answers, len(subjects))
        extras = [
            {**found, **extra} for found, extra in zip(measured, scores.extras or measured, strict=True)
        ]
        return [
            m.Scored(score=score or 0.0, applies=score is not None, extra=dict(extra))
            for score, extra in zip(scores.scores, extras, strict=True)
        ]

    async def _group(self, subjects: Sequence[Subject]) -> JudgedGroup:
        row, scores = subjects[0].row, [dict(subject.sample.scores) for subject in subjects]
        for rule in self._way.known.rules:
            lacking = [place for place, each in enumerate(scores) if rule not in each]
            if lacking and self._functions[rule].needs_group:
                lacking = list(range(len(scores)))
            found = await self._rule(rule, [subjects[place] for place in lacking])
            for place, score in zip(lacking, found, strict=True):
                scores[place][rule] = score
        return JudgedGroup(
            prompt=prompt_text(row.prompt),
            ground_truth=truth_text(row.ground_truth),
            data_source=row.data_source,
            completions=tuple(subject.completion(self._genrm) for subject in subjects),
            indexes=tuple(subject.sample.index for subject in subjects),
            row=row.raw,
            scores=tuple(scores),
            seed=self._run_seed + subjects[0].group.number,
        )

    async def _rule(self, rule: str, subjects: Sequence[Subject]) -> list[float]:
        """Returns the scores of a function that is a criterion, where they are not there yet.

        Raises:
            Unscored: it has none for a completion.
        """
        source = self._functions[rule]
        groups = [subjects] if source.needs_group and subjects else [[each] for each in subjects]
        found = await asyncio.gather(*map(source.score, groups), return_exceptions=True)
        scores: list[float] = []
        for group, scored in zip(groups, found, strict=True):
            where = f"rewards[{rule}], which is a criterion, sample {group[0].sample.index}"
            if isinstance(scored, Unscored):
                raise Unscored(f"{where}: {scored}") from scored
            if isinstance(scored, BaseException):
                raise scored
            if not all(each.applies for each in scored):
                raise Unscored(f"{where}: it has no score for it")
            scores += [each.score for each in scored]
        return scores


class InsideWay:
    """A way of judging that is called here."""

    def __init__(self, genrm: GenRMSection) -> None:
        self.known = judging_of(genrm)

    async def questions(self, group: JudgedGroup, _: Subject) -> Sequence[Question]:
        """Returns the questions about a group.

        Raises:
            Unscored: it has none.
        """
        with _costs_a_group():
            return self.known.questions(group)

    async def scores(
        self, group: JudgedGroup, answers: Mapping[str, Answer | None], _: Subject
    ) -> GroupScores:
        """Returns a group's scores.

        Raises:
            Unscored: it has none.
        """
        read = partial(self.known.read, group, answers)
        with _costs_a_group():
            found: GroupScores = await call_in_thread(read) if len(answers) > MANY else read()
            return found


class OwnWay:
    """A user's way of judging, which runs in reward processes; methods as of `InsideWay`."""

    def __init__(self, genrm: GenRMSection, call: CallReward) -> None:
        self._genrm, self._call = genrm, call
        self.known = asking_of(genrm)
        self._counted: dict[str, None] = {}

    async def questions(self, group: JudgedGroup, subject: Subject) -> Sequence[Question]:
        """Returns the questions about a group; see `InsideWay`."""
        payload = await self._asked(packed_group(group), subject)
        with _costs_a_group():  # its process has run the user's code
            return checked_questions(unpacked_questions(payload), group)

    async def scores(
        self, group: JudgedGroup, answers: Mapping[str, Answer | None], subject: Subject
    ) -> GroupScores:
        """Returns a group's scores; see `InsideWay`."""
        payload = await self._asked(packed_group(group, answers), subject)
        with _costs_a_group():
            found = checked_scores(unpacked_scores(payload), group)
        names = dict.fromkeys([*self._counted, *found.counts])
        self._counted = dict.fromkeys(list(names)[:MOST_COUNTERS])  # each is a curve
        return replace(found, counts={k: v for k, v in found.counts.items() if k in self._counted})

    async def _asked(self, payload: bytes, subject: Subject) -> bytes:
        """Has the way called.

        Raises:
            Unscored: it failed.
        """
        order = m.JudgeGroup(
            reward=way_name(self._genrm.name),
            payload=payload,
            row=subject.ref,
            is_held_out=subject.is_held_out,
        )
        answer = await self._call(order)
        if isinstance(answer, m.GroupJudged):
            return answer.payload
        subject.counters[f"reward/{self._genrm.name}/failed"] += 1
        raise Unscored(users_failure(answer).error)


@contextlib.contextmanager
def _costs_a_group() -> Iterator[None]:
    """Context manager: what a way of judging raises is the group's loss: another row may do well."""
    try:
        yield
    except UnusableRow as error:
        raise Unscored(f"the data row: {error}") from error
    except OSError:  # no thread can be started: a machine's failure
        raise
    except Exception as error:
        raise Unscored(f"its way of judging failed: {words_of(error)}") from error


def _measures(
    asked: Sequence[AskedQuestion], answers: Mapping[str, Answer | None], count: int
) -> list[dict[str, float]]:
    """Returns what verdicts say of themselves, by completion: means over the questions about it."""
    found: list[dict[str, list[float]]] = [{} for _ in range(count)]
    for each in asked:
        answer = answers[each.question.key]
        for place in each.question.about if answer else ():
            for key, value in answer.measures.items() if answer else ():
                found[place].setdefault(key, []).append(value)
    return [{key: sum(values) / len(values) for key, values in each.items()} for each in found]


class ScalarSource:
    """A scalar reward model."""

    def __init__(self, genrm: GenRMSection, judge: Judge) -> None:
        self._genrm, self._judge = genrm, judge
        self.needs_group = genrm.transform == "standardize"

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Has the model score each completion; see `ScoreSource`."""
        return [m.Scored(score=each) for each in await scalar_scores(self._judge, self._genrm, subjects)]


class TeacherSource:
    """A teacher, which scores the policy's tokens."""

    needs_group = False

    def __init__(self, genrm: GenRMSection, judge: Judge) -> None:
        self._genrm, self._judge = genrm, judge

    async def score(self, subjects: Sequence[Subject]) -> Sequence[m.Scored]:
        """Has the teacher score the tokens of one completion; see `ScoreSource`."""
        (subject,), sources = subjects, self._genrm.data_sources
        if sources and subject.row.data_source not in sources:
            return [m.Scored(score=0.0, applies=False)]
        return [m.Scored(score=await taught_score(self._judge, self._genrm, subject))]
