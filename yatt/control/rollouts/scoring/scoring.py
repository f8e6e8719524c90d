"""Scores of completions: from functions in reward processes, and from GenRMs by template and verdict.

Some scores are made from one sample as soon as it is complete; others need the whole group: functions with
scope group, and GenRMs that compare completions. If a sample's function raises, or its verdict cannot be
parsed, the sample *fails* with the reason, or gets the score that the config sets for this case. Both cases
are counted; a failure never becomes a zero by default. A score of weight 0 is only a measurement: if it is
missing, this is counted and has no other effect.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from yatt.config.schema import RunConfig
from yatt.control.rollouts.scoring.asked import Unscored
from yatt.control.rollouts.scoring.judging import Interrupted, Judge
from yatt.control.rollouts.scoring.sources import ScoreSource
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.figures.evaluation import NOT_APPLICABLE as NOT_APPLICABLE
from yatt.core.gpus.placement import answering_role
from yatt.core.samples.prompts import is_in_share
from yatt.core.samples.rewards import Shaping
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m

MACHINES = (WorkerFailed, DeadlineExceeded, OSError)
"""Failures that no text and no function caused; OSError: this machine cannot start a thread."""

NO_SCORE = m.Scored(score=0.0, applies=False)

MOST_MEASURES = 64
"""Names of further numbers that one function may give; each is a curve. Others are left out, with a line."""

_LOG = logging.getLogger(__name__)


class Scorer:
    """Scores completions of one node.

    Args:
        judge: asks the GenRMs.
        sources: of each score, by name, in their order.
    """

    def __init__(self, config: RunConfig, judge: Judge, sources: Mapping[str, ScoreSource]) -> None:
        self._config, self._judge, self._sources = config, judge, sources
        self._roles = {g.name: answering_role(g) for g in config.genrms if not g.api.url}
        self._genrms = {g.name: g for g in config.genrms}
        section = config.algorithm
        self.shaping = Shaping(
            max_tokens=config.rollout.max_response_tokens, buffer_tokens=section.overlong_buffer_tokens,
            factor=section.overlong_penalty_factor, masks_truncated=section.mask_truncated,
        )  # fmt: skip
        self._measures: dict[str, dict[str, None]] = {}
        self._has_many: set[str] = set()
        self.weights = {r.name: r.weight for r in config.rewards} | {
            g.name: g.weight if g.kind != "teacher" else 0.0 for g in config.genrms
        }
        """Weight of each score in the reward."""
        self.judges = tuple(g.name for g in config.genrms if self.weights[g.name] > 0)
        """Scores that GenRMs give, and that are part of the reward."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Scores of weight 0, which are only measured; a teacher's is no opinion."""
        return tuple(n for n, weight in self.weights.items() if not weight and not self._is_teacher(n))

    def names(self, roles: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Returns the scores of a trained sample; with `roles`, those that can be made now."""
        if roles is None:
            return tuple(self._sources)
        return tuple(name for name in self._sources if name not in self._roles or self._roles[name] in roles)

    async def score(self, subject: Subject, roles: tuple[str, ...]) -> None:
        """Adds every missing score of one sample that can be made now; stops at the first failure."""
        sample = subject.sample
        have = sample.scores.keys() | sample.unmeasured.keys()
        for name in self.names(roles):
            if sample.failed:
                return
            is_missing = name not in have and not self.is_of_groups(name)
            if is_missing and not await self.score_one(name, subject):
                return

    async def score_group(self, subjects: Sequence[Subject], roles: tuple[str, ...]) -> None:
        """Adds every missing score that needs the whole group and can be made now."""
        for name in self.names(roles):
            if any(subject.sample.failed for subject in subjects):
                return
            have = [s.sample.scores.keys() | s.sample.unmeasured.keys() for s in subjects]
            is_missing = self.is_of_groups(name) and not all(name in each for each in have)
            if is_missing and not await self.score_together(name, subjects):
                return

    async def interrupt(self) -> None:
        """Ends the questions to GenRMs that wait for an answer; their scores stay missing."""
        await self._judge.interrupt()

    def is_of_groups(self, name: str) -> bool:
        """Whether this score needs all samples of a group."""
        return self._sources[name].needs_group

    async def score_one(self, name: str, subject: Subject) -> bool:
        """Adds one score. A failure of any kind affects only this sample. Returns as `score_together`.

        Raises:
            WorkerFailed: it was lost to machine failures, in deterministic mode.
        """
        return await self.score_together(name, [subject])

    async def score_together(self, name: str, subjects: Sequence[Subject]) -> bool:
        """Adds one score to all samples of a group. A failure affects only this group. Returns whether others
        may follow: not if it was interrupted, because theirs would be, too.

        Raises:
            WorkerFailed: it was lost to machine failures, in deterministic mode.
        """
        try:
            found = await self._sources[name].score(subjects) if self._asks(name, subjects[0]) else None
        except Interrupted:
            return False
        except Unscored as error:
            self._failed(name, subjects, str(error), is_users=True)
            return True
        except MACHINES as error:
            self._failed(name, subjects, str(error), is_users=False)
            return True
        for subject, scored in zip(subjects, found or [NO_SCORE] * len(subjects), strict=True):
            self._scored(name, subject, scored)
        return True

    def _asks(self, name: str, subject: Subject) -> bool:
        """Whether a score is made of this group, and not of others only."""
        genrm = self._genrms.get(name)
        is_part = genrm is not None and genrm.share < 1 and not subject.is_held_out
        return not is_part or is_in_share(
            self._config.run.seed, subject.group.number, self._genrms[name].share
        )

    def _scored(self, name: str, subject: Subject, answer: m.Scored) -> None:
        sample = subject.sample
        if not answer.applies:
            subject.counters[f"reward/{name}/not_applicable"] += 1
            sample.unmeasured = {**sample.unmeasured, name: NOT_APPLICABLE}
            return
        sample.scores = {**sample.scores, name: answer.score}
        if answer.extra:
            known = self._known_measures(name, answer.extra)
            extras = {f"{name}/{key}": value for key, value in answer.extra.items() if key in known}
            sample.extras = {**sample.extras, **extras}
        subject.preds[name] = answer.pred

    def _known_measures(self, name: str, found: Iterable[str]) -> Collection[str]:
        """Returns the first names of a function's numbers, these included as far as there is room."""
        known = self._measures.setdefault(name, {})
        for key in found:
            if key in known:
                continue
            if len(known) < MOST_MEASURES:
                known[key] = None
            elif name not in self._has_many:
                self._has_many.add(name)
                _LOG.warning(
                    "reward '%s' gives numbers of more than %d names; those of more are left out: a name "
                    "that is made of a sample's content is a curve for each sample",
                    name,
                    MOST_MEASURES,
                )
        return known

    def _failed(self, name: str, subjects: Sequence[Subject], why: str, *, is_users: bool) -> None:
        kind, first = "genrm" if name in self._genrms else "reward", subjects[0]
        place = first.place if len(subjects) == 1 else f"prompt {first.group.number}"
        told = f"{kind} '{name}', {place}: {why}"
        if not is_users and self._config.run.deterministic:
            first.sample.fail_by_machines(told, deterministic=True)
        for subject in subjects:
            if self.weights[name] or subject.is_held_out or self._is_teacher(name):
                subject.sample.fail(told, is_users=is_users)
                continue
            subject.counters[f"{kind}/{name}/unmeasured"] += 1
            subject.sample.unmeasured = {**subject.sample.unmeasured, name: told}

    def _is_teacher(self, name: str) -> bool:
        return name in self._genrms and self._genrms[name].kind == "teacher"
