"""Validation: held-out prompts, sampled by the policy and scored by one reward function."""

import asyncio
from collections.abc import Sequence

from yatt.adapters.dataset import Row, RowFiles
from yatt.control.node import Node
from yatt.control.rollouts.data_shard import encode_prompt
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups import new_group
from yatt.control.rollouts.scoring import Scorer
from yatt.control.rollouts.subject import Subject
from yatt.core.best_of import best_of, majority_score, subset_sizes
from yatt.records import cluster as c, message as m


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
        text, ids = encode_prompt(row, self._episodes.tokenizer, self._node.config)
        group = new_group(number, number, text, ids, self._node.config.validation.n)
        group.media = row.media
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
        name: of the score. A completion without it failed, and counts as 0.
    """
    samples = [subject.sample for subject in subjects]
    scores = [sample.scores.get(name, 0.0) for sample in samples]
    answers = [subject.preds.get(name, "") for subject in subjects]
    extras = dict(before.extras)
    for sample in samples:
        for key, value in sample.extras.items():
            extras[key] = extras.get(key, 0.0) + value
    best = {size: before.best.get(size, 0.0) + best_of(scores, size) for size in subset_sizes(len(scores))}
    return c.SourceScores(
        total=before.total + sum(scores), count=before.count + len(scores),
        failed=before.failed + sum(name not in sample.scores for sample in samples), extras=extras,
        num_prompts=before.num_prompts + 1, best=best,
        majority=before.majority + majority_score(scores, answers),
        num_voted=before.num_voted + any(answers),
    )  # fmt: skip
