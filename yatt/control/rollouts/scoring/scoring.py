"""Scores of completions: from functions in reward processes, and from GenRMs by template and verdict.

Some scores are made from one sample as soon as it is complete; others need the whole group: functions with
scope group, and GenRMs that compare completions. If a sample's function raises, or its verdict cannot be
parsed, the sample *fails* with the reason, or gets the score that the config sets for this case. Both cases
are counted; a failure never becomes a zero by default. A score of weight 0 is only a measurement: if it is
missing, this is counted and has no other effect.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from yatt.adapters.inputs.dataset import truth_text
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sections.scoring import RewardSection
from yatt.control.rollouts.scoring.asking import scalar_scores, taught_score
from yatt.control.rollouts.scoring.judging import (
    CallReward,
    Interrupted,
    Judge,
    Question,
    Refused,
    mean_score,
    users_failure,
)
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.gpus.placement import genrm_role
from yatt.core.samples.comparison import PairOutcome, comparisons_of, pairs_of, scores_of
from yatt.core.samples.rewards import Shaping
from yatt.core.samples.verdict import Shown, numbered_completions
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m

MACHINES = (WorkerFailed, DeadlineExceeded, OSError)
"""Failures that no text and no function caused; OSError: this machine cannot start a thread."""

NOT_APPLICABLE = "the function has no score for it"
MOST_MEASURES = 64
"""Names of further numbers that one function may give; each is a curve. Others are left out, with a line."""

FIRST_NUMBER = 1 << 20
"""Numbers of questions about groups begin here; below are those about single samples."""

Order = tuple[int, ...]
"""A question's completions as they are shown, one after the other; the group's size is the ground truth."""

MANY = 200
"""Comparisons whose scores are computed in a thread."""

_LOG = logging.getLogger(__name__)

Call = Callable[[m.ScoreMany], Awaitable[m.Message]]


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


class Scorer:
    """Scores completions of one node.

    Args:
        judge: asks the GenRMs.
        call_reward: calls one of this node's reward processes.
    """

    def __init__(self, config: RunConfig, judge: Judge, call_reward: CallReward) -> None:
        self._config, self._judge, self._call_reward = config, judge, call_reward
        self._genrms = {g.name: g for g in config.genrms}
        self._batches = {
            r.name: Batches(r, call_reward) for r in config.rewards if r.effective_scope == "batch"
        }
        self._of_groups = {r.name for r in config.rewards if r.effective_scope == "group"}
        self._of_groups |= {
            g.name for g in config.genrms if g.judging != "pointwise" or g.transform == "standardize"
        }
        section = config.algorithm
        self.shaping = Shaping(
            max_tokens=config.rollout.max_response_tokens, buffer_tokens=section.overlong_buffer_tokens,
            factor=section.overlong_penalty_factor, masks_truncated=section.mask_truncated,
        )  # fmt: skip
        self._measures: dict[str, dict[str, None]] = {}
        self._has_many: set[str] = set()
        self.weights = {r.name: r.weight for r in config.rewards} | {
            g.name: g.weight if g.kind != "teacher" else 0.0 for g in config.genrms
        }
        """Weight of each score in the reward."""

    def names(self, roles: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Returns the scores of a trained sample; with `roles`, those that can be made now."""
        genrms = [
            g for g in self._config.genrms
            if roles is None or not g.has_engine or genrm_role(g.name) in roles
        ]  # fmt: skip
        return (*(r.name for r in self._config.rewards), *(g.name for g in genrms))

    async def score(self, subject: Subject, roles: tuple[str, ...]) -> None:
        """Adds every missing score of one sample that can be made now; stops at the first failure."""
        sample = subject.sample
        have = sample.scores.keys() | sample.unmeasured.keys()
        for name in self.names(roles):
            if sample.failed:
                return
            if name not in have and name not in self._of_groups:
                await self.score_one(name, subject)

    async def score_group(self, subjects: Sequence[Subject], roles: tuple[str, ...]) -> None:
        """Adds every missing score that needs the whole group and can be made now."""
        for name in self.names(roles):
            if any(subject.sample.failed for subject in subjects):
                return
            have = [s.sample.scores.keys() | s.sample.unmeasured.keys() for s in subjects]
            if name in self._of_groups and not all(name in each for each in have):
                await self.score_together(name, subjects)

    async def interrupt(self) -> None:
        """Ends the questions to GenRMs that wait for an answer; their scores stay missing."""
        await self._judge.interrupt()

    def is_of_groups(self, name: str) -> bool:
        """Whether this score needs all samples of a group."""
        return name in self._of_groups

    async def score_one(self, name: str, subject: Subject) -> None:
        """Adds one score. A failure of any kind affects only this sample.

        Raises:
            WorkerFailed: it was lost to machine failures, in deterministic mode.
        """
        genrm = self._genrms.get(name)
        try:
            if genrm is None or genrm.path:
                await self._call_function(name, subject)
            else:
                await self._judge_one(genrm, subject)
        except Interrupted:
            return
        except MACHINES as error:
            self._failed(name, [subject], str(error), is_users=False)

    async def score_together(self, name: str, subjects: Sequence[Subject]) -> None:
        """Adds one score to all samples of a group. A failure affects only this group.

        Raises:
            WorkerFailed: it was lost to machine failures, in deterministic mode.
        """
        genrm = self._genrms.get(name)
        try:
            if genrm is None:
                await self._call_on_group(name, subjects)
            elif genrm.kind == "scalar":
                await self._value(genrm, subjects)
            else:
                await self._compare(genrm, subjects)
        except Interrupted:
            return
        except MACHINES as error:
            self._failed(name, subjects, str(error), is_users=False)

    # ---- functions ------------------------------------------------------------------------------

    async def _call_function(self, name: str, subject: Subject) -> None:
        order = subject.order(name, subject.sample.text)
        called = self._batches[name].score(order) if name in self._batches else self._call_reward(order)
        answer = await called
        if not isinstance(answer, m.Scored):
            subject.counters[f"reward/{name}/failed"] += 1
            self._failed(name, [subject], users_failure(answer).error, is_users=True)
            return
        if name in self._genrms:
            subject.counters[f"genrm/{name}/asked"] += answer.asked
        self._scored(name, subject, answer)

    async def _call_on_group(self, name: str, subjects: Sequence[Subject]) -> None:
        items = tuple(subject.order(name, subject.sample.text) for subject in subjects)
        answer = await self._call_reward(m.ScoreMany(reward=name, items=items))
        if not isinstance(answer, m.ScoredMany):
            subjects[0].counters[f"reward/{name}/failed"] += 1
            self._failed(name, subjects, users_failure(answer).error, is_users=True)
            return
        for subject, score in zip(subjects, answer.scores, strict=True):
            self._scored(name, subject, score)

    def _scored(self, name: str, subject: Subject, answer: m.Scored) -> None:
        sample = subject.sample
        if not answer.applies:
            subject.counters[f"reward/{name}/not_applicable"] += 1
            sample.unmeasured = {**sample.unmeasured, name: NOT_APPLICABLE}
            return
        sample.scores = {**sample.scores, name: answer.score}
        if answer.extra:
            known = self._known_measures(name, answer.extra)
            extras = {f"{name}/{key}": value for key, value in answer.extra.items() if key in known}
            sample.extras = {**sample.extras, **extras}
        subject.preds[name] = answer.pred

    def _known_measures(self, name: str, found: Iterable[str]) -> Collection[str]:
        """Returns the first names of a function's numbers, these included as far as there is room."""
        known = self._measures.setdefault(name, {})
        for key in found:
            if key in known:
                continue
            if len(known) < MOST_MEASURES:
                known[key] = None
            elif name not in self._has_many:
                self._has_many.add(name)
                _LOG.warning(
                    "reward '%s' gives numbers of more than %d names; those of more are left out: a name "
                    "that is made of a sample's content is a curve for each sample", name, MOST_MEASURES,
                )  # fmt: skip
        return known

    def _failed(self, name: str, subjects: Sequence[Subject], why: str, *, is_users: bool) -> None:
        kind, first = "genrm" if name in self._genrms else "reward", subjects[0]
        place = first.place if len(subjects) == 1 else f"prompt {first.group.number}"
        told = f"{kind} '{name}', {place}: {why}"
        if not is_users and self._config.run.deterministic:
            first.sample.fail_by_machines(told, deterministic=True)
        for subject in subjects:
            if self.weights[name] or subject.is_held_out or self._is_teacher(name):
                subject.sample.fail(told, is_users=is_users)
                continue
            subject.counters[f"{kind}/{name}/unmeasured"] += 1
            subject.sample.unmeasured = {**subject.sample.unmeasured, name: told}

    def _is_teacher(self, name: str) -> bool:
        return name in self._genrms and self._genrms[name].kind == "teacher"

    # ---- GenRMs ---------------------------------------------------------------------------------

    async def _judge_one(self, genrm: GenRMSection, subject: Subject) -> None:
        if genrm.data_sources and subject.row.data_source not in genrm.data_sources:
            self._scored(genrm.name, subject, m.Scored(score=0.0, applies=False))
            return
        if genrm.kind != "text":
            await self._value(genrm, [subject])
            return
        sample = subject.sample
        shown = subject.shown(completion=subject.completion(genrm))
        question = Question(subject=subject, shown=shown, about=(sample,), number=sample.index)
        try:
            found = await self._judge.verdicts(genrm, question)
        except Refused as error:
            self._failed(genrm.name, [subject], str(error), is_users=True)
            return
        if found:
            self._scored(genrm.name, subject, m.Scored(score=mean_score(found)))
        elif genrm.on_unparsable == "score":
            self._scored(genrm.name, subject, m.Scored(score=genrm.unparsable_score))
        else:
            self._no_verdict(genrm, [subject])

    async def _value(self, genrm: GenRMSection, subjects: Sequence[Subject]) -> None:
        """Adds the scores of a scalar reward model, or of a teacher, which scores one completion."""
        try:
            if genrm.kind == "teacher":
                scores = [await taught_score(self._judge, genrm, subjects[0])]
            else:
                scores = await scalar_scores(self._judge, genrm, subjects)
        except Refused as error:
            self._failed(genrm.name, subjects, str(error), is_users=True)
            return
        for subject, score in zip(subjects, scores, strict=True):
            self._scored(genrm.name, subject, m.Scored(score=score))

    async def _compare(self, genrm: GenRMSection, subjects: Sequence[Subject]) -> None:
        try:
            scores = await _compared_scores(self._judge, genrm, subjects, self._config.run.seed)
        except Refused as error:
            self._failed(genrm.name, subjects, str(error), is_users=True)
            return
        if scores is None:
            self._no_verdict(genrm, subjects)
            return
        for subject, score in zip(subjects, scores, strict=True):
            self._scored(genrm.name, subject, m.Scored(score=score))

    def _no_verdict(self, genrm: GenRMSection, subjects: Sequence[Subject]) -> None:
        self._failed(genrm.name, subjects, subjects[0].unreadable[genrm.name][1], is_users=True)


