"""Turns prompts into accepted prompt groups: one controller's part of the rollout and score phases.

Each group is pursued by a task of its own, sample by sample, as far as the engines that are awake in
the phase allow; a completion is scored as soon as it is there. Groups whose rewards are all equal are
replaced (`algorithm.filter_groups`), groups beyond the target are carried over, groups broken off
keep their tokens.

In deterministic mode nothing that depends on timing survives: groups count in the order of their
numbers, and what was broken off is forgotten.
"""

import asyncio
import json
from collections import Counter
from functools import partial

from yatt.adapters.files import append_line
from yatt.adapters.thread_call import call_in_thread
from yatt.adapters.tokenizer import Tokenizer
from yatt.control.engines import ABORTED, Router
from yatt.control.groups import NodeState, PromptGroup, SampleState
from yatt.control.node import Node
from yatt.control.scoring import Scorer
from yatt.control.shard import DataShard
from yatt.core.placement import ROLLOUT
from yatt.core.prompts import Quota, first_number, sample_seed
from yatt.errors import ConfigError, DeadlineExceeded, WorkerFailed
from yatt.obs.events import EventLog
from yatt.obs.metrics import STEP
from yatt.records import cluster as c
from yatt.records import message as m
from yatt.records.message import pack_ids, unpack_floats, unpack_ids


