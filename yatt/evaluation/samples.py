"""Samples the prompts of an evaluation and scores the samples, one role of engines after the other.

The policy's engines sample all prompts; meanwhile functions and judges behind a URL score what is complete.
Then each GenRM with engines gets the GPUs. A score that fails costs that score: the sample keeps the others.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from yatt.adapters.inputs.dataset import truth_text
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.net.crowd import Crowd
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.engines import ABORTED, engine_room
from yatt.control.rollouts.groups.groups import TRUNCATED, SampleState, new_group
from yatt.control.rollouts.scoring.scoring import NOT_APPLICABLE
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.errors import ConfigError
from yatt.evaluation.host import Served

INCOMPLETE = "another sample of its prompt has no completion, so they cannot be compared"
LEAST_GROUPS = 8
"""Prompts in progress at least; more if the engines have room."""


class EvaluatedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample and its scores, as written to ``samples.jsonl``.

    Attributes:
        failed: the reason, if there is no completion.
        no_score: reasons of missing scores, by name.
        extras: other numbers of the functions, by 'name/key'.
        verdicts: the GenRMs' last answers (their ends).
    """

    prompt_number: int
    sample_number: int
    data_source: str
    prompt: str
    ground_truth: str
    completion: str
    finish_reason: str
    num_tokens: int
    scores: dict[str, float]
    no_score: dict[str, str]
    extras: dict[str, float]
    verdicts: dict[str, str]
    failed: str = ""

    @property
    def is_truncated(self) -> bool:
        """Whether the length limit has cut it."""
        return self.finish_reason == TRUNCATED

    def has_no_score_for(self, name: str) -> bool:
        """Whether the function has said that it has no score for it."""
        return self.no_score.get(name) == NOT_APPLICABLE

    def has_failed_score(self, name: str) -> bool:
        """Whether a function or GenRM should have given a score, and has failed."""
        return name in self.no_score and not self.has_no_score_for(name)


@dataclass(slots=True, kw_only=True)
class EvaluatedSamples:
    """All samples of an evaluation.

    Attributes:
        too_long: number of prompts that are longer than `data.max_prompt_tokens`, and not used.
    """

    samples: list[EvaluatedSample] = field(default_factory=list)
    too_long: int = 0


@dataclass(slots=True)
class _Group:
    subjects: list[Subject]
    no_score: dict[int, dict[str, str]] = field(default_factory=dict)  # by index of the sample


