"""Held-out prompts, sampled by the policy and scored by one reward function."""

import asyncio

from yatt.adapters.dataset import Row
from yatt.adapters.tokenizer import Tokenizer
from yatt.control.engines import Router
from yatt.control.groups import PromptGroup
from yatt.control.node import Node
from yatt.control.scoring import Scorer
from yatt.control.shard import encode_prompt, new_group
from yatt.core.placement import ROLLOUT
from yatt.core.prompts import sample_seed
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.cluster import ValidatedNode
from yatt.records.message import pack_ids, unpack_ids


class Validator:
    """This node's stripe of the held-out prompts."""

    def __init__(self, node: Node, rows: list[Row], scorer: Scorer, router: Router) -> None:
        section, self._node = node.config.validation, node
        self._scorer, self._router = scorer, router
        self._rows = list(enumerate(rows[: section.max_prompts]))[node.index :: len(node.placement.owners)]
        self._tokenizer = Tokenizer(node.config.model.path)

    async def run(self) -> ValidatedNode:
        """Score all of them with the weights the engines have now."""
        groups = await asyncio.gather(*(self._one(number, row) for number, row in self._rows))
        sums: dict[str, tuple[float, int]] = {}
        failed = 0
        for (_, row), group in zip(self._rows, groups, strict=True):
            name = self._node.config.validation.reward
            scores = [s.scores[name] for s in group.samples if name in s.scores]
            failed += len(group.samples) - len(scores)
            total, count = sums.get(row.data_source, (0.0, 0))
            sums[row.data_source] = (total + sum(scores), count + len(scores))
        return ValidatedNode(sums=sums, failed=failed)

    async def _one(self, number: int, row: Row) -> PromptGroup:
        text, ids = encode_prompt(row, self._tokenizer, self._node.config)
        group = new_group(number, number, text, ids, self._node.config.validation.n)
        await asyncio.gather(*(self._sample(group, index, row) for index in range(len(group.samples))))
        return group

    async def _sample(self, group: PromptGroup, index: int, row: Row) -> None:
        config, sample = self._node.config, group.samples[index]
        request = m.Sample(
            token=0, request_id=f"val/{group.number}/{index}", prompt_ids=pack_ids(group.prompt_ids),
            seed=sample_seed(config.run.seed, -1 - group.number, index),
            temperature=config.validation.temperature, top_p=1.0, top_k=-1,
            max_tokens=config.rollout.max_response_tokens, stop=config.rollout.stop,
        )  # fmt: skip
        try:
            completed = await self._router.complete(ROLLOUT, request)
        except (WorkerFailed, DeadlineExceeded) as error:
            sample.failed = str(error)
            return
        if completed.finish_reason in ("error", "abort"):
            sample.failed = completed.error or completed.finish_reason
            return
        sample.text = self._tokenizer.decode(unpack_ids(completed.token_ids))
        await self._scorer.call_function(config.validation.reward, group, sample, row)
