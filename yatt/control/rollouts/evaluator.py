"""Evaluation: this node's prompts, sampled by the policy, with every score of every sample.

In the place of the sampler and of all that trains. An order says which roles have engines now: those of the
policy sample all prompts, and GenRMs score as their turns come. A score that fails costs that score: the
sample keeps the others. Groups that are sampled are kept in the run folder, and again with their scores.

In an evaluation of a GenRM completions are given: groups are opened whole, and only scored. They are not
kept, since nothing was sampled; a later attempt asks the same again.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.files.files import make_within
from yatt.adapters.inputs.dataset import Row, RowFiles, truth_text
from yatt.adapters.inputs.encoded_prompt import EncodedPrompt, encode_prompt
from yatt.adapters.net.crowd import Crowd
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.sizes import only_judges
from yatt.control.gpus.engines import ABORTED, engine_room
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups.groups import PromptGroup, SampleState, new_group
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.scoring.asking import answered_by
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.core.figures.evaluation import GIVEN, EvaluatedSample, GivenTexts, JudgedAnswer
from yatt.core.gpus.placement import ROLLOUT, genrm_of_role, genrm_role
from yatt.core.phases.kept_groups import Share
from yatt.judging.template import CONVERSATION, render_template
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c, message as m
from yatt.records.events.groups import GroupsReused, PromptsEvaluated
from yatt.records.message import Turn, pack_ids

INCOMPLETE = "another sample of its prompt has no completion, so they cannot be compared"
LEAST_GROUPS = 8
"""Prompts in progress at least; more if the engines have room."""

MOST_ASKED = 256
"""Prompts in progress at a judge behind a URL, which has a limit of its own."""

SHOW_S = 0.5
"""Least time between two events about the progress."""

ITERATION = 1
"""Number under which groups are kept."""


@dataclass(slots=True)
class EvaluatedGroup:
    """One prompt's samples, and why some have no score."""

    subjects: list[Subject]
    no_score: dict[int, dict[str, str]] = field(default_factory=dict)  # by index of the sample

    def has(self, sample: SampleState, name: str) -> bool:
        """Whether a sample has this score, or the reason for none."""
        reasons = {**sample.unmeasured, **self.no_score.get(sample.index, {})}
        return name in sample.scores or name in reasons

    def take_failure(self, sample: SampleState, name: str) -> None:
        """Moves the failure of one score from the sample, which may get other scores."""
        if sample.failed:
            self.no_score.setdefault(sample.index, {})[name] = sample.failed
            sample.fail("")

    def records(self, templates: Mapping[str, str]) -> list[EvaluatedSample]:
        """Returns the samples as they are written.

        Args:
            templates: by name of the GenRM.
        """
        return [
            EvaluatedSample(
                prompt_number=subject.group.number,
                sample_number=sample.index,
                data_source=subject.row.data_source,
                prompt=subject.group.prompt_text,
                ground_truth=truth_text(subject.row.ground_truth),
                completion=sample.text,
                finish_reason=sample.finish_reason,
                num_tokens=sample.num_tokens,
                scores=sample.scores,
                no_score={**sample.unmeasured, **self.no_score.get(sample.index, {})},
                extras=sample.extras,
                verdicts=sample.verdicts,
                failed=sample.failed,
                judged=judged_answers(subject.judged or (), templates) if sample.index == 0 else (),
            )
            for subject in self.subjects
            for sample in (subject.sample,)
        ]


def judged_answers(judged: Sequence[Judged], templates: Mapping[str, str]) -> tuple[JudgedAnswer, ...]:
    """Returns what is recorded of a GenRM's answers about a group, in an order that no timing decides.

    Args:
        templates: by name of the GenRM.
    """
    found = (
        JudgedAnswer(
            about=each.about,
            prompt="".join(text for text, _ in render_template(templates[each.genrm], each.shown)),
            answer=each.answer,
            finish_reason=each.finish_reason,
            tries=each.tries,
            score=verdict.score if verdict and not (verdict.ranking or each.criteria) else None,
            ranking=verdict.ranking if verdict else (),
            measures=dict(verdict.extra) if verdict else {},
            num_tokens=each.num_tokens,
            span_s=each.span_s,
            thought=each.thought,
            is_thought_cut=each.is_thought_cut,
        )
        for each in judged
        for verdict in (each.verdict,)
    )
    return tuple(sorted(found, key=lambda each: (each.about, each.prompt, each.tries)))


@dataclass(frozen=True, slots=True)
class EvaluatedRows:
    """The prompts of an evaluation, and what an earlier attempt has kept of them."""

    rows: RowFiles
    kept: KeptGroups


