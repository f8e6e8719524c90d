"""Kept prompt groups of one controller: real sampler, files and writer thread; engines answer at once."""

import asyncio
import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runs import HANG_S, until
from tests.seeds import seed_of
from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_sampling import Bench, Make, by_length, tokens_of
from yatt.adapters.files.record_file import RecordWriter
from yatt.control.rollouts.groups import kept, kept_files
from yatt.control.rollouts.groups.groups import NodeState
from yatt.records import cluster as c, message as m


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(*arguments: Any, attempt: int = 1, **settings: Any) -> Bench:
        made.append(Bench(tmp_path, *arguments, attempt=attempt, **settings))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def answers(_: str, sample: m.SampleRequest) -> m.Completed:
    return completion(sample, tokens_of(sample))


def holding(*numbers: int):
    """Engines that do not complete samples of these prompts."""

    def answer(_: str, sample: m.SampleRequest) -> m.Completed | None:
        number = int(sample.request_id.partition("#")[0].split("/")[-3])
        return None if number in numbers else completion(sample, tokens_of(sample))

    return answer


class Held:
    """A reward process that does not score the samples of some prompts."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()

    async def __call__(self, order: m.Score) -> m.Message:
        while order.prompt in self.prompts:
            await asyncio.sleep(0.01)
        return await by_length(order)


def with_held(make: Make, numbers: list[int], answer: Any = None, **settings: Any) -> Bench:
    held = Held()
    bench = make(answer or answers, held, **settings)
    opened = (bench.sampler.shard.open(number)[0] for number in numbers)
    held.prompts = {group.prompt_text for group in opened if group is not None}
    return bench


def asked(bench: Bench) -> set[int]:
    return {int(each.split("/")[-3]) for each in bench.engines.asked()}


def events(bench: Bench, kind: str) -> list[dict[str, Any]]:
    return [each for each in map(msgspec.json.decode, bench.lines) if each["kind"] == kind]


async def killed(bench: Bench, iteration: int, target: int, num_kept: int) -> None:
    """Samples until `num_kept` groups are written, and ends there."""
    advancing = asyncio.ensure_future(bench.advance(iteration, target))
    folder = bench.node.paths.kept_groups
    size, is_there = 0, False
    while not is_there:
        await asyncio.sleep(0.02)
        files = kept_files.kept_files(folder)
        size = sum((folder / file.name).stat().st_size for file in files)
        is_there = len(events(bench, "rollout.group.accept")) + bench.num_dropped() >= num_kept and size > 0
    assert bench.writer.flush(HANG_S)
    advancing.cancel()
    await asyncio.gather(advancing, return_exceptions=True)


def told(advanced: c.Advanced) -> tuple[Any, ...]:
    return advanced.groups, advanced.missing, advanced.counters


def test_engines_are_asked_only_for_what_is_missing_and_the_report_is_the_same(make: Make) -> None:
    calm = make(answers, attempt=9)
    expected = asyncio.run(calm.advance(1, 6))
    asyncio.run(killed(with_held(make, [3]), 1, 6, num_kept=5))
    again = make(answers, attempt=2)
    found = asyncio.run(again.advance(1, 6))
    assert asked(again) == {3}
    assert told(found) == told(expected)
    numbers = {fact.number for fact in found.groups}
    both = (each.sampler.groups_of(numbers) for each in (again, calm))
    assert len({str([group.rollouts() for group in groups]) for groups in both}) == 1
    assert events(again, "groups.reuse")[0]["numbers"] == [0, 1, 2, 4, 5]


def flat_unless_odd(_: str, sample: m.SampleRequest) -> m.Completed:
    number = int(sample.request_id.partition("#")[0].split("/")[-3])
    return completion(sample, tokens_of(sample) if number % 2 else [5])


@pytest.mark.parametrize("held", [0, 2, 3, 5])
def test_dropped_groups_are_dropped_again_without_being_sampled(make: Make, held: int) -> None:
    settings = {"algorithm": {"filter_groups": True}}
    calm = make(flat_unless_odd, attempt=9, **settings)
    expected = asyncio.run(calm.advance(1, 3))
    asyncio.run(killed(with_held(make, [held], flat_unless_odd, **settings), 1, 3, num_kept=2))
    again = make(flat_unless_odd, attempt=2, **settings)
    found = asyncio.run(again.advance(1, 3))
    assert [g.number for g in found.groups] == [1, 3, 5]
    assert told(found) == told(expected)
    reused = {n for each in events(again, "groups.reuse") for n in each["numbers"]}
    assert asked(again) & reused == set() and held not in reused and reused


def test_without_deterministic_mode_all_that_was_opened_before_is_opened_again(make: Make) -> None:
    settings = {"run": {"deterministic": False}}
    asyncio.run(killed(make(holding(0, 1), **settings), 1, 6, num_kept=4))
    again = make(answers, attempt=2, **settings)
    found = asyncio.run(again.advance(1, 3))
    assert len(found.groups) == 3 and found.missing == 0
    assert asked(again) <= {0, 1}, "no other prompt is sampled"
    numbers = {g.number for g in again.sampler.state().accepted + again.sampler.state().unfinished}
    assert numbers == set(range(6)), "each once; what is beyond the target is carried over"


def test_a_group_of_a_carried_over_prompt_replaces_its_unfinished_one(make: Make) -> None:
    settings = {"run": {"deterministic": False}}
    first = make(holding(1), **settings)

    async def part() -> NodeState:
        advancing = asyncio.ensure_future(first.advance(1, 2))
        while not events(first, "rollout.group.accept"):
            await asyncio.sleep(0.01)
        await first.sampler.break_off()
        await advancing
        state = first.sampler.state()
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=NodeState)

    state = asyncio.run(part())
    assert [g.number for g in state.unfinished] == [1] and state.unfinished[0].samples[0].turns
    first.close()
    for file in kept_files.kept_files(first.node.paths.kept_groups):
        (first.node.paths.kept_groups / file.name).unlink()
    second = make(holding(3), attempt=2, **settings)
    second.sampler.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=NodeState))
    asyncio.run(killed(second, 1, 4, num_kept=2))
    assert asked(second) == {1, 2, 3}
    third = make(answers, attempt=3, **settings)
    third.sampler.restore(state)
    found = asyncio.run(third.advance(1, 4))
    assert [g.number for g in found.groups] == [0, 1, 2, 3]
    assert asked(third) == {3}


@pytest.mark.parametrize("change", ["weights", "iteration", "data", "settings", "attempt"])
def test_groups_of_anything_else_are_not_used(make: Make, change: str) -> None:
    asyncio.run(killed(with_held(make, [3]), 1, 6, num_kept=5))
    again = make(answers, attempt=1 if change == "attempt" else 2)
    if change == "weights":
        again.sampler.groups.kept.restored = "manifests/00000000.000001.json"
    data, files = again.sampler.groups.kept._inputs
    if change == "data":
        again.sampler.groups.kept._inputs = "others", files
    if change == "settings":
        again.sampler.groups.kept._inputs = data, "others"
    found = asyncio.run(again.advance(2 if change == "iteration" else 1, 6))
    assert len(found.groups) == 6 and asked(again) == set(range(6))
    passed = [each["reason"] for each in events(again, "groups.pass_over")]
    named = {"weights": "weights", "data": "data", "settings": "files"}
    assert passed == ([f"it is of other {named[change]}"] if change in named else [])


def test_a_group_of_another_prompt_text_is_not_used(make: Make, tmp_path: Path) -> None:
    """As after a change of the chat template, which no digest covers."""
    asyncio.run(killed(with_held(make, [3]), 1, 6, num_kept=5))
    again = make(answers, attempt=2)
    open_group = again.sampler.shard.open

    def changed(number: int) -> Any:
        group, row = open_group(number)
        return msgspec.structs.replace(group, prompt=b"\1\0\0\0"), row

    again.sampler.shard.open = changed
    asyncio.run(again.advance(1, 6))
    assert asked(again) == set(range(6))


def test_groups_that_wait_for_a_genrm_are_kept_and_scored_later(make: Make) -> None:
    """As in colocated placement: the GenRM's engines have GPUs only after the rollout."""
    bench = make(answers)
    names = bench.sampler._scorer.names
    bench.sampler._scorer.names = lambda roles=None: (*names(roles), *(("late",) if roles is None else ()))

    async def scene(of: Bench) -> None:
        assert (await of.advance(1, 3)).missing == 3
        assert of.writer.flush(HANG_S)

    asyncio.run(scene(bench))
    again = make(answers, attempt=2)
    found = asyncio.run(again.advance(1, 3))
    assert asked(again) == set() and [g.number for g in found.groups] == [0, 1, 2]
    assert found.counters["rollout/tokens"] == 3 * (1 + 2)