class Evaluator:
    """Samples and scores all prompts.

    Args:
        names: the scores.
        limit: prompts that are used; 0: all.
        say: told the progress in words.
    """

    def __init__(
        self, served: Served, names: tuple[str, ...], limit: int, say: Callable[[str], None]
    ) -> None:
        self._served, self._names, self._say = served, names, say
        rows = len(served.rows)
        self._num_rows = min(rows, limit) if limit else rows
        self._groups: dict[int, _Group] = {}
        self._too_long = 0

    async def run(self) -> EvaluatedSamples:
        """Returns all samples, in the order of the data.

        Raises:
            ConfigError: no prompt is short enough.
            WorkerFailed: a row cannot be read any more; or a sample was lost, in deterministic mode.
        """
        served = self._served
        await served.use(ROLLOUT)
        names = list(served.scorer.names((ROLLOUT,)))
        done = set(names)
        sample = partial(self._sample, self._room(ROLLOUT), names)
        await self._each(range(self._num_rows), sample, "sampled")
        if not self._groups:
            raise ConfigError(
                "every prompt is longer than data.max_prompt_tokens "
                f"{served.config.data.max_prompt_tokens}; write a larger number."
            )
        for genrm in served.config.engine_genrms:
            role = genrm_role(genrm.name)
            await served.use(role)
            names = [name for name in served.scorer.names((role,)) if name not in done]
            done |= set(names)
            judge = partial(self._score_again, self._room(role), names)
            await self._each(sorted(self._groups), judge, f"judged by {genrm.name}")
        samples = [each for number in sorted(self._groups) for each in _records(self._groups[number])]
        return EvaluatedSamples(samples=samples, too_long=self._too_long)

    def _room(self, role: str) -> asyncio.Semaphore:
        """Returns room for as many prompts at once as keep the role's engines busy."""
        config = self._served.config
        requests = 2 * config.launch.gpus_per_node * engine_room(config, role)
        return asyncio.Semaphore(max(LEAST_GROUPS, requests // config.rollout.n))

    async def _each(
        self, numbers: Sequence[int], work: Callable[[int], Coroutine[Any, Any, None]], what: str
    ) -> None:
        """Runs `work` for each prompt."""
        crowd, count = Crowd(), 0
        for number in numbers:
            crowd.start(work(number))
        try:
            while crowd:
                await crowd.one_end()
                count += 1
                self._say(f"{what}: {count} of {len(numbers)} prompts")
        finally:
            await crowd.cancel()

    async def _sample(self, room: asyncio.Semaphore, names: list[str], number: int) -> None:
        """Samples one prompt and scores its samples. Scores take no room: slow ones must not idle engines."""
        try:
            async with asyncio.TaskGroup() as tasks, room:
                group = await self._opened(number)
                if group is None:
                    return
                extends = [tasks.create_task(self._extend(each)) for each in group.subjects]
                for extend, subject in zip(extends, group.subjects, strict=True):
                    tasks.create_task(self._score_after(extend, group, subject, names))
                await asyncio.wait(extends)
        except ExceptionGroup as error:
            raise error.exceptions[0] from error
        await self._score_together(group, names)

    async def _opened(self, number: int) -> _Group | None:
        """Reads and encodes a prompt; None if it is too long."""
        served = self._served
        row = await call_in_thread(partial(served.rows.row, number))
        encode = partial(encode_prompt, row, served.episodes.tokenizer, served.config)
        prompt = await call_in_thread(encode)
        if len(prompt.ids) > served.config.data.max_prompt_tokens:
            self._too_long += 1
            return None
        group = new_group(number, number, prompt.text, prompt.ids, served.config.rollout.n, prompt.media)
        ref = served.rows.ref(number)
        found = self._groups[number] = _Group([
            Subject(group=group, sample=sample, row=row, ref=ref, is_held_out=True)
            for sample in group.samples
        ])  # fmt: skip
        return found

    async def _extend(self, subject: Subject) -> None:
        sample, episodes = subject.sample, self._served.episodes
        await episodes.extend(subject, lambda: True)
        if not sample.finish_reason and not sample.failed:
            sample.fail(ABORTED)
        if not sample.failed:
            sample.text = episodes.text_of(sample)

    async def _score_after(
        self, extend: "asyncio.Task[None]", group: _Group, subject: Subject, names: list[str]
    ) -> None:
        await asyncio.wait({extend})
        if not subject.sample.failed:
            await self._score_alone(group, subject, names)

    async def _score_again(self, room: asyncio.Semaphore, names: list[str], number: int) -> None:
        group = self._groups[number]
        async with room:
            await asyncio.gather(
                *(self._score_alone(group, each, names) for each in group.subjects if not each.sample.failed)
            )
            await self._score_together(group, names)

    async def _score_alone(self, group: _Group, subject: Subject, names: list[str]) -> None:
        scorer, whole = self._served.scorer, self._served.episodes.with_turns(subject)
        for name in names:
            if not scorer.is_of_groups(name):
                await scorer.score_one(name, whole)
                _take_failure(group, subject.sample, name)

    async def _score_together(self, group: _Group, names: list[str]) -> None:
        scorer = self._served.scorer
        there = [self._served.episodes.with_turns(s) for s in group.subjects if not s.sample.failed]
        for name in filter(scorer.is_of_groups, names):
            if len(there) == len(group.subjects):
                await scorer.score_together(name, there)
            for subject in there:
                if len(there) < len(group.subjects):
                    subject.sample.fail(INCOMPLETE)
                _take_failure(group, subject.sample, name)


def _take_failure(group: _Group, sample: SampleState, name: str) -> None:
    """Moves the failure of one score from the sample, which may get other scores."""
    if sample.failed:
        group.no_score.setdefault(sample.index, {})[name] = sample.failed
        sample.fail("")


def _records(group: _Group) -> list[EvaluatedSample]:
    return [
        EvaluatedSample(
            prompt_number=subject.group.number, sample_number=sample.index,
            data_source=subject.row.data_source, prompt=subject.group.prompt_text,
            ground_truth=truth_text(subject.row.ground_truth), completion=sample.text,
            finish_reason=sample.finish_reason, num_tokens=sample.num_tokens, scores=sample.scores,
            no_score={**sample.unmeasured, **group.no_score.get(sample.index, {})}, extras=sample.extras,
            verdicts=sample.verdicts, failed=sample.failed,
        )
        for subject in group.subjects
        for sample in (subject.sample,)
    ]  # fmt: skip
