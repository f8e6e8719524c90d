"""From prompts to accepted prompt groups: real sampler, router, table of engines and scorer, no processes."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, RunFile, turns, until
from tests.unit.control.engine_stand_in import Answer, Engines, completion
from yatt.adapters.files.writer import BackgroundWriter
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes, rollout_sampling
from yatt.control.rollouts.groups.carried import frozen_state
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.node_groups import NodeGroups
from yatt.control.rollouts.recording import RolloutRecorder
from yatt.control.rollouts.router import Router
from yatt.control.rollouts.sampling import Sampler
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.writers import Writers
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.core.samples.prompts import num_extra
from yatt.errors import ConfigError, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

CallReward = Callable[[m.Score], Awaitable[m.Message]]
N = 2


async def by_length(order: m.Score) -> m.Message:
    """A reward process that scores the number of tokens."""
    return m.Scored(score=float(order.num_completion_tokens))


def tokens_of(sample: m.SampleRequest) -> list[int]:
    """One token more for each sample of a group, so that rewards differ."""
    index = int(sample.request_id.split("/")[2])
    return [5] * (index + 1)


class Bench:
    """One controller's sampling. Everything it has is real but engines and reward processes."""

    def __init__(
        self, folder: Path, answer: Answer, call_reward: CallReward = by_length, attempt: int = 1,
        num_samples: int = N, **settings: dict[str, Any],
    ) -> None:  # fmt: skip
        file = RunFile(folder, {"launch": {"nodes": 1}, **settings}).write()
        config = load_run_config([file], [f"rollout.n={num_samples}"])
        self.node = Node(
            config=config, paths=RunPaths(folder), placement=placement_of(config),
            attempt=attempt, index=0, host="",
            device="cpu",
        )  # fmt: skip
        self.lines: list[str] = []
        self.engines = Engines(answer)
        self.local = LocalEngines(self.engines, config)  # type: ignore[arg-type]
        self.engines.completed = self.local.completed
        router = Router(self.node, self.local, Peers(), Progress(int))
        judge = Judge(config, router.complete, router.abort, call_reward, num_nodes=1, say=print)
        scorer = Scorer(config, judge, score_sources(config, judge, call_reward))
        self.rows = RowFiles(config.data.train_files, config.data, folder / f"scratch-{attempt}")
        self.tokenizer = tokenizer = Tokenizer(config.model.path)
        shard = DataShard(config, self.rows, tokenizer)
        events = EventLog(attempt=1, node=0, role="controller", sink=self.lines.append)
        episodes = Episodes(self.node, tokenizer, router, call_reward, rollout_sampling(config))
        self.writer = BackgroundWriter()
        kept = KeptGroups(self.node, events, self.writer, data=self.rows.fingerprint, files="")
        groups = NodeGroups(self.node, shard, kept)
        self.writers = Writers(self.node)
        recorder = RolloutRecorder(self.node, scorer, tokenizer, events, self.writers)
        self.sampler = Sampler(self.node, groups, scorer, episodes, events, recorder)

    async def advance(self, iteration: int, target: int) -> c.Advanced:
        if not self.local.is_awake("engine.1"):
            await self.local.add("engine.1", ROLLOUT, self.node.slabs[0], 3)
        order = c.Advance(iteration=iteration, policy_version=iteration - 1, target=target, roles=(ROLLOUT,))
        await asyncio.wait_for(self.sampler.advance(order), HANG_S)
        return self.sampler.advanced(target)

    def trained(self, found: c.Advanced, iteration: int) -> None:
        """The batch that was reported has been trained on."""
        self.sampler.trained({group.number for group in found.groups}, iteration)

    def num_dropped(self) -> int:
        return sum('"rollout.group.drop"' in line for line in self.lines)

    def close(self) -> None:
        self.writer.close(HANG_S)
        self.writers.close()
        self.rows.close()


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(*arguments: Any, **settings: Any) -> Bench:
        made.append(Bench(tmp_path, *arguments, **settings))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def test_an_iteration_gets_its_target_and_every_sample_its_score(make: Make) -> None:
    bench = make(lambda _, sample: completion(sample, tokens_of(sample)))
    found = asyncio.run(bench.advance(1, 3))
    assert [group.number for group in found.groups] == [0, 1, 2]
    assert [[fact.reward for fact in group.samples] for group in found.groups] == [[1.0, 2.0]] * 3
    assert found.missing == 0
    assert found.counters["rollout/tokens"] == 3 * (1 + 2)
    assert {token for _, _, token in bench.engines.sent} == {3}, "under the engine's lease"