async def _compared_scores(
    judge: Judge, genrm: GenRMSection, subjects: Sequence[Subject], seed: int
) -> list[float] | None:
    """Returns one score per subject; None if a verdict is missing and the config sets no score for this.

    Raises:
        Refused: the GenRM does not take a question.
        WorkerFailed | DeadlineExceeded: it could not answer, after the retries.
    """
    orders = _orders(genrm, len(subjects), seed + subjects[0].group.number)
    asked = (_ask(judge, genrm, subjects, order, number) for number, order in enumerate(orders))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    comparisons: list[PairOutcome] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            return None
        comparisons += answer
    if genrm.judging == "pairwise" and genrm.swap_positions:
        _count_contradictions(genrm, subjects[0], comparisons)
    score = partial(scores_of, genrm.scores_by, comparisons, len(subjects))
    return await call_in_thread(score) if len(comparisons) > MANY else score()


def _orders(genrm: GenRMSection, size: int, seed: int) -> list[Order]:
    if genrm.judging == "listwise":
        orders: list[Order] = [tuple(range(size))]
    else:
        orders = list(pairs_of(genrm.pairs, size, seed))
    if genrm.swap_positions:
        orders = [each for order in orders for each in (order, order[::-1])]
    return orders


async def _ask(
    judge: Judge, genrm: GenRMSection, subjects: Sequence[Subject], order: Order, number: int
) -> list[PairOutcome] | None:
    about = tuple(subjects[i].sample for i in order if i < len(subjects))
    question = Question(
        subject=subjects[0], shown=_shown(genrm, subjects, order), about=about, number=FIRST_NUMBER + number,
        num_ranked=len(order) if genrm.judging == "listwise" else 0,
    )  # fmt: skip
    verdicts = await judge.verdicts(genrm, question)
    if genrm.judging == "listwise":
        if verdicts:
            return [c for v in verdicts for c in comparisons_of([order[i] for i in v.ranking])]
        return [] if genrm.on_unparsable == "score" else None
    first, second = order
    if verdicts:
        return [PairOutcome(first, second, mean_score(verdicts))]
    return [PairOutcome(first, second, 0.5)] if genrm.on_unparsable == "score" else None


def _shown(genrm: GenRMSection, subjects: Sequence[Subject], order: Order) -> Shown:
    truth = truth_text(subjects[0].row.ground_truth)
    texts = [subjects[i].completion(genrm) if i < len(subjects) else truth for i in order]
    if genrm.judging == "listwise":
        return subjects[0].shown(completions=numbered_completions(texts))
    return subjects[0].shown(completion_a=texts[0], completion_b=texts[1])


def _count_contradictions(genrm: GenRMSection, subject: Subject, comparisons: Sequence[PairOutcome]) -> None:
    """Counts pairs in which the completion shown first won, or lost, in both orders."""
    for one, other in zip(comparisons[::2], comparisons[1::2], strict=True):
        if (one.outcome - 0.5) * (other.outcome - 0.5) > 0:
            subject.counters[f"genrm/{genrm.name}/contradictions"] += 1
