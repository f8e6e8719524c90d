"""A GenRM compares the completions of a group, in pairs or all at once; comparisons become scores."""

import asyncio
from collections.abc import Sequence
from functools import partial

from yatt.adapters.dataset import truth_text
from yatt.adapters.thread_call import call_in_thread
from yatt.config.schema import GenRMSection
from yatt.control.rollouts.judging import Judge, Question, mean_score
from yatt.control.rollouts.subject import Subject
from yatt.core.comparison import PairOutcome, comparisons_of, pairs_of, scores_of
from yatt.core.verdict import Shown, numbered

FIRST_NUMBER = 1 << 20
"""Numbers of questions about groups begin here; below are those about single samples."""

Order = tuple[int, ...]
"""A question's completions as they are shown, one after the other; the group's size is the ground truth."""

MANY = 200
"""Comparisons whose scores are computed in a thread."""


async def compared(
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
    texts = [subjects[i].sample.text if i < len(subjects) else truth for i in order]
    if genrm.judging == "listwise":
        return subjects[0].shown(completions=numbered(texts))
    return subjects[0].shown(completion_a=texts[0], completion_b=texts[1])


def _count_contradictions(genrm: GenRMSection, subject: Subject, comparisons: Sequence[PairOutcome]) -> None:
    """Counts pairs in which the completion shown first won, or lost, in both orders."""
    for one, other in zip(comparisons[::2], comparisons[1::2], strict=True):
        if (one.outcome - 0.5) * (other.outcome - 0.5) > 0:
            subject.counters[f"genrm/{genrm.name}/contradictions"] += 1
