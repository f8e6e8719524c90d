"""Validation: held-out prompts, sampled by the policy and scored by one reward function."""

import asyncio

from yatt.adapters.dataset import Row, RowFiles
from yatt.control.node import Node
from yatt.control.rollouts.data_shard import encode_prompt
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups import PromptGroup, new_group
from yatt.control.rollouts.scoring import Scorer
from yatt.control.rollouts.subject import Subject
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
        groups = await asyncio.gather(*(self._one(*place) for place in self._rows))
        name = self._node.config.validation.reward
        found: dict[str, c.SourceScores] = {}
        for (_, _, row), group in zip(self._rows, groups, strict=True):
            scores = [s.scores[name] for s in group.samples if name in s.scores]
            before = found.get(row.data_source, c.SourceScores())
            extras = dict(before.extras)
            for sample in group.samples:
                for key, value in sample.extras.items():
                    extras[key] = extras.get(key, 0.0) + value
            found[row.data_source] = c.SourceScores(
                total=before.total + sum(scores), count=before.count + len(group.samples),
                failed=before.failed + len(group.samples) - len(scores), extras=extras,
            )  # fmt: skip
        return c.ValidatedNode(sources=found)

    async def _one(self, number: int, ref: m.RowRef, row: Row) -> PromptGroup:
        text, ids = encode_prompt(row, self._episodes.tokenizer, self._node.config)
        group = new_group(number, number, text, ids, self._node.config.validation.n)
        group.media = row.media
        subjects = [
            Subject(group=group, sample=sample, row=row, ref=ref, is_held_out=True)
            for sample in group.samples
        ]
        await asyncio.gather(*map(self._sample, subjects))
        await self._score_together([subject for subject in subjects if not subject.sample.failed])
        return group

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