def test_a_group_whose_rewards_are_equal_is_replaced_where_that_is_asked_for(make: Make) -> None:
    def answer(_: str, sample: m.SampleRequest) -> m.Completed:
        is_flat = int(sample.request_id.split("/")[1]) % 2 == 0
        return completion(sample, [5] if is_flat else tokens_of(sample))

    bench = make(answer, algorithm={"filter_groups": True, "max_groups_opened_factor": 8})
    found = asyncio.run(bench.advance(1, 2))
    assert [group.number for group in found.groups] == [1, 3]
    assert found.counters["rollout/dropped_groups"] >= 2


@pytest.mark.parametrize("by", ["", "digits"])
def test_groups_that_are_all_right_differ_by_length_only_and_are_replaced_where_asked(
    make: Make, by: str
) -> None:
    """DAPO filters by accuracy, before the soft overlong punishment."""

    async def all_right_but_every_other_group(order: m.Score) -> m.Message:
        return m.Scored(score=float(order.num_completion_tokens > 1 or int(order.prompt[0]) % 2 == 0))

    bench = make(
        lambda _, sample: completion(sample, tokens_of(sample)), all_right_but_every_other_group,
        algorithm={
            "filter_groups": True, "filter_by": by, "max_groups_opened_factor": 8,
            "overlong_buffer_tokens": 8,
        },
    )  # fmt: skip
    found = asyncio.run(bench.advance(1, 4))
    rewards = [[fact.reward for fact in group.samples] for group in found.groups]
    differ_in_score = [max(each) - min(each) > 0.5 for each in rewards]
    assert all(differ_in_score) if by else not all(differ_in_score)
    assert bool(by) == bool(bench.num_dropped())
    reason = "all its rewards, or all its scores of digits, are equal"
    assert any(reason in line for line in bench.lines) == bool(by)


def test_the_first_groups_all_fail_and_the_run_ends_with_the_reason(make: Make) -> None:
    async def fails(order: m.Score) -> m.Message:
        return m.Failed(error="compute_score failed: ZeroDivisionError", exit_code=2)

    bench = make(lambda _, sample: completion(sample, [5]), fails)
    with pytest.raises(ConfigError, match=r"the first \d+ prompt groups all failed.*ZeroDivisionError"):
        asyncio.run(bench.advance(1, 4))


def test_what_machines_lost_ends_a_deterministic_run_instead_of_changing_it(make: Make) -> None:
    def lost(_: str, sample: m.SampleRequest) -> m.Completed:
        return replace_reason(completion(sample, []), m.LOST)

    bench = make(lost, rollout={"max_retries": 0})
    with pytest.raises(WorkerFailed, match="a lost sample would change the results"):
        asyncio.run(bench.advance(1, 2))


def replace_reason(answer: m.Completed, reason: str) -> m.Completed:
    return m.Completed(
        request_id=answer.request_id, token_ids=b"", logprobs=b"", finish_reason=reason, policy_version=0,
        error="the engine failed",
    )  # fmt: skip


def test_a_broken_off_sample_keeps_its_tokens_and_goes_on_from_them(make: Make) -> None:
    stuck = {"0/0/1/0"}

    def answer(_: str, sample: m.SampleRequest) -> m.Completed | None:
        asked = "/".join(sample.request_id.partition("#")[0].split("/"))
        return None if any(asked.endswith(each) for each in stuck) else completion(sample, tokens_of(sample))

    bench = make(answer, run={"deterministic": False})

    async def scene() -> c.Advanced:
        advancing = asyncio.ensure_future(bench.advance(1, 1))
        while not bench.engines.busy:
            await asyncio.sleep(0.01)
        await bench.sampler.break_off()
        first = await advancing
        assert first.missing == 1 and not first.groups
        stuck.clear()
        return await bench.advance(1, 1)

    found = asyncio.run(scene())
    assert [group.number for group in found.groups] == [0]
    again = [b for _, b, _ in bench.engines.sent if isinstance(b, m.SampleRequest)][-1]
    assert m.unpack_ids(again.prompt_ids)[-2:] == bench.engines.partial, "its prompt has the tokens it had"
    assert again.max_tokens == bench.node.config.rollout.max_response_tokens - 2


