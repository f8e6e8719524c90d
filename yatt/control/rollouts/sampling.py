"""Turns prompts into accepted prompt groups: one controller's part of the rollout and score phases.

Each group has its own task, which samples and scores it as far as the engines that are awake in the phase
allow. A completion is scored as soon as it is complete. Groups whose rewards are all equal are replaced
(`algorithm.filter_groups`), groups beyond the target are carried over, interrupted groups keep their tokens.

In deterministic mode nothing may depend on timing: groups count in the order of their numbers, and
interrupted groups are discarded.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from yatt.adapters.net.crowd import Crowd
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.drops import Drops
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, SampleState
from yatt.control.rollouts.node_groups import NodeGroups
from yatt.control.rollouts.recording import RolloutRecorder
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.figures.drop_counters import MEDIA_FAULTS
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.samples.lengths import key_of
from yatt.core.samples.prompts import InOrder, Quota, num_extra, opening_limit
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c
from yatt.records.events.groups import GroupAccepted, GroupDropped, GroupsOpened, GroupsReused

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    """What the present batch still needs: the number of groups, by count and in order of their numbers."""

    iteration: int = 0
    policy_version: int = 0
    quota: Quota = field(default_factory=lambda: Quota(target=0))
    in_order: InOrder = field(default_factory=lambda: InOrder((), ()))

    def resolved(self, group: PromptGroup, *, accepted: bool) -> None:
        """Notes that a group was accepted or dropped."""
        self.quota = self.quota.resolved(accepted=accepted)
        self.in_order.resolved(group.number, accepted=accepted)


class Sampler:
    """Samples and scores the prompt groups of one node.

    Args:
        episodes: extends samples.
    """

    def __init__(
        self,
        node: Node,
        groups: NodeGroups,
        scorer: Scorer,
        episodes: Episodes,
        events: EventLog,
        recorder: RolloutRecorder,
    ) -> None:
        self._node, self.groups, self._scorer = node, groups, scorer
        self._episodes, self._events, self._recorder = episodes, events, recorder
        self._batch = _Batch()
        self._drops, self._breaking_off = Drops(node.config.algorithm.filter_by), False

    @property
    def shard(self) -> DataShard:
        """The node's data shard."""
        return self.groups.shard

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> NodeState:
        """Returns this controller's part of a checkpoint."""
        return self.groups.state()

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self.groups.restore(state)
        if state.next_number:
            self._drops.worked_before()

    def restored(self, weights: str) -> None:
        """Notes the identity of the weights that this attempt has restored."""
        self.groups.kept.restored = weights

    def saved(self, iteration: int) -> None:
        """Notes that a snapshot of this iteration was taken."""
        self.groups.kept.saved(iteration)

    def groups_of(self, numbers: set[int]) -> list[PromptGroup]:
        """Returns this node's groups of a batch."""
        return self.groups.accepted.of(numbers)

    def trained(self, numbers: set[int], iteration: int) -> None:
        """Drops groups that were trained on; in deterministic mode also all later groups."""
        self.groups.trained(numbers, iteration)

    def leave_out(self, reasons: dict[int, str], iteration: int) -> None:
        """Drops accepted groups, of which a picture was lost before it was trained on.

        Args:
            reasons: why, by number; also of other nodes' groups.

        Raises:
            ConfigError: too many of the iteration's groups have such pictures.
        """
        found = dict[int, str]()
        for group in self.groups.accepted.of(set(reasons)):
            found[group.number] = why = (
                f"{self.shard.place(group.row)} (prompt {group.number}): {reasons[group.number]}"
            )
            self.groups.accepted.remove(group.number)
            self._recorder.dropped(iteration, group, self.groups.rows.pop(group.number, None), why)
            self._events.emit(GroupDropped(number=group.number, reason=why))
            _LOG.warning("a prompt group is left out of update %d: %s", iteration, why)
        self._drops.media_fault(iteration, list(found.values()), self._batch.quota.target)

    def record(self, numbers: set[int], iteration: int, advantages: dict[int, float]) -> None:
        """Records groups that were trained on, for people; call it before `trained`."""
        self._recorder.trained(iteration, self.groups.accepted.of(numbers), self.groups.rows, advantages)

    # ---- one phase ------------------------------------------------------------------------------

    async def advance(self, order: c.Advance) -> None:
        """Opens, samples and scores groups until the engines of `order.roles` have no more work.

        Raises:
            ConfigError: so many groups were dropped that the target is out of reach, or all of them failed.
            WorkerFailed: the same, and the user's code is not the cause.
        """
        self._breaking_off = False
        batch, may_open, config = self._batch, ROLLOUT in order.roles, self._node.config
        if order.iteration != batch.iteration:
            self._begin_iteration(order)
            factor = config.algorithm.max_groups_opened_factor
            self._tell(await self.groups.use_kept(order.iteration, order.target, factor), [])
        batch.quota = Quota(
            target=order.target,
            accepted=len(self.groups.accepted),
            dropped=batch.quota.dropped,
            in_flight=len(self.groups.unfinished),
            is_patient=config.run.deterministic,
            limit=opening_limit(order.target, config.algorithm.max_groups_opened_factor),
            extra=num_extra(order.target, config.rollout.oversample),
            acceptance=batch.quota.acceptance,
        )
        batch.in_order = InOrder(dict(self.groups.accepted.waiting()), self.groups.unfinished)
        await self._until_nothing_moves(order.roles, may_open=may_open)
        if may_open and not self._breaking_off and batch.quota.is_exhausted():
            raise self._drops.out_of_reach(batch.quota)

    async def _until_nothing_moves(self, roles: tuple[str, ...], *, may_open: bool) -> None:
        """Runs one task per group; after the end of each one, others may be opened."""
        if self._is_enough(roles):
            return  # the batch is complete in the checkpoint, or by surplus groups
        crowd = Crowd()
        for group in list(self.groups.unfinished.values()):
            crowd.start(self._pursue(group, roles))
        try:
            while True:
                for group in await self._open() if may_open and not self._breaking_off else ():
                    crowd.start(self._pursue(group, roles))
                if not crowd:
                    return
                await crowd.one_end()
                if crowd and self._is_enough(roles):
                    await self.break_off()
        finally:
            await crowd.cancel()

    def _begin_iteration(self, order: c.Advance) -> None:
        """Resets the count of dropped groups, and restarts completions that are too old to be trained on."""
        self.groups.accepted.take_reported()
        batch, now = self._batch, order.policy_version
        batch.iteration, batch.policy_version = order.iteration, now
        self._recorder.begin(order.iteration, now)
        self._drops.begin_iteration(order.iteration)
        batch.quota = Quota(target=order.target, acceptance=batch.quota.acceptance)
        for group in self.groups.begin_iteration(now - self._node.config.rollout.max_policy_age, now):
            self._recorder.restarted(group)

    def advanced(self, target: int) -> c.Advanced:
        """Returns the report to the leader about this phase; resets the counters."""
        scorer, now = self._scorer, self._batch.policy_version
        chosen = self.groups.accepted.report(self._batch.iteration, target)
        compared = scorer.judges, scorer.watched
        facts = tuple(group.fact(scorer.weights, scorer.shaping, now, *compared) for group in chosen)
        # In deterministic mode only up to the last chosen group: sampling beyond it depends on timing.
        last = max((f.number for f in facts), default=-1) if self._node.config.run.deterministic else None
        counters = self.groups.counters.take(self._batch.iteration, self.groups.unfinished, last)
        return c.Advanced(groups=facts, missing=target - len(facts), counters=counters)

    def _tell(self, reused: list[int], opened: list[int]) -> None:
        """Emits events about groups that are used again, and about new ones."""
        if reused:
            self._events.emit(GroupsReused(iteration=self._batch.iteration, numbers=reused))
        if new := [number for number in opened if number not in reused]:
            self._events.emit(GroupsOpened(numbers=new))

    async def break_off(self) -> None:
        """Aborts requests in flight: completions keep their tokens, verdicts are asked for again later."""
        self._breaking_off = True
        # Questions first: those to the policy itself are aborted with its completions, which is no failure.
        await asyncio.gather(self._scorer.interrupt(), self._episodes.abort())

    def _is_enough(self, roles: tuple[str, ...]) -> bool:
        """Whether the batch can close now: enough groups are accepted (with oversampling: or waiting
        for a GenRM that sleeps in this phase), and closing discards no tokens."""
        if self._node.config.run.deterministic:
            return self._batch.in_order.num_in_order() >= self._batch.quota.target
        is_scored_later = ROLLOUT in roles and self._scorer.names(roles) != self._scorer.names()
        waits = self.groups.sampled if is_scored_later else set[int]()
        if self.groups.are_due(waits):
            return False
        return self._batch.quota.is_expected_from(len(waits) if self._batch.quota.extra else 0)

    async def _open(self) -> list[PromptGroup]:
        """Opens the groups of the quota, in threads: a whole data epoch may have to be tokenised."""
        opened, reused, skipped, batch = list[PromptGroup](), list[int](), 0, self._batch
        self._episodes.expect(batch.quota.num_to_open())
        while len(opened) < batch.quota.num_to_open() or self.groups.has_kept():
            number, group, is_kept = await self.groups.open_next()
            if group is None:
                skipped += 1
                self.shard.check_some_fit(skipped)
                continue
            reused += [number] if is_kept else []
            opened.append(group)
            batch.in_order.opened(number)
        batch.quota = batch.quota.opened(len(opened))
        self._episodes.expect(0)
        self._tell(reused, [group.number for group in opened])
        return opened

    async def _pursue(self, group: PromptGroup, roles: tuple[str, ...]) -> None:
        await self.groups.find_row(group)
        tasks = [asyncio.ensure_future(self._pursue_sample(group, s, roles)) for s in group.samples]
        try:
            for done in asyncio.as_completed(tasks):
                await done
                if group.failure() is not None and not self._node.config.run.deterministic:
                    break  # the others' completions and scores would not be used
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if group.failure() is None and group.is_sampled():
            self.groups.sampled.add(group.number)
            await self._score_group(group, roles)
        if group.failure() or (group.is_sampled() and group.is_scored(self._scorer.names())):
            self._resolve(group)

    async def _score_group(self, group: PromptGroup, roles: tuple[str, ...]) -> None:
        if not self._breaking_off:
            subjects = [self._episodes.with_turns(self._subject(group, sample)) for sample in group.samples]
            await self._scorer.score_group(subjects, roles)
            self._recorder.scored(subjects[0])
        if group.failure() is None:
            self.groups.kept.keep(group, self.groups.counters.whole(group.number))

    async def _pursue_sample(self, group: PromptGroup, sample: SampleState, roles: tuple[str, ...]) -> None:
        subject = self._subject(group, sample)
        await self._episodes.extend(subject, lambda: ROLLOUT in roles and not self._breaking_off)
        if sample.finish_reason and not sample.failed and not self._breaking_off:
            sample.text = sample.text or self._episodes.text_of(sample)
            await self._scorer.score(self._episodes.with_turns(subject), roles)
            self._recorder.scored(subject)

    def _subject(self, group: PromptGroup, sample: SampleState) -> Subject:
        number, judged = group.number, self._recorder.judged(group.number)
        return Subject(
            group=group,
            sample=sample,
            row=self.groups.rows[number],
            ref=self.shard.ref(group.row),
            counters=self.groups.counters.of(number),
            judged=judged,
        )

    def _resolve(self, group: PromptGroup) -> None:
        if self._drops.is_hopeless:
            return  # another group has ended the run; later failures add no information
        self.groups.resolved(group)
        scorer, section = self._scorer, self._node.config.algorithm
        group.refuse_scoreless(scorer.weights)
        failed = group.failure()
        flat = failed is None and group.teaches_nothing(scorer.weights, scorer.shaping, section.filter_by)
        counts = self.groups.counters.of(group.number)
        counts["rollout/flat_groups"] += int(flat)
        drop = failed is not None or (flat and section.filter_groups)
        if self._batch.quota.extra:
            counts.update(key_of(s.num_tokens, "dropped" if drop else "accepted") for s in group.samples)
        self._batch.resolved(group, accepted=not drop)
        self._drops.resolved(failed, is_dropped=drop)
        if not drop:
            self.groups.accepted.add(group)
            self._events.emit(GroupAccepted(number=group.number))
            return
        self._recorder.dropped(
            self._batch.iteration, group, self.groups.rows.pop(group.number, None), self._drops.reason
        )
        counts["rollout/failed_groups" if failed else "rollout/dropped_groups"] += 1
        self._events.emit(GroupDropped(number=group.number, reason=self._drops.reason))
        if counts[MEDIA_FAULTS]:
            self._drops.media_fault(self._batch.iteration, [self._drops.reason], self._batch.quota.target)
        self._drops.check_some_work()