class Sampler:
    """Prompt groups of one node, from opening to training.

    Args:
        router: asks the engines of a role.
    """

    def __init__(
        self, node: Node, shard: DataShard, scorer: Scorer, router: Router, events: EventLog
    ) -> None:
        self._node, self._shard, self._scorer = node, shard, scorer
        self._router, self._events = router, events
        self._tokenizer = Tokenizer(node.config.model.path)
        self._next_number = self._base_number = node.index
        self._accepted: dict[int, PromptGroup] = {}
        self._unfinished: dict[int, PromptGroup] = {}
        self._quota = Quota(target=0)
        self._policy_version = 0
        self._iteration, self._dropped, self._last_drop = 0, 0, ""
        self._breaking_off = False
        self.counters: Counter[str] = Counter()

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> NodeState:
        """This controller's part of a checkpoint."""
        if self._node.config.run.deterministic:
            return NodeState(next_number=self._base_number, accepted=[], unfinished=[])
        return NodeState(
            next_number=self._next_number,
            accepted=list(self._accepted.values()),
            unfinished=list(self._unfinished.values()),
        )

    def restore(self, state: NodeState) -> None:
        """Go on from `state`; the next number is moved up to this node's stripe."""
        owners = len(self._node.placement.owners)
        self._next_number = first_number(self._node.index, owners, at_least=state.next_number)
        self._base_number = self._next_number
        self._accepted = {group.number: group for group in state.accepted}
        self._unfinished = {group.number: group for group in state.unfinished}

    def chosen(self, target: int) -> list[PromptGroup]:
        """The accepted groups to train on: the oldest numbers, at most `target`."""
        return [self._accepted[number] for number in sorted(self._accepted)[:target]]

    def trained(self, numbers: set[int]) -> None:
        """Drop groups that were trained on; in deterministic mode also all that lies beyond them."""
        self._accepted = {n: g for n, g in self._accepted.items() if n not in numbers}
        owners = len(self._node.placement.owners)
        mine = {n for n in numbers if n % owners == self._node.index}
        if self._node.config.run.deterministic and mine:
            self._next_number = self._base_number = max(mine) + owners
            self._accepted, self._unfinished = {}, {}

    def show(self, numbers: set[int], iteration: int) -> None:
        """Keep a few of an iteration's completions, with their verdicts, for the report."""
        limit, weights = self._node.config.logging.samples_per_iteration, self._scorer.weights
        groups = [g for n, g in sorted(self._accepted.items()) if n in numbers]
        shown = [(g, s, r) for g in groups for s, r in zip(g.samples, g.rewards(weights), strict=True)]
        for group, sample, reward in shown[:: max(1, len(shown) // limit)][:limit] if limit else ():
            row = {
                STEP: iteration, "prompt": group.prompt_text, "completion": sample.text,
                "verdicts": sample.verdicts, "scores": sample.scores, "reward": reward,
                "ground_truth": self._shard.row(group.row).ground_truth,
            }  # fmt: skip
            append_line(self._node.paths.samples, json.dumps(row))

    # ---- one phase ------------------------------------------------------------------------------

    async def advance(self, order: c.Advance) -> None:
        """Open, sample and score until nothing moves any more with the engines of `order.roles`.

        Raises:
            ConfigError: so many groups were dropped that the target is out of reach.
        """
        self._breaking_off = False
        self._policy_version = order.policy_version
        may_open = ROLLOUT in order.roles
        factor = self._node.config.algorithm.max_groups_opened_factor
        self._quota = Quota(
            target=order.target, accepted=len(self._accepted), dropped=self._dropped,
            in_flight=len(self._unfinished),
            limit=max(order.target, int(order.target * factor)),
        )  # fmt: skip
        tasks = {self._pursue_later(group, order.roles) for group in self._unfinished.values()}
        try:
            while True:
                if may_open and not self._breaking_off:
                    tasks |= {self._pursue_later(group, order.roles) for group in await self._open()}
                if not tasks:
                    break
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if self._is_enough() and tasks:
                    await self.break_off()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if may_open and not self._breaking_off and self._quota.is_exhausted():
            raise self._out_of_reach()

    def advanced(self, target: int) -> c.Advanced:
        """What the leader needs to know afterwards; counters start again from zero."""
        weights = self._scorer.weights
        facts = tuple(
            c.GroupFact(number=g.number, samples=g.facts(weights), scores=g.mean_scores())
            for g in self.chosen(target)
        )
        counters = {name: float(n) for name, n in (self.counters + self._scorer.counters).items()}
        self.counters.clear()
        self._scorer.counters.clear()
        return c.Advanced(groups=facts, missing=target - len(facts), counters=counters)

    async def break_off(self) -> None:
        """Stop what is under way; completions come back as far as they are."""
        self._breaking_off = True
        await self._router.abort(ROLLOUT)

    def _is_enough(self) -> bool:
        """Whether the target is met, so that what is still in flight need not be waited for."""
        lowest_open = min(self._unfinished, default=None)
        met = len(self._accepted) >= self._quota.target
        if not self._node.config.run.deterministic or lowest_open is None:
            return met
        return sum(number < lowest_open for number in self._accepted) >= self._quota.target

    async def _open(self) -> list[PromptGroup]:
        """Open what the quota asks for. In threads: it may have to tokenise a whole data epoch."""
        opened: list[PromptGroup] = []
        skipped = 0
        while len(opened) < self._quota.num_to_open():
            group = await call_in_thread(partial(self._shard.open, self._next_number))
            self._next_number += len(self._node.placement.owners)
            if group is None:
                self.counters["rollout/too_long"] += 1
                skipped += 1
                self._check_some_fit(skipped)
            else:
                opened.append(group)
                self._unfinished[group.number] = group
        self._quota = self._quota.opened(len(opened))
        if opened:
            self._events.emit("rollout.group.open", numbers=[g.number for g in opened])
        return opened

    def _check_some_fit(self, skipped: int) -> None:
        """Raises ConfigError once a whole data epoch held no prompt that is short enough."""
        if skipped > self._shard.num_rows:
            limit = self._node.config.data.max_prompt_tokens
            raise ConfigError(
                f"every prompt of data.train_files is longer than data.max_prompt_tokens ({limit}); raise it."
            )

    def _pursue_later(self, group: PromptGroup, roles: tuple[str, ...]) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._pursue(group, roles))

    async def _pursue(self, group: PromptGroup, roles: tuple[str, ...]) -> None:
        await asyncio.gather(*(self._pursue_sample(group, sample, roles) for sample in group.samples))
        if group.failure() or (group.is_sampled() and group.is_scored(self._scorer.names())):
            self._resolve(group)

    async def _pursue_sample(self, group: PromptGroup, sample: SampleState, roles: tuple[str, ...]) -> None:
        if not sample.finish_reason and ROLLOUT in roles and not self._breaking_off:
            await self._sample(group, sample)
        if sample.finish_reason and not sample.failed:
            await self._scorer.score(group, sample, self._shard.row(group.row), roles)

    async def _sample(self, group: PromptGroup, sample: SampleState) -> None:
        if sample.spans and self._age(sample) > self._node.config.rollout.max_policy_age:
            sample.restart()
        section, have = self._node.config.rollout, sample.completion_ids
        request = m.Sample(
            token=0, request_id=f"{group.number}/{sample.index}/{len(have)}",
            prompt_ids=pack_ids(group.prompt_ids + have),
            seed=sample_seed(self._node.config.run.seed, group.number, sample.index, len(have)),
            temperature=section.temperature, top_p=section.top_p, top_k=section.top_k,
            max_tokens=section.max_response_tokens - len(have),
            stop=section.stop, ignore_eos=section.ignore_eos,
        )  # fmt: skip
        try:
            completed = await self._router.complete(ROLLOUT, request)
        except (WorkerFailed, DeadlineExceeded) as error:
            sample.failed = f"prompt {group.number}, sample {sample.index}: {error}"
            return
        if completed.finish_reason == "error":
            sample.failed = f"prompt {group.number}, sample {sample.index}: {completed.error}"
            return
        ids = unpack_ids(completed.token_ids)
        sample.extend(ids, unpack_floats(completed.logprobs), completed.policy_version)
        self.counters["rollout/tokens"] += len(ids)
        if completed.finish_reason != ABORTED:
            sample.finish_reason = completed.finish_reason
            sample.text = self._tokenizer.decode(sample.completion_ids)

    def _age(self, sample: SampleState) -> int:
        return self._policy_version - min(version for version, _, _ in sample.spans)

    def _resolve(self, group: PromptGroup) -> None:
        self._unfinished.pop(group.number, None)
        reason = group.failure()
        flat = not reason and group.is_flat(self._scorer.weights)
        if flat:
            self.counters["rollout/flat_groups"] += 1
        drop = bool(reason) or (flat and self._node.config.algorithm.filter_groups)
        self._quota = self._quota.resolved(accepted=not drop)
        if drop:
            self.counters["rollout/failed_groups" if reason else "rollout/dropped_groups"] += 1
            self._dropped, self._last_drop = self._dropped + 1, reason or "all its rewards are equal"
            self._events.emit("rollout.group.drop", number=group.number, reason=self._last_drop)
            return
        self._accepted[group.number] = group
        self._events.emit("rollout.group.accept", number=group.number)

    def _out_of_reach(self) -> ConfigError:
        quota = self._quota
        return ConfigError(
            f"{quota.dropped} of {quota.accepted + quota.dropped} prompt groups were dropped and "
            f"{quota.accepted} of {quota.target} accepted: too few to go on. The last was dropped because: "
            f"{self._last_drop}. The event log (rollout.group.drop) has all; mend the reward, or raise "
            "algorithm.max_groups_opened_factor."
        )
