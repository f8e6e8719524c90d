"""Validation: held-out prompts, sampled by the policy and scored by one reward function."""

import asyncio
from functools import partial

from yatt.adapters.dataset import Row, RowFiles
from yatt.adapters.patience import patiently
from yatt.adapters.tokenizer import Tokenizer
from yatt.control.node import Node
from yatt.control.rollouts.data_shard import encode_prompt
from yatt.control.rollouts.groups import PromptGroup, new_group
from yatt.control.rollouts.router import Router
from yatt.control.rollouts.scoring import Scorer, Subject
from yatt.core.placement import ROLLOUT
from yatt.core.prompts import sample_seed
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import cluster as c, message as m


class Validator:
    """This node's data shard of the held-out prompts."""

    def __init__(self, node: Node, rows: RowFiles, scorer: Scorer, router: Router) -> None:
        section, self._node = node.config.validation, node
        self._scorer, self._router = scorer, router
        numbers = range(min(len(rows), section.max_prompts))[node.index :: len(node.placement.trainer_nodes)]
        self._rows = [(number, rows.ref(number), rows.row(number)) for number in numbers]
        opening = partial(Tokenizer, node.config.model.path, node.config.data.template_time)
        self._tokenizer = patiently(opening, limit_s=node.config.launch.phase_timeout_s)

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
        text, ids = encode_prompt(row, self._tokenizer, self._node.config)
        group = new_group(number, number, text, ids, self._node.config.validation.n)
        subjects = [
            Subject(group=group, sample=sample, row=row, ref=ref, is_held_out=True)
            for sample in group.samples
        ]
        await asyncio.gather(*map(self._sample, subjects))
        return group

    async def _sample(self, subject: Subject) -> None:
        config, group, sample = self._node.config, subject.group, subject.sample
        request = m.Sample(
            request_id=f"val/{group.number}/{sample.index}", prompt_ids=group.prompt,
            seed=sample_seed(config.run.seed, -1 - group.number, sample.index),
            temperature=config.validation.temperature, top_p=1.0, top_k=-1,
            max_tokens=config.rollout.max_response_tokens, stop=config.rollout.stop,
            group=f"val{group.number}",
        )  # fmt: skip
        try:
            completed = await self._router.complete(ROLLOUT, request)
        except (WorkerFailed, DeadlineExceeded) as error:
            sample.fail_by_machines(str(error), deterministic=config.run.deterministic)
            return
        if completed.finish_reason in ("error", "abort"):
            sample.fail(completed.error or completed.finish_reason)
            return
        sample.extend(completed.token_ids, b"", completed.policy_version)
        sample.finish_reason = completed.finish_reason
        sample.text = self._tokenizer.decode(sample.token_ids)
        await self._scorer.score_one(config.validation.reward, subject)
