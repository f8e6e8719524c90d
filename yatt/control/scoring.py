"""Scores of one completion: the user's functions in the reward process, GenRMs by template and verdict.

A sample whose function raises, or whose verdict stays unreadable, is *failed* with its reason, or gets
the score the config names for that case. It is counted either way and never silently a zero.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from yatt.adapters.dataset import Row
from yatt.adapters.tokenizer import Tokenizer
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.groups import PromptGroup, SampleState
from yatt.core.placement import genrm_role
from yatt.core.prompts import sample_seed
from yatt.core.verdict import JudgedSample, parse, render
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.message import pack_ids, unpack_ids

Complete = Callable[[str, m.Sample], Awaitable[m.Completed]]
CallReward = Callable[[m.Score], Awaitable[m.Message]]


class Scorer:
    """Scores completions of one node.

    Args:
        complete: ask an engine of a role.
        call_reward: ask this node's reward process.
    """

    def __init__(self, config: RunConfig, complete: Complete, call_reward: CallReward) -> None:
        self._config, self._complete, self._call_reward = config, complete, call_reward
        self._tokenizers = {g.name: Tokenizer(g.model) for g in config.genrms}
        self.counters: Counter[str] = Counter()

    def names(self, roles: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Scores that a trained sample needs; with `roles`, those that can be made now."""
        genrms = [g for g in self._config.genrms if g.weight]
        if roles is not None:
            genrms = [g for g in genrms if genrm_role(g.name) in roles]
        return (*(r.name for r in self._config.rewards if r.weight), *(g.name for g in genrms))

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each score in the reward."""
        pairs = [(r.name, r.weight) for r in self._config.rewards]
        return dict(pairs + [(g.name, g.weight) for g in self._config.genrms])

    async def score(self, group: PromptGroup, sample: SampleState, row: Row, roles: tuple[str, ...]) -> None:
        """Add every score that can be made now and is missing; stop at the first failure."""
        wanted = [name for name in self.names(roles) if name not in sample.scores]
        for name in wanted:
            if sample.failed:
                return
            genrm = next((g for g in self._config.genrms if g.name == name), None)
            if genrm is None or genrm.path:
                await self.call_function(name, group, sample, row)
            else:
                await self._judge(genrm, group, sample, row)

    async def call_function(self, name: str, group: PromptGroup, sample: SampleState, row: Row) -> None:
        """One of the user's functions on one completion."""
        order = m.Score(
            reward=name,
            prompt=group.prompt_text,
            completion=sample.text,
            row=json.dumps(_row_for_function(row), default=str).encode(),
        )
        try:
            answer = await self._call_reward(order)
        except (WorkerFailed, DeadlineExceeded) as lost:
            answer = m.Failed(error=str(lost))
        if isinstance(answer, m.Scored):
            sample.scores = {**sample.scores, name: answer.score}
            return
        self.counters[f"reward/{name}/failed"] += 1
        why = answer.error if isinstance(answer, m.Failed) else f"answered {type(answer).__name__}"
        sample.failed = f"reward '{name}', prompt {group.number}, sample {sample.index}: {why}"

    async def ask_genrm(self, genrm: GenRMSection, ask: m.Ask) -> m.Completed:
        """Let a GenRM complete a text."""
        prompt_ids = self._prompt_ids(genrm, ask.text)
        sample = m.Sample(
            token=0, request_id=f"{genrm.name}/{ask.seed}", prompt_ids=pack_ids(prompt_ids),
            seed=ask.seed, temperature=ask.temperature, top_p=1.0, top_k=-1,
            max_tokens=min(ask.max_tokens, max(1, genrm.max_model_tokens - len(prompt_ids))),
            stop=genrm.stop,
        )  # fmt: skip
        self.counters[f"genrm/{genrm.name}/asked"] += 1
        return await self._complete(genrm_role(genrm.name), sample)

    def text_of(self, genrm: GenRMSection, completed: m.Completed) -> str:
        """A GenRM's completion as text."""
        return self._tokenizers[genrm.name].decode(unpack_ids(completed.token_ids))

    async def _judge(self, genrm: GenRMSection, group: PromptGroup, sample: SampleState, row: Row) -> None:
        judged = JudgedSample(
            prompt=group.prompt_text, completion=sample.text,
            ground_truth=row.ground_truth, data_source=row.data_source,
        )  # fmt: skip
        text = render(genrm.template, judged)
        for retry in range(genrm.retries + 1):
            seed = sample_seed(self._config.run.seed, group.number, sample.index, retry)
            ask = m.Ask(
                genrm=genrm.name, text=text, seed=seed,
                max_tokens=genrm.max_tokens, temperature=genrm.temperature,
            )  # fmt: skip
            completed = await self.ask_genrm(genrm, ask)
            if completed.finish_reason == "error":
                sample.failed = f"genrm '{genrm.name}', prompt {group.number}: {completed.error}"
                return
            verdict = self.text_of(genrm, completed)
            sample.verdicts = {**sample.verdicts, genrm.name: verdict}
            score = parse(verdict, genrm.verdict)
            if score is not None:
                sample.scores = {**sample.scores, genrm.name: score}
                return
            self.counters[f"genrm/{genrm.name}/unparsable"] += 1
        self._give_up(genrm, group, sample)

    def _give_up(self, genrm: GenRMSection, group: PromptGroup, sample: SampleState) -> None:
        if genrm.on_unparsable == "score":
            sample.scores = {**sample.scores, genrm.name: genrm.unparsable_score}
            return
        seen = sample.verdicts.get(genrm.name, "")
        sample.failed = (
            f"genrm '{genrm.name}', prompt {group.number}, sample {sample.index}: no verdict in {seen!r}"
        )

    def _prompt_ids(self, genrm: GenRMSection, text: str) -> list[int]:
        tokenizer = self._tokenizers[genrm.name]
        if not genrm.chat:
            return tokenizer.encode(text)
        rendered = tokenizer.render_chat([{"role": "user", "content": text}])
        return tokenizer.encode_rendered(rendered)


def _row_for_function(row: Row) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "ground_truth": row.ground_truth,
        "extra_info": row.raw.get("extra_info"),
        "columns": row.raw,
    }
