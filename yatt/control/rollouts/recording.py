"""Records samples for people: a few of each iteration in `samples.jsonl`, or all in files of their own.

`logging.rollouts` says which. Files are made in a writer thread, because text must be decoded and compressed.
Nothing is tried again: an iteration that cannot be written, or comes while two others wait, is lost, with the
event `rollouts.lost`. The run does not notice.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from yatt.adapters.files.files import make_within, publish_stream
from yatt.adapters.files.lines import Record
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.config.schema import LoggingSection
from yatt.control.node import Node
from yatt.control.rollouts.groups.groups import TRUNCATED, PromptGroup, SampleState
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.control.writers import Writers
from yatt.errors import words_of
from yatt.judging.template import CONVERSATION, render_template
from yatt.obs.metrics import STEP
from yatt.obs.rollouts import HEAD, JUDGED, SAMPLE, compressed_file, iterations_of, record_line
from yatt.obs.story.events import EventLog
from yatt.records.events.groups import SamplesLost, VerdictUnreadable
from yatt.records.message import unpack_ids

MOST_WAITING = 2
"""Iterations that wait to be written; more than these would fill the memory."""

MOST_FAILED = 3
"""Dropped groups of an attempt of which a failed sample is written to `samples.jsonl` at once."""

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A prompt group that was trained on or dropped. `dropped`: the reason, empty if it was trained on."""

    group: PromptGroup
    row: Row | None
    dropped: str = ""
    judged: tuple[Judged, ...] = ()
    advantages: Mapping[int, float] = field(default_factory=dict)


def sample_records(
    ended: EndedGroup, scorer: Scorer, tokenizer: Tokenizer, policy_version: int, indexes: Sequence[int]
) -> Iterator[Record]:
    """Yields the records of some samples of a group, with their texts as decoded.

    Args:
        policy_version: the one that sampled the batch; older tokens were carried over.
        indexes: of the samples in the group.
    """
    group, row = ended.group, ended.row
    is_whole = group.failure() is None
    rewards = group.rewards(scorer.weights, scorer.shaping) if is_whole else [None] * len(group.samples)
    for index in indexes:
        sample = group.samples[index]
        shown = (each for media in (group.media, *(turn.media for turn in sample.turns)) for each in media)
        refs = [each.ref for each in shown if each.part == 0]
        number, is_cut = group.sample_id(sample), sample.finish_reason == TRUNCATED
        yield {
            "kind": SAMPLE,
            "sample": number,
            "group": group.number,
            "index": index,
            "row": group.row,
            "data_source": row.data_source if row else None,
            "prompt": group.prompt_text,
            "num_prompt_tokens": group.num_prompt_tokens,
            "media": [ref.path or ref.sha256 for ref in refs],
            "media_sizes": [[ref.width, ref.height] for ref in refs],
            "completion": tokenizer.decode(sample.token_ids),
            **_turns(sample, tokenizer),
            "num_tokens": sample.num_tokens,
            "num_response_tokens": sample.num_response_tokens,
            "finish_reason": sample.finish_reason,
            "is_truncated": is_cut,
            "is_masked": is_cut and scorer.shaping.masks_truncated,
            "policy_versions": _versions(sample),
            "dropped": ended.dropped,
            "failed": sample.failed,
            "is_carried": sample.oldest_version(policy_version) < policy_version,
            "verdicts": sample.verdicts,
            "scores": sample.scores,
            "extras": sample.extras,
            "unmeasured": sample.unmeasured,
            "reward": rewards[index],
            "advantage": ended.advantages.get(number),
            "ground_truth": row.ground_truth if row else None,
        }


def judged_record(ended: EndedGroup, judged: Judged, template: str) -> Record:
    """Returns the record of one answer: the GenRM's prompt, its text, and what was read in it."""
    group, verdict = ended.group, judged.verdict
    return {
        "kind": JUDGED,
        "group": group.number,
        "genrm": judged.genrm,
        "samples": [group.sample_id(group.samples[index]) for index in judged.about],
        "tries": judged.tries,
        "prompt": "".join(text for text, _ in render_template(template, judged.shown)),
        "thought": judged.thought if judged.thought or judged.is_thought_cut else None,
        "is_thought_cut": judged.is_thought_cut,
        "answer": judged.answer,
        "finish_reason": judged.finish_reason,
        "is_readable": verdict is not None,
        "score": verdict.score if verdict and not (verdict.ranking or judged.criteria) else None,
        "values": verdict.extra if verdict and verdict.extra else None,
        "ranking": list(verdict.ranking) if verdict and verdict.ranking else None,
    }