def test_completions_that_are_too_old_are_sampled_anew(make: Make) -> None:
    bench = make(
        lambda _, sample: completion(sample, tokens_of(sample)),
        run={"deterministic": False}, rollout={"max_policy_age": 0},
    )  # fmt: skip

    async def scene() -> c.Advanced:
        await bench.advance(1, 2)
        bench.sampler.restore(bench.sampler.state())  # another attempt, from a later checkpoint
        return await bench.advance(2, 2)

    found = asyncio.run(scene())
    assert found.counters["rollout/restarted_groups"] == 2
    assert found.counters["rollout/tokens"] == 2 * 2 * (1 + 2), "their completions are sampled anew"
    state = bench.sampler.state()
    assert not {group.number for group in state.accepted} & {group.number for group in state.unfinished}


def test_a_deterministic_checkpoint_begins_with_the_first_group_that_is_not_trained_on(make: Make) -> None:
    bench = make(lambda _, sample: completion(sample, tokens_of(sample)))
    for iteration, first in ((1, 0), (2, 2), (3, 4)):
        found = asyncio.run(bench.advance(iteration, 2))
        assert [group.number for group in found.groups] == [first, first + 1]
        assert bench.sampler.state().next_number == first, "also after groups were opened"
        bench.trained(found, iteration)
        assert bench.sampler.state().next_number == first + 2


def numbers_of(bench: Bench, kind: str) -> list[list[int]]:
    """Numbers of the groups in each event of this kind."""
    events = [json.loads(line) for line in bench.lines]
    return [e.get("numbers", [e.get("number")]) for e in events if e["kind"] == kind]


def test_an_oversampled_iteration_does_not_wait_for_its_longest_group_which_continues_first(
    make: Make,
) -> None:
    stuck = {"0/1/0"}

    def answer(_: str, sample: m.SampleRequest) -> m.Completed | None:
        asked = sample.request_id.partition("#")[0]
        return None if any(asked.endswith(each) for each in stuck) else completion(sample, tokens_of(sample))

    bench = make(answer, run={"deterministic": False}, rollout={"oversample": 1.5})

    async def scene() -> tuple[c.Advanced, c.Advanced]:
        first = await bench.advance(1, 2)
        bench.trained(first, 1)
        stuck.clear()
        return first, await bench.advance(2, 2)

    first, second = asyncio.run(scene())
    assert [group.number for group in first.groups] == [1, 2], "group 0 is not awaited"
    assert second.groups[0].number == 0
    assert max(second.groups[0].ages) == 1, "it has tokens of the policy before"
    assert numbers_of(bench, "rollout.group.open") == [[0, 1, 2], [3, 4]]
    asked = bench.engines.asked()
    assert len(asked) == len(set(asked)), "no request was made twice"
    again = next(
        b for _, b, _ in bench.engines.sent if isinstance(b, m.SampleRequest) and "0/1/2" in b.request_id
    )
    assert m.unpack_ids(again.prompt_ids)[-2:] == bench.engines.partial


@pytest.mark.parametrize("oversample", [1.0, 1.25, 2.0])
def test_nothing_more_is_opened_than_is_asked_for(make: Make, oversample: float) -> None:
    bench = make(
        lambda _, sample: completion(sample, tokens_of(sample)),
        run={"deterministic": False}, rollout={"oversample": oversample},
    )  # fmt: skip

    async def scene() -> None:
        for iteration in range(1, 6):
            found = await bench.advance(iteration, 4)
            assert found.missing == 0
            bench.trained(found, iteration)

    asyncio.run(scene())
    opened = [number for numbers in numbers_of(bench, "rollout.group.open") for number in numbers]
    assert opened == sorted(set(opened))
    assert len(opened) <= 5 * 4 + num_extra(4, oversample)