def test_files_are_removed_as_soon_as_no_attempt_can_use_them(make: Make) -> None:
    bench = make(answers)
    folder = bench.node.paths.kept_groups

    def iterations() -> list[int]:
        assert bench.writer.flush(HANG_S)
        return [file.iteration for file in kept_files.kept_files(folder)]

    async def scene() -> None:
        for iteration in range(1, 5):
            found = await bench.advance(iteration, 2)
            bench.trained(found, iteration)
            if iteration == 2:
                bench.sampler.groups.kept.saved(2)
            expected = {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 3, 4]}
            assert iterations() == expected[iteration], "the first one, one after a snapshot, the present one"
        await bench.advance(5, 2)
        assert iterations() == [1, 3, 5]

    asyncio.run(scene())


# ---- filesystems that fail ----------------------------------------------------------------------


def test_a_write_that_hangs_delays_nothing_and_takes_bounded_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(RecordWriter, "append", lambda *_: hung.wait(HANG_S))
    monkeypatch.setattr(kept, "MOST_WAITING_BYTES", 2000)
    bench = make(answers)

    async def scene() -> None:
        found = await bench.advance(1, 20)
        assert len(found.groups) == 20
        await until(lambda: events(bench, "groups.not_kept"), "the news")
        assert 0 < bench.sampler.groups.kept._writer.waiting_bytes <= 2000
        (said,) = events(bench, "groups.not_kept")
        assert said["iteration"] == 1 and "bytes wait to be written" in said["error"]

    asyncio.run(scene())
    hung.set()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_write_is_told_once_and_tried_again_unless_the_disk_is_full(
    make: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, failing, tries = os.pwrite, [True], list[int]()

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if failing[0]:
            tries.append(at)
            raise OSError(code, os.strerror(code))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    bench = make(answers)
    folder = bench.node.paths.kept_groups

    async def scene() -> None:
        assert len((await bench.advance(1, 4)).groups) == 4
        await until(lambda: len(tries) >= (3 if code == errno.EIO else 1), "it to be tried")
        await until(lambda: events(bench, "groups.not_kept"), "the news")
        failing[0] = False
        while not bench.writer.flush(0.0):
            await asyncio.sleep(0.05)
        assert [each["error"] for each in events(bench, "groups.not_kept")] == [
            f"OSError: [Errno {code}] {os.strerror(code)}"
        ]
        assert bench.sampler.groups.kept._writer.waiting_bytes == 0

    asyncio.run(scene())
    assert len(kept_files.kept_files(folder)) == (code == errno.EIO)
    again = make(answers, attempt=2)
    asyncio.run(again.advance(1, 4))
    assert asked(again) == (set() if code == errno.EIO else {0, 1, 2, 3})


def test_a_folder_that_does_not_answer_costs_a_limited_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(kept, "READ_S", 0.2)
    monkeypatch.setattr(kept_files, "kept_files", lambda _: hung.wait(HANG_S) and [])
    bench = make(answers)
    assert len(asyncio.run(bench.advance(1, 4)).groups) == 4
    (said,) = events(bench, "groups.pass_over")
    assert said["reason"] == "the run folder did not answer within 0.2 s"
    hung.set()


# ---- the reader ---------------------------------------------------------------------------------


def test_no_damage_to_a_file_raises_or_gives_another_group(make: Make) -> None:
    bench = make(answers)
    asyncio.run(bench.advance(1, 8))
    assert bench.writer.flush(HANG_S)
    folder = bench.node.paths.kept_groups
    (file,) = kept_files.kept_files(folder)
    data, draw = (folder / file.name).read_bytes(), random.Random(seed_of("YATT_FUZZ_SEED"))
    again = make(answers, attempt=2)
    search: list[kept_files.Search] = []
    monkey = pytest.MonkeyPatch()
    monkey.setattr(kept, "find_groups", lambda found: search.append(found) or kept_files.Found())
    asyncio.run(again.advance(1, 8))
    monkey.undo()
    assert again.writer.flush(HANG_S)
    for extra in kept_files.kept_files(folder):
        if extra != file:
            (folder / extra.name).unlink()
    search[0].is_over.clear()
    whole = kept_files.find_groups(search[0])
    assert sorted(whole.groups) == list(range(8)) and not whole.passed_over
    for _ in range(int(os.environ.get("YATT_FUZZ", "300"))):
        (folder / file.name).write_bytes(damaged(data, draw))
        found = kept_files.find_groups(search[0])
        assert all(each == whole.groups[number] for number, each in found.groups.items())


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Flips bits, cuts, repeats, moves or inserts."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        begin, end = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
        match draw.randrange(5):
            case 0:
                changed[begin : begin + 1] = bytes(
                    b ^ 1 << draw.randrange(8) for b in changed[begin : begin + 1]
                )
            case 1:
                del changed[begin:]
            case 2:
                changed[begin:begin] = changed[begin:end]
            case 3:
                del changed[begin:end]
            case 4:
                changed[begin:begin] = draw.randbytes(draw.randint(1, 50))
    return bytes(changed)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has another format"),
        (b"yatt kept groups 2\nrest", "it has the format of another version"),
        (kept_files.LINE, "its first record is damaged"),
        (kept_files.LINE + b"x" * 1000, "its first record is damaged"),
    ],
)
def test_a_file_of_something_else_is_passed_over_with_a_reason(
    make: Make, content: bytes, reason: str
) -> None:
    bench = make(answers, attempt=2)
    folder = bench.node.paths.kept_groups
    folder.mkdir()
    (folder / kept_files.KeptFile(1, 1, 0, 1).name).write_bytes(content)
    assert len(asyncio.run(bench.advance(1, 2)).groups) == 2
    assert [each["reason"] for each in events(bench, "groups.pass_over")] == [reason]


def test_a_folder_or_a_pipe_under_a_file_s_name_is_passed_over(make: Make) -> None:
    bench = make(answers, attempt=4)
    folder = bench.node.paths.kept_groups
    (folder / kept_files.KeptFile(1, 1, 0, 1).name).mkdir(parents=True)
    os.mkfifo(folder / kept_files.KeptFile(1, 2, 0, 1).name)
    assert len(asyncio.run(bench.advance(1, 2)).groups) == 2
    assert len(events(bench, "groups.pass_over")) == 2