def _turns(sample: SampleState, tokenizer: Tokenizer) -> Record:
    """Returns the turns after the prompt, if the sample has turns of an environment."""
    if not sample.observations:
        return {}
    observations = iter(sample.observations)
    return {
        "turns": [
            ["policy", tokenizer.decode(unpack_ids(turn.token_ids))]
            if turn.is_sampled
            else ["environment", next(observations)]
            for turn in sample.turns
        ]
    }


def _versions(sample: SampleState) -> list[list[int]]:
    """Returns [policy version, number of tokens] of consecutive sampled tokens."""
    found: list[list[int]] = []
    for turn in sample.turns:
        for version, begin, end in turn.policy_versions:
            if found and found[-1][0] == version:
                found[-1][1] += end - begin
            else:
                found.append([version, end - begin])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    number: int
    policy_version: int
    """That sampled its batch."""

    groups: tuple[EndedGroup, ...]


@dataclass(slots=True)
class _Sampled:
    """What is known of batches that are being sampled.

    Attributes:
        judged: GenRMs' answers, by number of the group.
        dropped: groups, with the iteration that was sampled.
        versions: the policy that samples an iteration's batch.
    """

    judged: dict[int, list[Judged]] = field(default_factory=dict)
    dropped: list[tuple[int, EndedGroup]] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)

    def version_of(self, iteration: int) -> int:
        """The policy that sampled an iteration's batch."""
        return self.versions.get(iteration, iteration - 1)

    def ended(
        self,
        group: PromptGroup,
        row: Row | None,
        *,
        dropped: str = "",
        advantages: Mapping[int, float] | None = None,
    ) -> EndedGroup:
        """A group that is over, with the answers about it."""
        judged = tuple(self.judged.pop(group.number, ()))
        return EndedGroup(group=group, row=row, dropped=dropped, judged=judged, advantages=advantages or {})

    def take(self, iteration: int, most: int | None) -> list[EndedGroup]:
        """Takes the dropped groups of an iteration, those up to number `most` if it is not None."""
        mine = [group for i, group in self.dropped if i <= iteration]
        self.dropped = [(i, group) for i, group in self.dropped if i > iteration]
        self.versions = {i: version for i, version in self.versions.items() if i > iteration}
        return [each for each in mine if most is None or each.group.number <= most]

    def forget(self) -> None:
        """All groups that are not over are sampled again."""
        self.judged.clear()
        self.dropped.clear()


