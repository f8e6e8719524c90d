"""Prompt groups that are carried over, as files of a checkpoint: exact, dealt anew, and never half read."""

import random
import tracemalloc

import msgspec
import pytest
import xxhash

from yatt.checkpoint.store.store import FolderStore
from yatt.control.rollouts.groups import carried
from yatt.control.rollouts.groups.carried import frozen_state, read_state, write_state
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, SampleState
from yatt.core.attempts.checkpoint_names import node_state_path
from yatt.errors import CheckpointError
from yatt.records.message import MediaRef, PlacedMedia, Turn, pack_floats, pack_ids
from yatt.records.shards import StateFile


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


def group(number: int, *, tokens: int = 3) -> PromptGroup:
    draw = random.Random(number)
    samples = [
        SampleState(
            index=index,
            turns=[
                Turn(
                    pack_ids([draw.randrange(1000) for _ in range(tokens)]), is_sampled=True,
                    logprobs=pack_floats([-draw.random() for _ in range(tokens)]),
                    policy_versions=((number, 0, tokens),), finish_reason="stop",
                ),
                Turn(pack_ids([1]), media=(PlacedMedia(MediaRef("a.png", "00", 4, 3), 0, 1, (1, 2, 2)),)),
            ],
            observations=["said"],
            finish_reason="stop" if index else "", text="zwölf \x00", scores={"a": draw.random()},
            extras={"a/x": float("inf")}, verdicts={"g": "A"}, unmeasured={"b": "why"},
        )
        for index in range(2)
    ]  # fmt: skip
    return PromptGroup(
        number=number, row=number % 7, prompt_text="?", prompt=pack_ids([1, 2]), samples=samples
    )


def state(first: int, step: int, *, accepted: int, unfinished: int) -> NodeState:
    """Of one of `step` nodes."""
    numbers = range(first, first + step * (accepted + unfinished), step)
    groups = [group(number) for number in numbers]
    return NodeState(
        data="of these files", next_number=first + step * len(groups), accepted=groups[:accepted],
        unfinished=groups[accepted:],
        counters={number: {"rollout/tokens": number + 1} for number in (first, next(iter(numbers)) + 60)},
    )  # fmt: skip


def written(store, states):
    return tuple(write_state(store, node_state_path("p", i), one) for i, one in enumerate(states))


def test_every_node_gets_back_exactly_what_it_saved(store):
    states = [state(i, 3, accepted=4 - i, unfinished=i) for i in range(3)]
    files = written(store, states)
    assert [read_state(store, files, shard=i, num_shards=3) for i in range(3)] == states
    assert [store.size(file.path) for file in files] == [file.size_bytes for file in files]


@pytest.mark.parametrize("trainer_nodes", [1, 2])
def test_what_a_node_that_is_behind_has_not_opened_is_dealt_and_kept(store, trainer_nodes):
    files = written(store, [NodeState(next_number=number) for number in (30, 10, 5)])
    for _ in range(2):  # a second change deals what the first one had left
        shares = [read_state(store, files, shard=i, num_shards=trainer_nodes) for i in range(trainer_nodes)]
        left = sorted(number for share in shares for numbers in share.left for number in numbers)
        assert left == sorted([*range(5, 28, 3), *range(10, 28, 3)])
        assert {share.next_number for share in shares} == {28}
        files, trainer_nodes = written(store, shares), 3 - trainer_nodes


@pytest.mark.parametrize("trainer_nodes", [1, 2, 5])
def test_another_number_of_nodes_shares_out_all_groups_each_once(store, trainer_nodes):
    states = [state(i, 3, accepted=3 + i, unfinished=2 * i) for i in range(3)]
    files = written(store, states)
    shares = [read_state(store, files, shard=i, num_shards=trainer_nodes) for i in range(trainer_nodes)]
    for kind in ("accepted", "unfinished"):
        saved = [each for one in states for each in getattr(one, kind)]
        # as they were dealt when the leader held them all
        assert [getattr(share, kind) for share in shares] == [
            saved[i::trainer_nodes] for i in range(trainer_nodes)
        ]
    newest = max(each.number for one in states for each in (*one.accepted, *one.unfinished))
    assert {share.next_number for share in shares} == {max(one.next_number for one in states) - 2}
    assert all(share.next_number > newest - 3 for share in shares)
    assert {share.data for share in shares} == {"of these files"}
    counters = [(number, each) for share in shares for number, each in share.counters.items()]
    assert sorted(counters, key=str) == sorted(
        ((number, each) for one in states for number, each in one.counters.items()), key=str
    )


