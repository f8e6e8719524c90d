"""A checkpoint exists iff its manifest does and all it names is there."""

import random

import msgspec
import pytest

from yatt.checkpoint.commit.manifest import LATEST_HINT, Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, prefix_of, sealed_manifest
from yatt.checkpoint.commit.retention import apply_retention
from yatt.config.sections.operation import CheckpointSection
from yatt.errors import CheckpointError
from yatt.records.cluster import StateFile
from yatt.records.message import ShardFile

KEEP_TWO = CheckpointSection(keep=2)


def started(store, attempt=1, *, after=None):
    """A start's checkpoints, after it noted what it goes on from."""
    checkpoints = Checkpoints(store, attempt)
    checkpoints.adopt(after)
    return checkpoints


def manifest(store, iteration, *, mark="a", attempt=1):
    checkpoints = Checkpoints(store, attempt)
    path = f"{checkpoints.prefix(iteration)}/rank-00000.safetensors"
    store.write(path, b"x" * 10)
    return Manifest(
        iteration=iteration,
        attempt=attempt,
        config_hash=mark,
        files=(ShardFile(path=path, size_bytes=10, checksum="unchecked here"),),
        common=msgspec.Raw(b'{"scheduler":{"num_steps":1}}'),
        nodes=(),
    )


def test_the_newest_whole_checkpoint_is_found_and_the_hint_written(store):
    checkpoints = started(store)
    assert checkpoints.newest().manifest is None
    for iteration in (2, 10, 9):
        checkpoints.commit(manifest(store, iteration))
    found = checkpoints.newest()
    assert (found.manifest.iteration, found.skipped) == (10, ())
    assert bytes(found.manifest.common) == b'{"scheduler":{"num_steps":1}}'
    assert checkpoints.read(found.name).iteration == 10
    assert store.read(LATEST_HINT) == b"9\n"


@pytest.mark.parametrize(
    "harm", ["missing", "no state", "short", "garbage manifest", "future manifest", "older manifest"]
)
def test_a_torn_checkpoint_is_passed_over_with_a_reason(store, harm):
    checkpoints = started(store)
    checkpoints.commit(manifest(store, 1))
    second = manifest(store, 2)
    state = f"{prefix_of(second)}/node-00000.groups"
    store.write(state, b"state")
    newest = msgspec.structs.replace(second, nodes=(StateFile(path=state, size_bytes=5, checksum="ab"),))
    checkpoints.commit(newest)
    if harm == "missing":
        store.delete(newest.files[0].path)
    elif harm == "no state":
        store.delete(state)
    elif harm == "older manifest":
        store.write("manifests/00000002.000001.json", b'{"schema_version": 2, "nodes": [{"accepted": []}]}')
    elif harm == "short":
        store.write(newest.files[0].path, b"x" * 9)
    elif harm == "garbage manifest":
        store.write("manifests/00000002.000001.json", b'{"schema_version": 1, "iter')
    else:
        future = msgspec.structs.replace(newest, schema_version=99)
        store.write("manifests/00000002.000001.json", msgspec.json.encode(future))
    found = checkpoints.newest()
    assert found.manifest.iteration == 1
    says = {
        "missing": "is missing",
        "no state": f"{state} is missing",
        "older manifest": "has format 2, and this yatt reads format 5 only; an older yatt wrote it",
        "short": "9 bytes",
        "garbage manifest": "not a whole",
        "future manifest": "99",
    }
    assert len(found.skipped) == 1
    assert says[harm] in found.skipped[0]


def test_a_commit_names_only_what_is_there(store):
    checkpoints = started(store)
    absent = manifest(store, 3)
    store.delete(absent.files[0].path)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 is not committed: .* is missing"):
        checkpoints.commit(absent)
    assert checkpoints.newest().manifest is None


def test_a_commit_cannot_be_overwritten_but_may_be_repeated(store):
    checkpoints = started(store)
    first = manifest(store, 4)
    checkpoints.commit(first)
    checkpoints.commit(first)
    with pytest.raises(CheckpointError, match="committed already, with other content"):
        checkpoints.commit(manifest(store, 4, mark="b"))
    assert checkpoints.newest().manifest.config_hash == "a"


def test_only_superseded_checkpoints_are_removed(store):
    checkpoints = started(store)
    for iteration in (1, 2, 3):
        checkpoints.commit(manifest(store, iteration))
    assert apply_retention(checkpoints, KEEP_TWO).iterations == [1]
    assert store.names("manifests") == ["00000002.000001.json", "00000003.000001.json"]
    assert store.names("global_step_1") == []
    assert checkpoints.newest().manifest.iteration == 3


def test_what_a_ghost_commits_after_another_start_went_on_is_refused(store):
    stale = started(store)
    stale.commit(manifest(store, 1))
    heir = started(store, 2, after=stale.newest().manifest)
    stale.commit(manifest(store, 2))
    stale.commit(manifest(store, 3))
    found = Checkpoints(store, 3).newest()
    assert (found.manifest.iteration, found.manifest.attempt) == (1, 1)
    assert found.stale == ("manifests/00000002.000001.json", "manifests/00000003.000001.json")
    heir.commit(manifest(store, 2, attempt=2))
    found = Checkpoints(store, 3).newest()
    assert (found.manifest.iteration, found.manifest.attempt) == (2, 2)