class RolloutRecorder:
    """Records the samples of one trainer node.

    Args:
        tokenizer: the policy's.
    """

    def __init__(
        self, node: Node, scorer: Scorer, tokenizer: Tokenizer, events: EventLog, writers: Writers
    ) -> None:
        self._node, self._scorer, self._tokenizer = node, scorer, tokenizer
        self._events, self._writers, self._sampled = events, writers, _Sampled()
        self._templates = {genrm.name: genrm.template or CONVERSATION for genrm in node.config.genrms}
        self._waiting: set[int] = set()
        self._has_example: set[str] = set()
        self._num_failed = 0  # of which a sample was written

    @property
    def _section(self) -> LoggingSection:
        return self._node.config.logging

    @property
    def _is_all(self) -> bool:
        return self._section.rollouts == "all"

    # ---- while a batch is sampled ---------------------------------------------------------------

    def begin(self, iteration: int, policy_version: int) -> None:
        """An iteration's batch is sampled from now on."""
        self._sampled.versions[iteration] = policy_version
        self._has_example.clear()

    def scored(self, subject: Subject) -> None:
        """Emits an example of each GenRM's answers without a verdict, once an iteration."""
        for genrm, found in subject.unreadable.items():
            _, why = found[min(found)]
            if genrm not in self._has_example:
                self._has_example.add(genrm)
                self._events.emit(VerdictUnreadable(genrm=genrm, number=subject.group.number, why=why))

    def judged(self, number: int) -> list[Judged] | None:
        """Returns the list that gets the GenRMs' answers about a group; None if they are not recorded."""
        return self._sampled.judged.setdefault(number, []) if self._is_all else None

    def restarted(self, group: PromptGroup) -> None:
        """Some samples of the group are sampled again: answers about them are out of date."""
        if found := self._sampled.judged.get(group.number):
            found[:] = [each for each in found if all(group.samples[i].turns for i in each.about)]

    def dropped(self, iteration: int, group: PromptGroup, row: Row | None, why: str) -> None:
        """A group was dropped while this iteration's batch was sampled."""
        if self._num_failed < MOST_FAILED and group.failure() is not None:
            self._num_failed += 1
            self._show_failed(iteration, EndedGroup(group=group, row=row, dropped=why))
        if self._is_all:
            self._sampled.dropped.append((iteration, self._sampled.ended(group, row, dropped=why)))

    def _show_failed(self, iteration: int, ended: EndedGroup) -> None:
        """Writes a failed sample at once: the iteration may never complete."""
        if not self._node.is_leader or self._section.rollouts == "none":
            return
        if not self._section.samples_per_iteration:
            return
        version = self._sampled.version_of(iteration)
        found = _Iteration(number=iteration, policy_version=version, groups=(ended,))
        indexes = [sample.index for sample in ended.group.samples if sample.failed][:1]
        for record in sample_records(ended, self._scorer, self._tokenizer, version, indexes):
            self._writers.lines.append(self._node.paths.samples, record_line(self._stamp(found) | record))

    # ---- when it was trained on -----------------------------------------------------------------

    def trained(
        self,
        iteration: int,
        groups: Sequence[PromptGroup],
        rows: Mapping[int, Row],
        advantages: Mapping[int, float],
    ) -> None:
        """Records an iteration: groups that were trained on, and those that were dropped meanwhile.

        Args:
            rows: data rows by the number of the group; without a row, no ground truth is shown.
            advantages: by sample id.
        """
        sampled, last = self._sampled, max((group.number for group in groups), default=-1)
        # In deterministic mode without what was dropped after the last trained group, which timing decides.
        most = last if self._node.config.run.deterministic else None
        version = sampled.version_of(iteration)
        ended = [sampled.ended(group, rows.get(group.number), advantages=advantages) for group in groups]
        dropped = sampled.take(iteration, most)
        found = _Iteration(number=iteration, policy_version=version, groups=(*ended, *dropped))
        if self._node.config.run.deterministic:
            sampled.forget()
        if self._node.is_leader and self._section.rollouts != "none":
            self._show(found, [each for each in found.groups if not each.dropped])
        if self._is_all:
            self._put(found)

    def _show(self, found: _Iteration, groups: Sequence[EndedGroup]) -> None:
        """Writes some samples, spread over the groups, for the report."""
        limit, count = self._section.samples_per_iteration, sum(len(each.group.samples) for each in groups)
        chosen = set(list(range(0, count, max(1, count // limit)))[:limit]) if limit else set()
        begin = 0
        for each in groups:
            end = begin + len(each.group.samples)
            indexes = [number - begin for number in sorted(chosen) if begin <= number < end]
            for record in sample_records(each, self._scorer, self._tokenizer, found.policy_version, indexes):
                self._writers.lines.append(self._node.paths.samples, record_line(self._stamp(found) | record))
            begin = end

    def _put(self, found: _Iteration) -> None:
        loop = asyncio.get_running_loop()

        def tell(error: str) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._lost, found, error)

        if len(self._waiting) >= MOST_WAITING:
            self._lost(found, "the run folder is slow: the iterations before it were not written yet")
            return
        self._waiting.add(found.number)
        self._writers.rollouts.call(partial(self._write, found, tell))

    def _lost(self, found: _Iteration, error: str) -> None:
        num_samples = sum(len(each.group.samples) for each in found.groups)
        self._events.emit(SamplesLost(iteration=found.number, samples=num_samples, error=error))

    # ---- in the writer's thread -----------------------------------------------------------------

    def _write(self, found: _Iteration, tell: Callable[[str], None]) -> None:
        paths = self._node.paths
        path = paths.rollout_file(found.number, self._node.index)
        try:
            check_newest(paths, self._node.attempt)
            make_within(paths.root, path.parent)
            publish_stream(path, compressed_file(self._records(found)))
            if self._node.is_leader:
                self._remove_old(found.number)
        except Exception as error:  # noqa: BLE001 - told; it must not be tried again
            tell(words_of(error))
        finally:
            self._waiting.discard(found.number)

    def _remove_old(self, iteration: int) -> None:
        files = iterations_of(self._node.paths.rollouts)
        for old in [i for i in files if i <= iteration - self._section.rollouts_keep]:
            for path in files[old]:
                path.unlink(missing_ok=True)

    def _records(self, found: _Iteration) -> Iterator[Record]:
        head = {"kind": HEAD, "format": FORMAT, "policy_version": found.policy_version}
        yield {**head, **self._stamp(found), "num_nodes": len(self._node.placement.trainer_nodes)}
        for ended in found.groups:
            indexes = range(len(ended.group.samples))
            for record in sample_records(ended, self._scorer, self._tokenizer, found.policy_version, indexes):
                yield self._stamp(found) | record
            for judged in ended.judged:
                yield judged_record(ended, judged, self._templates[judged.genrm])

    def _stamp(self, found: _Iteration) -> Record:
        return {STEP: found.number, "attempt": self._node.attempt, "node": self._node.index}
