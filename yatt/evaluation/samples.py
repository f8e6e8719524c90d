"""Samples the prompts of an evaluation and scores the samples, one role of engines after the other.

The policy's engines sample all prompts; meanwhile functions and judges behind a URL score what is complete.
Then each GenRM with engines gets the GPUs. A score that fails costs that score: the sample keeps the others.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from yatt.adapters.crowd import Crowd
from yatt.adapters.dataset import truth_text
from yatt.adapters.thread_call import call_in_thread
from yatt.control.gpus.engines import ABORTED, engine_room
from yatt.control.rollouts.data_shard import encode_prompt
from yatt.control.rollouts.groups import TRUNCATED, SampleState, new_group
from yatt.control.rollouts.scoring import NOT_APPLICABLE
from yatt.control.rollouts.subject import Subject
from yatt.core.placement import ROLLOUT, genrm_role
from yatt.errors import ConfigError
from yatt.evaluation.host import Served

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
        await self._served.use(ROLLOUT)
        roles = (ROLLOUT,)
        await self._each(range(self._num_rows), partial(self._sample, roles=roles), "sampled")
        if not self._groups:
            raise ConfigError(
                f"no prompt has at most data.max_prompt_tokens={self._served.config.data.max_prompt_tokens} "
                "tokens; write a larger number."
            )
        done = set(self._served.scorer.names(roles))
        for genrm in self._served.config.engine_genrms:
            role = genrm_role(genrm.name)
            await self._served.use(role)
            names = [n for n in self._served.scorer.names((role,)) if n not in done]
            done |= set(names)
            await self._each(sorted(self._groups), partial(self._score_again, names), f"by {genrm.name}")
        samples = [each for number in sorted(self._groups) for each in _records(self._groups[number])]
        return EvaluatedSamples(samples=samples, too_long=self._too_long)

    async def _each(self, numbers: Iterable[int], work: "Callable[[int], object]", what: str) -> None:
        """Runs `work` for prompts, as many at once as keep the engines busy."""
        config = self._served.config
        engines = config.launch.gpus_per_node
        most = max(LEAST_GROUPS, 2 * engines * engine_room(config, ROLLOUT) // config.rollout.n)
        room, crowd, count = asyncio.Semaphore(most), Crowd(), 0

        async def one(number: int) -> None:
            async with room:
                await work(number)  # type: ignore[misc]  # partial objects of coroutine functions

        listed = list(numbers)
        for number in listed:
            crowd.start(one(number))
        try:
            while crowd:
                await crowd.one_end()
                count += 1
                self._say(f"{what}: {count} of {len(listed)} prompts")
        finally:
            await crowd.cancel()

    async def _sample(self, number: int, roles: tuple[str, ...]) -> None:
        served = self._served
        ref, n = served.rows.ref(number), served.config.rollout.n
        row = await call_in_thread(partial(served.rows.row, number))
        text, ids = await call_in_thread(
            partial(encode_prompt, row, served.episodes.tokenizer, served.config)
        )
        if len(ids) > served.config.data.max_prompt_tokens:
            self._too_long += 1
            return
        group = new_group(number, number, text, ids, n)
        group.media = row.media
        subjects = [
            Subject(group=group, sample=sample, row=row, ref=ref, is_held_out=True)
            for sample in group.samples
        ]
        found = self._groups[number] = _Group(subjects)
        names = list(served.scorer.names(roles))
        await asyncio.gather(*(self._complete(found, subject, names) for subject in subjects))
        await self._score_together(found, names)

    async def _complete(self, group: _Group, subject: Subject, names: list[str]) -> None:
        sample, episodes = subject.sample, self._served.episodes
        await episodes.extend(subject, lambda: True)
        if not sample.finish_reason and not sample.failed:
            sample.fail(ABORTED)
        if not sample.failed:
            sample.text = episodes.text_of(sample)
            await self._score_alone(group, subject, names)

    async def _score_again(self, names: list[str], number: int) -> None:
        group = self._groups[number]
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
        subjects = [self._served.episodes.with_turns(s) for s in group.subjects if not s.sample.failed]
        for name in names:
            if subjects and scorer.is_of_groups(name):
                await scorer.score_together(name, subjects)
                for subject in subjects:
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
