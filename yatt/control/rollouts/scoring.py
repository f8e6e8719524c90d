"""Scores of one completion: from functions in reward processes, and from GenRMs by template and verdict.

If a sample's function raises, or its verdict cannot be parsed, the sample *fails* with the reason, or gets
the score that the config sets for this case. Both cases are counted; a failure never becomes a zero by
default. A score of weight 0 is only a measurement: if it is missing, this is counted and has no other effect.
"""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from yatt.adapters.dataset import Row, prompt_text, truth_text
from yatt.adapters.patience import patiently
from yatt.adapters.tokenizer import TextPart, Tokenizer
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.groups import MOST_VERDICT, TRUNCATED, PromptGroup, SampleState
from yatt.core.placement import genrm_role
from yatt.core.prompts import sample_seed
from yatt.core.rewards import Shaping
from yatt.core.verdict import JudgedSample, render
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.message import pack_ids, unpack_ids

Complete = Callable[[str, m.Sample], Awaitable[m.Completed]]
CallReward = Callable[[m.Score], Awaitable[m.Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One completion to score, and its data row."""

    group: PromptGroup
    sample: SampleState
    row: Row
    ref: m.RowRef
    counters: "Counter[str]" = field(default_factory=Counter)
    is_held_out: bool = False

    @property
    def place(self) -> str:
        """Name of the sample in messages."""
        return f"prompt {self.group.number}, sample {self.sample.index}"


class Scorer:
    """Scores completions of one node.

    Args:
        complete: sends a request to an engine of a role.
        call_reward: calls one of this node's reward processes.
    """

    def __init__(self, config: RunConfig, complete: Complete, call_reward: CallReward) -> None:
        self._config, self._complete, self._call_reward = config, complete, call_reward
        opened = partial(patiently, limit_s=config.launch.phase_timeout_s)
        self._tokenizers = {
            g.name: opened(partial(Tokenizer, g.model, config.data.template_time)) for g in config.genrms
        }
        self._genrms = {g.name: g for g in config.genrms}
        self._asks = itertools.count(1)
        section = config.algorithm
        self.shaping = Shaping(
            max_tokens=config.rollout.max_response_tokens, buffer_tokens=section.overlong_buffer_tokens,
            factor=section.overlong_penalty_factor, masks_truncated=section.mask_truncated,
        )  # fmt: skip
        self.weights = {r.name: r.weight for r in config.rewards} | {g.name: g.weight for g in config.genrms}
        """Weight of each score in the reward."""

    def names(self, roles: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Returns the scores of a trained sample; with `roles`, those that can be made now."""
        genrms = [g for g in self._config.genrms if roles is None or genrm_role(g.name) in roles]
        return (*(r.name for r in self._config.rewards), *(g.name for g in genrms))

    async def score(self, subject: Subject, roles: tuple[str, ...]) -> None:
        """Adds every missing score that can be made now; stops at the first failure."""
        sample = subject.sample
        have = sample.scores.keys() | sample.unmeasured.keys()
        for name in self.names(roles):
            if sample.failed:
                return
            if name not in have:
                await self.score_one(name, subject)

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
                await self._judge(genrm, subject)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._failed(name, subject, str(error), is_users=False)

    async def ask_genrm(self, genrm: GenRMSection, ask: m.Ask, parts: list[TextPart]) -> m.Completed:
        """Has a GenRM complete a text.

        Raises:
            WorkerFailed | DeadlineExceeded: it did not, after the retries.
        """
        prompt_ids = self._prompt_ids(genrm, parts)
        sample = m.Sample(
            request_id=f"{genrm.name}/{next(self._asks)}", prompt_ids=pack_ids(prompt_ids),
            seed=ask.seed, temperature=ask.temperature, top_p=1.0, top_k=-1,
            max_tokens=min(ask.max_tokens, max(1, genrm.max_model_tokens - len(prompt_ids))),
            stop=genrm.stop,
        )  # fmt: skip
        return await self._complete(genrm_role(genrm.name), sample)

    def text_of(self, genrm: GenRMSection, completed: m.Completed) -> str:
        """Returns a GenRM's completion as text."""
        return self._tokenizers[genrm.name].decode(unpack_ids(completed.token_ids))

    # ---- functions ------------------------------------------------------------------------------

    async def _call_function(self, name: str, subject: Subject) -> None:
        answer = await self._call_reward(self._order(name, subject, subject.sample.text))
        if not isinstance(answer, m.Scored):
            subject.counters[f"reward/{name}/failed"] += 1
            self._failed(name, subject, _users(answer).error, is_users=True)
            return
        if name in self._genrms:
            subject.counters[f"genrm/{name}/asked"] += answer.asked
        self._scored(name, subject.sample, answer)

    def _order(self, name: str, subject: Subject, text: str) -> m.Score:
        group, sample = subject.group, subject.sample
        return m.Score(
            reward=name, prompt=group.prompt_text, completion=text, row=subject.ref,
            is_held_out=subject.is_held_out, finish_reason=sample.finish_reason,
            num_prompt_tokens=group.num_prompt_tokens, num_completion_tokens=sample.num_tokens,
        )  # fmt: skip

    def _scored(self, name: str, sample: SampleState, answer: m.Scored) -> None:
        sample.scores = {**sample.scores, name: answer.score}
        extras = {f"{name}/{key}": value for key, value in answer.extra.items()}
        sample.extras = {**sample.extras, **extras}

    def _failed(self, name: str, subject: Subject, why: str, *, is_users: bool) -> None:
        kind = "genrm" if name in self._genrms else "reward"
        told = f"{kind} '{name}', {subject.place}: {why}"
        if not is_users and self._config.run.deterministic:
            subject.sample.fail_by_machines(told, deterministic=True)
        if self.weights[name] or subject.is_held_out:
            subject.sample.fail(told, is_users=is_users)
            return
        subject.counters[f"{kind}/{name}/unmeasured"] += 1
        subject.sample.unmeasured = {**subject.sample.unmeasured, name: told}

    # ---- GenRMs ---------------------------------------------------------------------------------

    async def _judge(self, genrm: GenRMSection, subject: Subject) -> None:
        judged = JudgedSample(
            prompt=prompt_text(subject.row.prompt), completion=subject.sample.text,
            ground_truth=truth_text(subject.row.ground_truth), data_source=subject.row.data_source,
        )  # fmt: skip
        parts = [TextPart(text, is_own) for text, is_own in render(genrm.template, judged)]
        for retry in range(genrm.retries + 1):
            ask = m.Ask(
                genrm=genrm.name, text="", max_tokens=genrm.max_tokens,
                seed=sample_seed(self._config.run.seed, subject.group.number, subject.sample.index, retry),
                temperature=max(genrm.temperature, genrm.retry_temperature) if retry else genrm.temperature,
            )  # fmt: skip
            subject.counters[f"genrm/{genrm.name}/asked"] += 1
            completed = await self.ask_genrm(genrm, ask, parts)
            if completed.finish_reason == ABORTED:
                raise WorkerFailed(f"GenRM '{genrm.name}' was broken off")
            if completed.finish_reason == "error":
                self._failed(genrm.name, subject, completed.error, is_users=True)
                return
            if await self._read(genrm, subject, completed):
                return
        self._give_up(genrm, subject)

    async def _read(self, genrm: GenRMSection, subject: Subject, completed: m.Completed) -> bool:
        """Whether there is a verdict. A cut text has none: its end might have changed the verdict."""
        sample, text = subject.sample, self.text_of(genrm, completed)
        sample.verdicts = {**sample.verdicts, genrm.name: text[-MOST_VERDICT:]}
        if completed.finish_reason == TRUNCATED:
            subject.counters[f"genrm/{genrm.name}/truncated"] += 1
            return False
        answer = await self._call_reward(self._order(genrm.name, subject, text))
        if isinstance(answer, m.Scored):
            self._scored(genrm.name, sample, answer)
            return True
        _users(answer)
        subject.counters[f"genrm/{genrm.name}/unparsable"] += 1
        return False

    def _give_up(self, genrm: GenRMSection, subject: Subject) -> None:
        if genrm.on_unparsable == "score":
            self._scored(genrm.name, subject.sample, m.Scored(score=genrm.unparsable_score))
            return
        seen = subject.sample.verdicts.get(genrm.name, "")
        self._failed(genrm.name, subject, f"no verdict in {seen!r}", is_users=True)

    def _prompt_ids(self, genrm: GenRMSection, parts: list[TextPart]) -> list[int]:
        tokenizer = self._tokenizers[genrm.name]
        if not genrm.chat:
            return tokenizer.encode_parts(parts, adds_special=True)
        return tokenizer.encode_chat([{"role": "user", "content": parts}])


def _users(answer: m.Message) -> m.Failed:
    """Returns the failure of a reward process if the sample or the function caused it.

    Raises:
        WorkerFailed: a machine caused it.
    """
    if isinstance(answer, m.Failed) and answer.user:
        return answer
    raise WorkerFailed(answer.error if isinstance(answer, m.Failed) else repr(answer))
