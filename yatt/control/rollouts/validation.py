"""Validation: held-out prompts, sampled by the policy and scored by one reward function."""

import asyncio
from collections.abc import Mapping, Sequence

from yatt.adapters.inputs.dataset import Row, RowFiles
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.samples.best_of import best_of, majority_score, subset_sizes
from yatt.core.samples.reasons import cause_of
from yatt.records import cluster as c, message as m

MOST_REASONS = 64
"""Number of different causes of missing scores that are counted."""


class Validator:
    """This node's data shard of the held-out prompts."""

    def __init__(self, node: Node, rows: RowFiles, scorer: Scorer, episodes: Episodes) -> None:
        section, self._node = node.config.validation, node
        self._scorer = scorer
        numbers = range(min(len(rows), section.max_prompts))[node.index :: len(node.placement.trainer_nodes)]
        self._rows = [(number, rows.ref(number), rows.row(number)) for number in numbers]
        self._episodes = episodes

    async def run(self) -> c.ValidatedNode:
        """Samples and scores all of them with the weights that the engines have now."""
        scored = await asyncio.gather(*(self._one(*place) for place in self._rows))
        name = self._node.config.validation.reward
        found: dict[str, c.SourceScores] = {}
        for (_, _, row), subjects in zip(self._rows, scored, strict=True):
            before = found.get(row.data_source, c.SourceScores())
            found[row.data_source] = with_group(before, subjects, name)
        return c.ValidatedNode(sources=found)

    async def _one(self, number: int, ref: m.RowRef, row: Row) -> list[Subject]:
        prompt = encode_prompt(row, self._episodes.tokenizer, self._node.config)
        group = new_group(
            number, number, prompt.text, prompt.ids, self._node.config.validation.n, prompt.media
        )
        subjects = [
            Subject(group=group, sample=sample, row=row, ref=ref, is_held_out=True)
            for sample in group.samples
        ]
        await asyncio.gather(*map(self._sample, subjects))
        await self._score_together([subject for subject in subjects if not subject.sample.failed])
        return subjects

    async def _sample(self, subject: Subject) -> None:
        sample = subject.sample
        await self._episodes.extend(subject, lambda: True)
        if not sample.finish_reason and not sample.failed:
            sample.fail("abort")
        if sample.failed:
            return
        sample.text = self._episodes.text_of(sample)
        name = self._node.config.validation.reward
        if not self._scorer.is_of_groups(name):
            await self._scorer.score_one(name, self._episodes.with_turns(subject))

    async def _score_together(self, subjects: list[Subject]) -> None:
        name = self._node.config.validation.reward
        if subjects and self._scorer.is_of_groups(name):
            await self._scorer.score_together(name, [self._episodes.with_turns(s) for s in subjects])


def with_group(before: c.SourceScores, subjects: Sequence[Subject], name: str) -> c.SourceScores:
    """Adds a prompt's completions to the sums of its data source.

    Args:
        name: of the score. A completion without it has failed, and is left out of the sums, unless the
            function has no score for it.
    """
    scored = [subject for subject in subjects if name in subject.sample.scores]
    failed = [s for s in subjects if name not in s.sample.scores and name not in s.sample.unmeasured]
    scores = [subject.sample.scores[name] for subject in scored]
    answers = [subject.preds.get(name, "") for subject in scored]
    extras, reasons, best = dict(before.extras), dict(before.reasons), dict(before.best)
    for subject in scored:
        for key, value in subject.sample.extras.items():
            extras[key] = extras.get(key, 0.0) + value
    for subject in failed:
        why = cause_of(subject.sample.failed)
        reasons[why] = reasons.get(why, 0) + 1
    for size in subset_sizes(len(subjects)):
        total, number = best.get(size, (0.0, 0))
        if size <= len(scores):
            best[size] = total + best_of(scores, size), number + 1
    return c.SourceScores(
        total=before.total + sum(scores),
        count=before.count + len(scored) + len(failed),
        failed=before.failed + len(failed),
        reasons=most_frequent(reasons),
        extras=extras,
        num_prompts=before.num_prompts + bool(scores),
        best=best,
        majority=before.majority + majority_score(scores, answers),
        num_voted=before.num_voted + any(answers),
    )


def most_frequent(reasons: Mapping[str, int]) -> dict[str, int]:
    """Returns the few most frequent of these reasons."""
    return dict(sorted(reasons.items(), key=lambda each: -each[1])[:MOST_REASONS])