def test_no_flipped_bit_and_no_missing_end_is_read_as_a_state(store):
    (file,) = files = written(store, [state(0, 1, accepted=2, unfinished=1)])
    data = store.read(file.path)
    draw = random.Random(1)
    damaged = [data[:-1], b""]
    for bit in draw.sample(range(8 * len(data)), 300):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for each in damaged:
        store.write(file.path, each)
        with pytest.raises(CheckpointError, match="node-00000"):
            read_state(store, files, shard=0, num_shards=1)
    store.delete(file.path)
    with pytest.raises(CheckpointError, match="node-00000"):
        read_state(store, files, shard=0, num_shards=1)


def test_a_state_of_another_version_is_refused_by_name(store):
    header = msgspec.msgpack.encode({"version": 99, "next_number": 0, "num_accepted": 0, "num_unfinished": 0})
    data = len(header).to_bytes(4, "little") + header
    written_file = store.write_stream("f", lambda: [data])
    file = carried.StateFile(path="f", size_bytes=len(data), checksum=written_file.checksum)
    with pytest.raises(CheckpointError, match="f: has version 99, known are \\(4, 5, 6\\)"):
        read_state(store, [file], shard=0, num_shards=1)


def test_a_state_of_the_version_without_counters_can_be_read(store):
    whole = state(0, 1, accepted=1, unfinished=1)
    header = {"version": 4, "data": whole.data, "next_number": 2, "num_accepted": 1, "num_unfinished": 1}
    records = [msgspec.msgpack.encode(each) for each in (header, *whole.accepted, *whole.unfinished)]
    data = b"".join(len(each).to_bytes(4, "little") + each for each in records)
    file = carried.StateFile(
        path="f", size_bytes=len(data), checksum=store.write_stream("f", lambda: [data]).checksum
    )
    read = read_state(store, [file], shard=0, num_shards=1)
    assert (read.accepted, read.unfinished, read.counters) == (whole.accepted, whole.unfinished, {})


def test_what_happens_to_a_group_after_the_snapshot_is_not_in_it(store):
    now = state(0, 1, accepted=1, unfinished=1)
    before = msgspec.json.encode(frozen_state(now))
    snapshot = frozen_state(now)
    sample = now.unfinished[0].samples[0]
    sample.extend(pack_ids([5]), pack_floats([-1.0]), 9)
    sample.scores["late"] = 1.0
    sample.verdicts["late"] = "B"
    now.accepted[0].samples[1].restart()
    now.accepted.clear()
    assert msgspec.json.encode(snapshot) == before


def test_writing_and_reading_kept_state_hold_a_part_of_it_in_memory(store, monkeypatch):
    """160 groups of 80 kB; a piece of 256 kB at a time."""
    monkeypatch.setattr(carried, "FETCH_BYTES", 256 << 10)
    whole = NodeState(next_number=160, accepted=[group(i, tokens=5000) for i in range(160)], unfinished=[])
    tracemalloc.start()
    files = written(store, [whole])
    write_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    share = read_state(store, files, shard=3, num_shards=80)
    read_peak = tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert [each.number for each in share.accepted] == [3, 83]
    assert files[0].size_bytes > 12_000_000
    assert write_peak < 1_500_000
    assert read_peak < 1_500_000


@pytest.mark.parametrize("name", ["next_number", "num_accepted", "num_unfinished"])
@pytest.mark.parametrize("number", [-1, 1 << 51, (1 << 64) - 1])
def test_a_header_with_an_impossible_number_is_refused(store, name, number):
    numbers = {"version": 5, "next_number": 0, "num_accepted": 0, "num_unfinished": 0} | {name: number}
    data = msgspec.msgpack.encode(numbers)
    data = len(data).to_bytes(4, "little") + data
    store.write("x.groups", data)
    file = StateFile(path="x.groups", size_bytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))
    with pytest.raises(CheckpointError, match=rf"x.groups is not what was saved: .*{name}"):
        read_state(store, [file], shard=0, num_shards=1)
