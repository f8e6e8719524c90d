"""Turns prompts into accepted prompt groups: one controller's part of the rollout and score phases.

Each group has its own task, which samples and scores it as far as the engines that are awake in the phase
allow. A completion is scored as soon as it is complete. Groups whose rewards are all equal are replaced
(`algorithm.filter_groups`), groups beyond the target are carried over, interrupted groups keep their tokens.

In deterministic mode nothing may depend on timing: groups count in the order of their numbers, and
interrupted groups are discarded.
"""

import asyncio

from yatt.adapters.inputs.dataset import Row
from yatt.adapters.net.crowd import Crowd
from yatt.control.node import Node
from yatt.control.rollouts.accepted import AcceptedGroups
from yatt.control.rollouts.counters import GroupCounters
from yatt.control.rollouts.episodes import Episodes
from yatt.control.rollouts.groups.drops import Drops
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, SampleState, groups_due
from yatt.control.rollouts.groups.kept_files import KeptGroup
from yatt.control.rollouts.groups.prompt_source import PromptSource, most_opened
from yatt.control.rollouts.recording import RolloutRecorder
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.phases.kept_groups import Share
from yatt.core.samples.lengths import key_of
from yatt.core.samples.prompts import InOrder, Quota, first_number, num_extra, opening_limit
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c