def test_keeping_house_removes_the_ghosts_leavings_and_nothing_of_the_lineage(store):
    stale = started(store)
    stale.commit(manifest(store, 1))
    heir = started(store, 2, after=stale.newest().manifest)
    stale.commit(manifest(store, 2))
    for iteration in (2, 3, 4):
        heir.commit(manifest(store, iteration, attempt=2))
    assert apply_retention(heir, KEEP_TWO).iterations == [1, 2, 2], "one is the stale attempt's"
    assert store.names("manifests") == ["00000003.000002.json", "00000004.000002.json"]
    assert store.names("global_step_2") == []
    assert Checkpoints(store, 3).newest().manifest.iteration == 4


def test_keeping_house_removes_what_a_killed_start_had_half_written(store):
    killed = started(store)
    killed.commit(manifest(store, 1))
    manifest(store, 2)
    heir = started(store, 2, after=killed.newest().manifest)
    heir.commit(manifest(store, 2, attempt=2))
    manifest(store, 3, attempt=2)
    manifest(store, 3, attempt=3)
    store.write("global_step_2/notes-of-mine/why.txt", b"mine")
    assert apply_retention(heir, KEEP_TWO).iterations == []
    assert len(store.names("global_step_1")) == 1
    assert [name[:6] for name in store.names("global_step_2")] == ["000002", "notes-"]
    assert [name[:6] for name in store.names("global_step_3")] == ["000002", "000003"], "may be at work"


def test_a_start_goes_on_from_one_checkpoint_only(store):
    checkpoints = started(store)
    checkpoints.adopt(None)
    checkpoints.commit(manifest(store, 1))
    started(store, 2, after=None)
    with pytest.raises(CheckpointError, match="attempt 2 went on from another checkpoint before"):
        Checkpoints(store, 2).adopt(manifest(store, 1))


def test_every_flipped_bit_of_a_manifest_is_refused(store):
    checkpoints, second = started(store), manifest(store, 2)
    state = f"{prefix_of(second)}/node-00000.groups"
    store.write(state, b"state")
    whole = msgspec.structs.replace(
        second, row={"training/global_step": 2, "actor/lr": 1.5e-06, "note": "a b"},
        nodes=(StateFile(path=state, size_bytes=5, checksum="ab"),),
    )  # fmt: skip
    checkpoints.commit(whole)
    name = checkpoints.newest().name
    data = store.read(name)
    assert checkpoints.read(name).row["actor/lr"] == 1.5e-06
    draw = random.Random(3)
    for bit in draw.sample(range(8 * len(data)), min(3000, 8 * len(data))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        store.write(name, bytes(flipped))
        with pytest.raises(CheckpointError, match="manifests/00000002"):
            checkpoints.read(name)


def test_a_manifest_under_another_name_is_refused(store):
    checkpoints = started(store)
    checkpoints.commit(manifest(store, 2))
    store.write("manifests/00000003.000001.json", store.read("manifests/00000002.000001.json"))
    found = checkpoints.newest()
    assert found.manifest.iteration == 2
    assert "holds iteration 2 of attempt 1, unlike its name" in found.skipped[0]


@pytest.mark.parametrize(
    "note", [b"{}", b"", b"[1]", b"\xff\x00", b'{"iteration":1}', b'{"iteration":"1","attempt":1}']
)
def test_a_damaged_note_of_what_was_adopted_neither_raises_nor_loses_the_commits_after_it(store, note):
    first = started(store)
    first.commit(manifest(store, 1))
    heir = started(store, 2, after=first.newest().manifest)
    store.write("adopted/000003.json", note)
    assert Checkpoints(store, 4).newest().manifest.iteration == 1
    heir.commit(msgspec.structs.replace(manifest(store, 2, attempt=2), parent=heir.parent))
    store.write("adopted/000002.json", note)
    found = Checkpoints(store, 4).newest()
    assert (found.manifest.iteration, found.manifest.attempt, found.stale) == (2, 2, ())


def test_a_seal_covers_what_it_seals_and_nothing_of_itself(store):
    whole = manifest(store, 2)
    assert sealed_manifest(whole) == sealed_manifest(msgspec.structs.replace(whole, seal="anything"))
    assert sealed_manifest(whole) != sealed_manifest(msgspec.structs.replace(whole, attempt=2))


def test_inputs_are_kept_and_a_manifest_of_an_older_yatt_has_none(store):
    checkpoints = started(store)
    plain = manifest(store, 1)
    checkpoints.commit(plain)
    assert b"inputs" not in store.read("manifests/00000001.000001.json"), "as older yatts wrote it"
    inputs = {"tokenizer": "ab12", f"rewards[{'x' * 1000}]": "cd34"}
    checkpoints.commit(msgspec.structs.replace(manifest(store, 2), inputs=inputs))
    found = checkpoints.newest().manifest
    assert (found.iteration, found.inputs) == (2, inputs)