class Evaluator:
    """Carries out the orders about this node's prompts.

    Args:
        judge: answers the GenRM clients of functions.
    """

    def __init__(
        self,
        node: Node,
        source: EvaluatedRows,
        episodes: Episodes,
        scorer: Scorer,
        judge: Judge,
        events: EventLog,
    ) -> None:
        self._node, self._source = node, source
        self._episodes, self._scorer, self._judge, self._events = episodes, scorer, judge, events
        most = min(len(source.rows), node.config.validation.max_prompts)
        self._numbers = range(most)[node.index :: len(node.placement.trainer_nodes)]
        self._groups: dict[int, EvaluatedGroup] = {}
        self._acting: set[asyncio.Task[m.Message]] = set()
        self.orders: dict[type[m.Message], Callable[..., Awaitable[m.Message | None]]] = {
            c.EvaluatePrompts: self._evaluate,
            c.WriteSamples: self._write,
            c.BreakOffSampling: self._break_off,
        }

    async def asked(self, ask: m.Ask) -> m.Message:
        """Handles a request of a reward function's GenRM client."""
        return await answered_by(self._judge, self._node.config, ask)

    async def _evaluate(self, order: c.EvaluatePrompts) -> m.Message:
        acting = asyncio.get_running_loop().create_task(self._advanced(order.roles))
        self._acting.add(acting)
        try:
            return await acting
        finally:
            self._acting.discard(acting)

    async def _break_off(self, _: c.BreakOffSampling) -> m.Message:
        for acting in self._acting:
            acting.cancel()
        await asyncio.gather(*self._acting, return_exceptions=True)
        return m.Done()

    async def _advanced(self, roles: tuple[str, ...]) -> m.Message:
        """Samples and scores as far as these roles can.

        Raises:
            WorkerFailed: a row cannot be read any more; or a sample was lost, in deterministic mode.
        """
        names = self._scorer.names(roles)
        if only_judges(self._node.config):
            (genrm,) = self._node.config.genrms
            room = self._room(genrm_role(genrm.name)) if roles else asyncio.Semaphore(MOST_ASKED)
            await self._each(self._numbers, partial(self._judge_given, room, names), (genrm.name,))
        elif ROLLOUT in roles:
            places = self._node.placement.trainer_nodes
            share = Share(
                shard=self._node.index, num_shards=len(places), next_number=0, most=len(self._numbers)
            )
            await self._source.kept.begin(ITERATION, share)
            sample = partial(self._sample, self._room(ROLLOUT), names)
            await self._each(self._numbers, sample, ())
        else:
            for role in roles:
                judge = partial(self._score_again, self._room(role), names)
                await self._each(sorted(self._groups), judge, (genrm_of_role(role),))
        num_prompts = len(self._groups)
        return c.PromptsDone(num_prompts=num_prompts, too_long=len(self._numbers) - num_prompts)

    def _room(self, role: str) -> asyncio.Semaphore:
        """Returns room for as many prompts at once as keep this node's share of the role's engines busy."""
        config, placement = self._node.config, self._node.placement
        engines = sum(placement.num_engines[role].values())
        requests = 2 * engines * engine_room(config, role) // len(placement.trainer_nodes)
        return asyncio.Semaphore(max(LEAST_GROUPS, requests // config.rollout.n))

    async def _each(
        self,
        numbers: Sequence[int],
        work: Callable[[int], Coroutine[Any, Any, None]],
        genrms: tuple[str, ...],
    ) -> None:
        """Runs `work` for each prompt."""
        crowd, done, shown_s = Crowd(), 0, clock.monotonic_s()
        for number in numbers:
            crowd.start(work(number))
        try:
            while crowd:
                await crowd.one_end()
                done += 1
                if clock.monotonic_s() - shown_s > SHOW_S or not crowd:
                    shown_s = clock.monotonic_s()
                    self._events.emit(PromptsEvaluated(genrms=genrms, done=done, total=len(numbers)))
        finally:
            await crowd.cancel()

    async def _sample(self, room: asyncio.Semaphore, names: tuple[str, ...], number: int) -> None:
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
                self._keep(group)
        except ExceptionGroup as error:
            raise error.exceptions[0] from error
        await self._score_together(group, names)
        self._keep(group)

    async def _judge_given(self, room: asyncio.Semaphore, names: tuple[str, ...], number: int) -> None:
        """Scores the given completions of one prompt."""
        async with room:
            group = await self._opened(number)
            if group is not None:
                await asyncio.gather(*(self._score_alone(group, each, names) for each in group.subjects))
                await self._score_together(group, names)

    async def _opened(self, number: int) -> EvaluatedGroup | None:
        """Reads and encodes a prompt; None if it is too long. One that an earlier attempt has sampled has its
        samples and scores."""
        config = self._node.config
        row = await call_in_thread(partial(self._source.rows.row, number))
        prompt = await call_in_thread(partial(encode_prompt, row, self._episodes.tokenizer, config))
        if len(prompt.ids) > config.data.max_prompt_tokens:
            return None
        if is_given := only_judges(config):
            group = await call_in_thread(partial(self._given_group, number, row, prompt))
        else:
            group = new_group(number, number, prompt.text, prompt.ids, config.rollout.n, prompt.media)
        if (kept := self._source.kept.like(group)) is not None:
            group = kept.group
            self._events.emit(GroupsReused(iteration=ITERATION, numbers=[number]))
        ref, judged = self._source.rows.ref(number), list[Judged]() if is_given else None
        found = self._groups[number] = EvaluatedGroup(
            [
                Subject(group=group, sample=sample, row=row, ref=ref, judged=judged, is_held_out=True)
                for sample in group.samples
            ]
        )
        return found

    def _given_group(self, number: int, row: Row, prompt: EncodedPrompt) -> PromptGroup:
        """Returns the group whose completions stand in its row; each is one turn of the policy."""
        given = msgspec.convert(row.raw[GIVEN], GivenTexts)
        group = new_group(given.number, number, prompt.text, prompt.ids, len(given.texts), prompt.media)
        for sample, text, reason in zip(group.samples, given.texts, given.finish_reasons, strict=True):
            ids = pack_ids(self._episodes.tokenizer.encode_plain(text))
            sample.turns = [Turn(ids, is_sampled=True, finish_reason=reason)]
            sample.text, sample.finish_reason = text, reason
        return group

    def _keep(self, group: EvaluatedGroup) -> None:
        self._source.kept.keep(group.subjects[0].group, {})

    async def _extend(self, subject: Subject) -> None:
        sample, episodes = subject.sample, self._episodes
        await episodes.extend(subject, lambda: True)
        if not sample.finish_reason and not sample.failed:
            sample.fail(ABORTED)
        if not sample.failed:
            sample.text = episodes.text_of(sample)

    async def _score_after(
        self, extend: "asyncio.Task[None]", group: EvaluatedGroup, subject: Subject, names: tuple[str, ...]
    ) -> None:
        await asyncio.wait({extend})
        if not subject.sample.failed:
            await self._score_alone(group, subject, names)

    async def _score_again(self, room: asyncio.Semaphore, names: tuple[str, ...], number: int) -> None:
        group = self._groups[number]
        async with room:
            await asyncio.gather(
                *(self._score_alone(group, each, names) for each in group.subjects if not each.sample.failed)
            )
            await self._score_together(group, names)
        self._keep(group)

    async def _score_alone(self, group: EvaluatedGroup, subject: Subject, names: tuple[str, ...]) -> None:
        whole = self._episodes.with_turns(subject)
        for name in names:
            if not self._scorer.is_of_groups(name) and not group.has(subject.sample, name):
                await self._scorer.score_one(name, whole)
                group.take_failure(subject.sample, name)

    async def _score_together(self, group: EvaluatedGroup, names: tuple[str, ...]) -> None:
        there = [self._episodes.with_turns(s) for s in group.subjects if not s.sample.failed]
        for name in filter(self._scorer.is_of_groups, names):
            if all(group.has(subject.sample, name) for subject in there):
                continue
            if len(there) == len(group.subjects):
                await self._scorer.score_together(name, there)
            for subject in there:
                if len(there) < len(group.subjects):
                    subject.sample.fail(INCOMPLETE)
                group.take_failure(subject.sample, name)

    # ---- the result -----------------------------------------------------------------------------

    async def _write(self, _: c.WriteSamples) -> m.Message:
        path = self._node.paths.evaluated_samples(self._node.attempt, self._node.index)
        groups = (self._groups[number] for number in sorted(self._groups))
        templates = {genrm.name: genrm.template or CONVERSATION for genrm in self._node.config.genrms}
        records = (each for group in groups for each in group.records(templates))
        await call_in_thread(partial(_write_records, self._node.paths.root, path, records))
        return m.Done()


def _write_records(root: Path, path: Path, records: Iterator[EvaluatedSample]) -> None:
    make_within(root, path.parent)
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())