class Sampler:
    """Manages the prompt groups of one node, from opening to training.

    Args:
        episodes: extends samples.
    """

    def __init__(
        self, node: Node, source: PromptSource, scorer: Scorer, episodes: Episodes,
        events: EventLog, recorder: RolloutRecorder,
    ) -> None:  # fmt: skip
        self._node, self._scorer = node, scorer
        self._source, self.shard, self.kept = source, source.shard, source.kept
        self._episodes, self._events, self._recorder = episodes, events, recorder
        self._policy_version, self._iteration, self._num_shards = 0, 0, len(node.placement.trainer_nodes)
        self._next_number = self._base_number = node.index
        self._accepted, self._unfinished = AcceptedGroups(), dict[int, PromptGroup]()
        self._rows: dict[int, Row] = {}  # of current groups, by number of the group
        self._due, self._sampled = set[int](), set[int]()  # to complete now; without scores only
        self._quota, self._in_order, self._counters = Quota(target=0), InOrder((), ()), GroupCounters()
        self._drops, self._breaking_off = Drops(node.config.algorithm.filter_by), False

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> NodeState:
        """Returns this controller's part of a checkpoint."""
        if self._node.config.run.deterministic:
            return NodeState(data=self.shard.fingerprint, next_number=self._base_number)
        return NodeState(
            data=self.shard.fingerprint, next_number=self._next_number, accepted=self._accepted.every(),
            unfinished=list(self._unfinished.values()), counters=self._counters.every(),
        )  # fmt: skip

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`; the next number is moved up to this node's data shard.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self.shard.check_fingerprint(state.data)
        self._next_number = first_number(self._node.index, self._num_shards, at_least=state.next_number)
        self._base_number = self._next_number
        if state.next_number:
            self._drops.worked_before()
        self._accepted, self._counters = AcceptedGroups(state.accepted), GroupCounters(state.counters)
        self._unfinished = {group.number: group for group in state.unfinished}

    def restored(self, weights: str) -> None:
        """Notes the identity of the weights that this attempt has restored."""
        self.kept.restored = weights

    def saved(self, iteration: int) -> None:
        """Notes that a snapshot of this iteration was taken."""
        self.kept.saved(iteration)

    def groups_of(self, numbers: set[int]) -> list[PromptGroup]:
        """Returns this node's groups of a batch."""
        return self._accepted.of(numbers)

    def trained(self, numbers: set[int], iteration: int) -> None:
        """Drops groups that were trained on; in deterministic mode also all later groups."""
        self._accepted.trained(numbers, iteration)
        self._counters.trained(iteration)
        self._rows = {n: row for n, row in self._rows.items() if n not in numbers}
        mine = {n for n in numbers if n % self._num_shards == self._node.index}
        if self._node.config.run.deterministic and mine:
            self._next_number = self._base_number = max(mine) + self._num_shards
            self._accepted, self._unfinished, self._rows = AcceptedGroups(), {}, {}
            self._counters.clear()

    def record(self, numbers: set[int], iteration: int, advantages: dict[int, float]) -> None:
        """Records groups that were trained on, for people; call it before `trained`."""
        self._recorder.trained(iteration, self._accepted.of(numbers), self._rows, advantages)

    # ---- one phase ------------------------------------------------------------------------------

    async def advance(self, order: c.Advance) -> None:
        """Opens, samples and scores groups until the engines of `order.roles` have no more work.

        Raises:
            ConfigError: so many groups were dropped that the target is out of reach, or all of them failed.
            WorkerFailed: the same, and the user's code is not the cause.
        """
        self._breaking_off = False
        if order.iteration != self._iteration:
            self._begin_iteration(order)
            await self._use_kept(order)
        may_open, config = ROLLOUT in order.roles, self._node.config
        self._quota = Quota(
            target=order.target, accepted=len(self._accepted), dropped=self._quota.dropped,
            in_flight=len(self._unfinished), is_patient=config.run.deterministic,
            limit=opening_limit(order.target, config.algorithm.max_groups_opened_factor),
            extra=num_extra(order.target, config.rollout.oversample), acceptance=self._quota.acceptance,
        )  # fmt: skip
        self._in_order = InOrder(dict(self._accepted.waiting()), self._unfinished)
        await self._until_nothing_moves(order.roles, may_open=may_open)
        if may_open and not self._breaking_off and self._quota.is_exhausted():
            raise self._drops.out_of_reach(self._quota)

    async def _until_nothing_moves(self, roles: tuple[str, ...], *, may_open: bool) -> None:
        """Runs one task per group; after the end of each one, others may be opened."""
        if self._is_enough(roles):
            return  # the batch is complete in the checkpoint, or by surplus groups
        crowd = Crowd()
        for group in list(self._unfinished.values()):
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
        self._accepted.take_reported()
        self._iteration, now = order.iteration, order.policy_version
        self._policy_version, oldest = now, now - self._node.config.rollout.max_policy_age
        self._recorder.begin(order.iteration, now)
        self._drops.begin_iteration()
        self._quota = Quota(target=order.target, acceptance=self._quota.acceptance)
        for number, group in [*self._accepted.waiting(), *self._unfinished.items()]:
            if group.restart_older(oldest, now):
                self._recorder.restarted(group)
                self._counters.of(number)["rollout/restarted_groups"] += 1
                self._accepted.remove(number)
                self._unfinished[number] = group
        self._sampled = {n for n, group in self._unfinished.items() if group.is_sampled()}
        self._due = groups_due(self._unfinished, now, now - oldest)

    def advanced(self, target: int) -> c.Advanced:
        """Returns the report to the leader about this phase; resets the counters."""
        scorer, now = self._scorer, self._policy_version
        chosen = self._accepted.report(self._iteration, target)
        facts = tuple(group.fact(scorer.weights, scorer.shaping, now) for group in chosen)
        # In deterministic mode only up to the last chosen group: sampling beyond it depends on timing.
        last = max((f.number for f in facts), default=-1) if self._node.config.run.deterministic else None
        counters = self._counters.take(self._iteration, self._unfinished, last)
        return c.Advanced(groups=facts, missing=target - len(facts), counters=counters)

    async def _use_kept(self, order: c.Advance) -> None:
        """Looks for groups that earlier attempts kept; those of unfinished prompts replace them at once."""
        most = most_opened(order.target, self._node.config.algorithm.max_groups_opened_factor)
        share = Share(
            shard=self._node.index, num_shards=self._num_shards, next_number=self._next_number, most=most,
            unfinished=frozenset(self._unfinished),
        )  # fmt: skip
        await self.kept.begin(order.iteration, share)
        found = {number: self.kept.like(group) for number, group in self._unfinished.items()}
        reused = {number: self._used(kept) for number, kept in found.items() if kept is not None}
        self._unfinished.update(reused)
        self._tell(sorted(reused), [])

    def _used(self, kept: KeptGroup) -> PromptGroup:
        """Returns the group, with its counters as if it had been sampled here."""
        self._counters.put(kept.group.number, kept.counters)
        return kept.group

    def _tell(self, reused: list[int], opened: list[int]) -> None:
        """Emits events about groups that are used again, and about new ones."""
        if reused:
            self._events.emit("groups.reuse", iteration=self._iteration, numbers=reused)
        if new := [number for number in opened if number not in reused]:
            self._events.emit("rollout.group.open", numbers=new)

    async def break_off(self) -> None:
        """Aborts requests in flight: completions keep their tokens, verdicts are asked for again later."""
        self._breaking_off = True
        await asyncio.gather(self._episodes.abort(), self._scorer.interrupt())

    def _is_enough(self, roles: tuple[str, ...]) -> bool:
        """Whether the batch can close now: enough groups are accepted (with oversampling: or waiting
        for a GenRM that sleeps in this phase), and closing discards no tokens."""
        if self._node.config.run.deterministic:
            return self._in_order.num_in_order() >= self._quota.target
        is_scored_later = ROLLOUT in roles and self._scorer.names(roles) != self._scorer.names()
        waits = self._sampled if is_scored_later else set[int]()
        if (self._due & self._unfinished.keys()) - waits:
            return False
        return self._quota.is_expected_from(len(waits) if self._quota.extra else 0)

    async def _open(self) -> list[PromptGroup]:
        """Opens the groups of the quota, in threads: a whole data epoch may have to be tokenised."""
        opened, reused, skipped = list[PromptGroup](), list[int](), 0
        self._episodes.expect(self._quota.num_to_open())
        while len(opened) < self._quota.num_to_open() or self._next_number <= self.kept.last:
            group, row, kept = await self._source.open(number := self._next_number)
            self._next_number += self._num_shards
            if group is None:
                self._counters.of(number)["rollout/too_long"] += 1
                skipped += 1
                self._source.check_some_fit(skipped)
                continue
            if kept is not None:
                group = self._used(kept)
                reused.append(number)
            opened.append(group)
            self._unfinished[number], self._rows[number] = group, row
            self._in_order.opened(number)
        self._quota = self._quota.opened(len(opened))
        self._episodes.expect(0)
        self._tell(reused, [group.number for group in opened])
        return opened

    async def _pursue(self, group: PromptGroup, roles: tuple[str, ...]) -> None:
        if group.number not in self._rows:  # carried over from an earlier attempt
            self._rows[group.number] = await self._source.row(group)
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
            self._sampled.add(group.number)
            await self._score_group(group, roles)
        if group.failure() or (group.is_sampled() and group.is_scored(self._scorer.names())):
            self._resolve(group)

    async def _score_group(self, group: PromptGroup, roles: tuple[str, ...]) -> None:
        if not self._breaking_off:
            subjects = [self._episodes.with_turns(self._subject(group, sample)) for sample in group.samples]
            await self._scorer.score_group(subjects, roles)
            self._recorder.scored(subjects[0])
        if group.failure() is None:
            self.kept.keep(group, self._counters.whole(group.number))

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
            group=group, sample=sample, row=self._rows[number], ref=self.shard.ref(group.row),
            counters=self._counters.of(number), judged=judged,
        )  # fmt: skip

    def _resolve(self, group: PromptGroup) -> None:
        if self._drops.is_hopeless:
            return  # another group has ended the run; later failures add no information
        self._unfinished.pop(group.number, None)
        self._sampled.discard(group.number)
        scorer, section = self._scorer, self._node.config.algorithm
        group.refuse_scoreless(scorer.weights)
        failed = group.failure()
        flat = failed is None and group.teaches_nothing(scorer.weights, scorer.shaping, section.filter_by)
        counts = self._counters.of(group.number)
        counts["rollout/flat_groups"] += int(flat)
        drop = failed is not None or (flat and section.filter_groups)
        if self._quota.extra:
            counts.update(key_of(s.num_tokens, "dropped" if drop else "accepted") for s in group.samples)
        self._quota = self._quota.resolved(accepted=not drop)
        self._in_order.resolved(group.number, accepted=not drop)
        self._drops.resolved(failed, is_dropped=drop)
        if not drop:
            self._accepted.add(group)
            self._events.emit("rollout.group.accept", number=group.number)
            return
        self._recorder.dropped(self._iteration, group, self._rows.pop(group.number, None), self._drops.reason)
        counts["rollout/failed_groups" if failed else "rollout/dropped_groups"] += 1
        self._events.emit("rollout.group.drop", number=group.number, reason=self._drops.reason)
        if counts["rollout/media_faults"]:
            self._drops.media_fault(self._quota.target)
        self._drops.check_some_work()
