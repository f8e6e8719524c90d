"""Recorded samples of one controller: real sampler, files and writer thread; engines answer at once."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, rows
from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_sampling import Bench, Make, by_length, tokens_of
from yatt.adapters.run_folder.attempt_claim import newest_attempt
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.recording import MOST_FAILED, MOST_WAITING
from yatt.control.rollouts.scoring.subject import Judged
from yatt.errors import ConfigError
from yatt.obs.metrics import STEP
from yatt.obs.rollouts import RecordedIteration, read_iteration
from yatt.records import message as m

ALL = {"logging": {"rollouts": "all", "rollouts_keep": 2}}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(*arguments: Any, **settings: Any) -> Bench:
        made.append(Bench(tmp_path, *arguments, **{**ALL, **settings}))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def answers(_: str, sample: m.SampleRequest) -> m.Completed:
    return completion(sample, tokens_of(sample))


async def iterate(bench: Bench, iteration: int, target: int = 1) -> None:
    """Samples an iteration, and trains on it."""
    found = await bench.advance(iteration, target)
    facts = [fact for group in found.groups for fact in group.samples]
    advantages = {fact.sample_id: fact.reward - 1.5 for fact in facts}
    bench.sampler.record({group.number for group in found.groups}, iteration, advantages)
    bench.trained(found, iteration)


def recorded(bench: Bench, iteration: int, sample: int | None = None) -> RecordedIteration:
    assert bench.writers.rollouts.flush(HANG_S)
    found = read_iteration(bench.node.paths, iteration, sample)
    assert found is not None
    return found


def events(bench: Bench, kind: str) -> list[dict[str, Any]]:
    return [each for each in map(json.loads, bench.lines) if each["kind"] == kind]


def test_every_sample_of_an_iteration_is_recorded_with_all_that_is_known_about_it(make: Make) -> None:
    bench = make(answers)
    asyncio.run(iterate(bench, 1, target=2))
    found = recorded(bench, 1)
    assert found.is_whole and found.attempt == 1
    assert [each["sample"] for each in found.samples] == [0, 1, 2, 3]
    one = recorded(bench, 1, 3).samples[0]
    assert (one[STEP], one["group"], one["index"], one["num_tokens"]) == (1, 1, 1, 2)
    assert (one["scores"], one["reward"], one["advantage"]) == ({"digits": 2.0}, 2.0, 0.5)
    assert one["policy_versions"] == [[0, 2]] and not one["is_carried"] and not one["is_truncated"]
    assert one["prompt"] == rows(bench.node.paths.root / "train.jsonl")[one["row"]]["prompt"]
    assert one["data_source"] == "sum" and one["finish_reason"] == "stop" and one["completion"]


def test_a_dropped_group_is_recorded_with_the_reason(make: Make) -> None:
    def answer(_: str, sample: m.SampleRequest) -> m.Completed:
        is_flat = int(sample.request_id.split("/")[1]) == 0
        return completion(sample, [5] if is_flat else tokens_of(sample))

    bench = make(answer, algorithm={"filter_groups": True})
    asyncio.run(iterate(bench, 1))
    found = {each["sample"]: each for each in recorded(bench, 1).samples}
    assert found[0]["dropped"] == "all its rewards are equal" and found[0]["advantage"] is None
    assert found[2]["dropped"] == "" and found[2]["advantage"] is not None


def test_a_failed_sample_is_recorded_with_its_failure(make: Make) -> None:
    failing: list[str] = []

    async def fails_on_one_prompt(order: m.Score) -> m.Message:
        if not failing:
            failing.append(order.prompt)
        if order.prompt == failing[0]:
            return m.Failed(error="no number in it", exit_code=2)
        return await by_length(order)

    bench = make(answers, fails_on_one_prompt)
    asyncio.run(iterate(bench, 1))
    failed = [each for each in recorded(bench, 1).samples if each["failed"]]
    assert failed and all("no number in it" in each["failed"] and each["reward"] is None for each in failed)


@pytest.mark.parametrize("rollouts", ["sample", "none"])
def test_samples_of_an_iteration_that_never_completes_are_there(make: Make, rollouts: str) -> None:
    """A few, at once, whatever else is recorded: the run ends before it has trained on anything."""

    async def fails(order: m.Score) -> m.Message:
        return m.Failed(error="compute_score failed: KeyError: 'label'", exit_code=2)

    bench = make(answers, fails, logging={"rollouts": rollouts})
    with pytest.raises(ConfigError, match="prompt groups all failed"):
        asyncio.run(iterate(bench, 1))
    assert bench.writers.lines.flush(HANG_S)
    found = read_iteration(bench.node.paths, 1)
    if rollouts == "none":
        assert found is None
        return
    assert found is not None and not found.is_whole
    assert len(found.samples) == MOST_FAILED
    assert all("KeyError: 'label'" in each["failed"] and each["dropped"] for each in found.samples)
    assert all(each["texts"]["prompt"] and each["texts"]["completion"] for each in found.samples)


def test_tokens_of_an_older_policy_are_named_and_the_sample_counts_as_carried(make: Make) -> None:
    bench = make(answers, run={"deterministic": False})

    async def two() -> None:
        await bench.advance(1, 2)
        await iterate(bench, 2, target=2)  # the groups of the first iteration were not trained on

    asyncio.run(two())
    assert all(each["is_carried"] for each in recorded(bench, 2).samples)


def test_answers_of_a_genrm_are_recorded_with_prompt_and_verdict(make: Make) -> None:
    bench = make(answers)

    async def judged() -> None:
        answers = bench.sampler._recorder.judged(0)
        shown = {"prompt": "1 + 1", "ground_truth": "2", "data_source": "sum", "completion": "3"}
        common = {"genrm": "judge", "shown": shown, "finish_reason": "stop"}
        assert answers is not None
        answers += [
            Judged(about=(0,), answer="hm", tries=1, verdict=None, **common),
            Judged(about=(0,), answer="bad", tries=2, verdict=m.Scored(score=0.25), **common),
            Judged(about=(1, 0), answer="2 1", tries=1, verdict=m.Scored(score=0, ranking=(1, 0)), **common),
            Judged(
                about=(0,),
                answer="{}",
                tries=1,
                criteria=("right",),
                **common,
                verdict=m.Scored(score=0, extra={"right": 1.0}),
            ),
        ]
        await iterate(bench, 1)

    bench.sampler._recorder._templates["judge"] = "{prompt} = {completion}?"
    asyncio.run(judged())
    first = recorded(bench, 1, 0).judged
    assert [(each["is_readable"], each["score"], each["ranking"], each["values"]) for each in first] == [
        (False, None, None, None), (True, 0.25, None, None), (True, None, [1, 0], None),
        (True, None, None, {"right": 1.0}),
    ]  # fmt: skip
    assert first[0]["prompt"] == "1 + 1 = 3?" and first[2]["samples"] == [1, 0]
    assert len(recorded(bench, 1, 1).judged) == 1


def test_only_the_newest_iterations_are_kept(make: Make) -> None:
    bench = make(answers)

    async def five() -> None:
        for iteration in range(1, 6):
            await iterate(bench, iteration)
            assert bench.writers.rollouts.flush(HANG_S)

    asyncio.run(five())
    assert sorted(path.name for path in bench.node.paths.rollouts.iterdir()) == [
        "000004.0.jsonl.gz", "000005.0.jsonl.gz"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_costs_the_records_and_nothing_else(make: Make) -> None:
    bench = make(answers)
    bench.node.paths.rollouts.write_text("not a folder")

    async def two() -> None:
        for iteration in (1, 2):
            await iterate(bench, iteration)
            assert bench.writers.rollouts.flush(HANG_S)
            await asyncio.sleep(0)  # the writer's report

    asyncio.run(two())
    lost = events(bench, "rollouts.lost")
    assert [(each["iteration"], each["samples"]) for each in lost] == [(1, 2), (2, 2)]


def test_iterations_that_a_slow_folder_would_keep_in_memory_are_lost(make: Make) -> None:
    bench, go_on = make(answers), threading.Event()
    bench.writers.rollouts.call(lambda: (go_on.wait(HANG_S), None)[1])

    async def more_than_wait() -> None:
        for iteration in range(1, MOST_WAITING + 2):
            await iterate(bench, iteration)
        go_on.set()

    asyncio.run(more_than_wait())
    assert [each["iteration"] for each in events(bench, "rollouts.lost")] == [MOST_WAITING + 1]
    assert recorded(bench, MOST_WAITING).is_whole


def test_a_stale_attempt_does_not_replace_the_records_of_a_newer_one(make: Make) -> None:
    bench = make(answers)
    bench.node.paths.claims.mkdir()
    (bench.node.paths.claims / "000002").write_text("")
    assert newest_attempt(bench.node.paths) == 2
    asyncio.run(iterate(bench, 1))
    assert bench.writers.rollouts.flush(HANG_S)
    assert not bench.node.paths.rollouts.exists()


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("sample", 3), ("all", 3)])
def test_a_few_samples_are_written_for_the_report_unless_none_are_wanted(
    make: Make, mode: str, count: int
) -> None:
    bench = make(answers, logging={"rollouts": mode, "samples_per_iteration": 3})
    asyncio.run(iterate(bench, 1, target=4))
    assert bench.writers.lines.flush(HANG_S)
    path = bench.node.paths.samples
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [each["sample"] for each in lines] == [0, 2, 4][:count]
    assert all(each["ground_truth"] is None and each["completion"] for each in lines)


def test_a_file_is_plain_lines_in_gzip(make: Make) -> None:
    bench = make(answers)
    asyncio.run(iterate(bench, 1))
    assert bench.writers.rollouts.flush(HANG_S)
    lines = gzip.decompress(bench.node.paths.rollout_file(1, 0).read_bytes()).splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["iteration", "sample", "sample"]


def test_answers_about_a_sample_that_is_sampled_again_are_not_recorded(make: Make) -> None:
    recorder = make(answers).sampler._recorder
    group = new_group(4, 0, "p", [1], 2)
    group.samples[1].extend(m.pack_ids([5]), m.pack_floats([-1.0]), 0)
    kept = recorder.judged(4)
    assert kept is not None
    shown = {"prompt": "p", "ground_truth": "", "data_source": "", "completion": ""}
    common = {"genrm": "judge", "shown": shown, "answer": "", "finish_reason": "stop", "tries": 1}
    kept += [Judged(about=about, verdict=None, **common) for about in ((0,), (1,), (0, 1))]
    recorder.restarted(group)
    assert [each.about for each in recorder.judged(4) or ()] == [(1,)]


def test_in_deterministic_mode_groups_after_the_last_trained_one_are_recorded_with_their_own_iteration(
    make: Make,
) -> None:
    """They are sampled again, and would otherwise be recorded twice."""
    bench = make(answers)
    recorder = bench.sampler._recorder

    async def two() -> None:
        later = new_group(9, 0, "p", [1], 2)
        later.samples[0].fail("no engine")
        recorder.dropped(1, later, None, "no engine")
        await iterate(bench, 1)
        await iterate(bench, 2)

    asyncio.run(two())
    for iteration in (1, 2):
        assert 9 not in {each["group"] for each in recorded(bench, iteration).samples}