def test_a_batch_that_waits_for_training_counts_for_no_other(make: Make) -> None:
    """Each batch is begun before the one before it is trained on; surplus groups go to the next one."""
    bench = make(
        lambda _, sample: completion(sample, tokens_of(sample)),
        run={"deterministic": False}, rollout={"oversample": 1.25, "max_policy_age": 2},
    )  # fmt: skip

    async def scene() -> list[c.Advanced]:
        found = [await bench.advance(1, 4)]
        for iteration in range(2, 6):
            found.append(await bench.advance(iteration, 4))
            held = {group.number for group in bench.sampler.state().accepted}
            before = {group.number for group in found[-2].groups}
            assert before <= held, "a checkpoint has the batch that is not trained on yet"
            trained = bench.sampler.groups_of(before)
            assert [group.number for group in trained] == sorted(before)
            bench.trained(found[-2], iteration - 1)
            assert not before & {group.number for group in bench.sampler.state().accepted}
        return found

    batches = [[group.number for group in found.groups] for found in asyncio.run(scene())]
    numbers = [number for batch in batches for number in batch]
    assert [len(batch) for batch in batches] == [4] * 5
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)


def test_a_batch_that_is_whole_in_the_checkpoint_waits_for_no_group_of_the_next_one(make: Make) -> None:
    def answer(_: str, sample: m.SampleRequest) -> m.Completed | None:
        is_stuck = int(sample.request_id.split("/")[1]) >= 4
        return None if is_stuck else completion(sample, tokens_of(sample))

    settings = {"run": {"deterministic": False}, "rollout": {"max_policy_age": 2}}
    before, after = make(answer, **settings), make(answer, attempt=2, **settings)

    async def scene() -> c.Advanced:
        await before.advance(1, 4)
        advancing = asyncio.ensure_future(before.advance(2, 4))
        while len(before.sampler.state().unfinished) < 4:
            await asyncio.sleep(0.01)
        state = frozen_state(before.sampler.state())
        advancing.cancel()
        await asyncio.gather(advancing, return_exceptions=True)
        assert (len(state.accepted), len(state.unfinished)) == (4, 4)
        after.sampler.restore(state)
        return await asyncio.wait_for(after.advance(1, 4), HANG_S)

    found = asyncio.run(scene())
    assert [group.number for group in found.groups] == [0, 1, 2, 3]
    assert found.counters["rollout/tokens"] == 4 * (1 + 2), "in no row of the attempt before"


def test_a_group_is_cut_only_as_often_as_its_tokens_stay_young_enough(make: Make) -> None:
    """Group 0 is cut in the first iteration; the second one awaits it, with more than its target complete."""

    def answer(_: str, sample: m.SampleRequest) -> m.Completed | None:
        is_stuck = sample.request_id.startswith("node0/0/1/")
        return None if is_stuck else completion(sample, tokens_of(sample))

    bench = make(answer, run={"deterministic": False}, rollout={"oversample": 1.5})

    async def scene() -> c.Advanced:
        first = await bench.advance(1, 2)
        bench.trained(first, 1)
        advancing = asyncio.ensure_future(bench.advance(2, 2))
        await until(lambda: len(numbers_of(bench, "rollout.group.accept")) == 4, "the others to be complete")
        await turns()
        assert not advancing.done()
        (late,) = bench.engines.busy.values()
        del bench.engines.busy[late.request_id]
        bench.local.completed("engine.1", completion(late, [5, 6, 7]))
        return await advancing

    second = asyncio.run(scene())
    assert [group.number for group in second.groups] == [0, 3]
    assert "rollout/restarted_groups" not in second.counters
    assert second.counters["rollout/tokens"] == (1 + 5) + 2 * (1 + 2)


def test_a_data_epoch_of_weighted_files_is_as_long_as_its_order(make: Make) -> None:
    bench = make(completion)
    config = bench.node.config
    (file,) = config.data.train_files
    for weight in (1.0, 2.0, 0.5):
        data = replace(config.data, weights={file: weight})
        shard = DataShard(replace(config, data=data), bench.rows, bench.tokenizer)
        assert shard.num_rows == len(bench.rows) * weight
        assert [shard.data_epoch(number) for number in (0, shard.num_rows - 1, shard.num_rows)] == [0, 0, 1]
