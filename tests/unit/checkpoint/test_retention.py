"""Deletion is crash-safe: a reader finds a checkpoint whole or not at all, and nothing stays behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.conftest import BUCKET
from tests.killed_store import Killed, KilledStore
from tests.runs import HANG_S
from tests.unit.checkpoint.test_manifest import manifest, started
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.retention import apply_retention, metric_values
from yatt.checkpoint.store.store import open_store
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.claims import Commit
from yatt.errors import StoreUnreachable
from yatt.obs.metrics import STEP


def filled(store, iterations=(1, 2, 3, 4, 5)):
    checkpoints = started(store)
    for iteration in iterations:
        checkpoints.commit(manifest(store, iteration))
    return checkpoints


def iterations_of(store):
    return [int(name[:8]) for name in store.names("manifests")]


def empty(store):
    for name in store.names(""):
        store.delete_folder(name)
        if store.size(name) is not None:
            store.delete(name)


def row(iteration, value):
    return {"training/global_step": iteration, "critic/rewards/mean": value}


def test_first_after_every_multiple_and_best_are_kept(store):
    checkpoints = filled(store, (2, 4, 6, 9, 11, 13, 14))
    policy = CheckpointSection(keep=1, keep_every=5, keep_best=1, best_metric="critic/rewards/mean")
    rows = [row(2, 0.1), row(4, 0.9), row(9, float("nan")), row(13, "Infinity"), row(14, 0.2)]
    assert apply_retention(checkpoints, policy, rows).iterations == [2, 9, 13]
    assert iterations_of(store) == [4, 6, 11, 14]


def test_a_metric_that_no_row_has_keeps_nothing_and_is_said(store):
    policy = CheckpointSection(keep=2, keep_best=2, best_metric="critic/reward/mean")
    removed = apply_retention(filled(store), policy, [row(1, 0.5)])
    assert removed.iterations == [1, 2, 3]
    assert removed.note == "no checkpoint's iteration has the metric critic/reward/mean"


def test_a_later_row_of_an_iteration_counts():
    rows = [row(1, 0.5), row(2, True), {"training/global_step": 3}, {"critic/rewards/mean": 4.0}, row(1, 2)]
    rows += [row(4, 10**400), row(5, -(10**400)), row(6, [1]), row(10**400, "1")]
    assert metric_values(rows, "critic/rewards/mean") == {1: 2.0}


def test_a_dry_run_only_says(store):
    checkpoints = filled(store)
    assert apply_retention(checkpoints, CheckpointSection(keep=2), dry_run=True).iterations == [1, 2, 3]
    assert iterations_of(store) == [1, 2, 3, 4, 5]


def test_what_is_in_flight_or_adopted_by_a_newer_start_stays(store):
    stale = filled(store, (1, 2))
    started(store, 2, after=Checkpoints(store, 0).read("manifests/00000001.000001.json"))
    stale.commit(manifest(store, 3))
    flying = manifest(store, 4)
    assert apply_retention(stale, CheckpointSection(keep=1), in_flight=4).iterations == []
    assert store.size(flying.files[0].path) == 10
    assert Checkpoints(store, 3).newest().manifest.iteration == 1


def test_without_a_whole_checkpoint_nothing_is_deleted(store):
    filled(store, (1, 2, 3))
    for iteration in (1, 2, 3):
        store.delete_folder(f"global_step_{iteration}")
    checkpoints = Checkpoints(store, 2)
    assert apply_retention(checkpoints, CheckpointSection(keep=1)).commits == ()
    assert iterations_of(store) == [1, 2, 3]


def test_the_newest_whole_checkpoint_stays_behind_damaged_ones(store):
    filled(store, (1, 2, 3, 4))
    for iteration in (3, 4):
        store.delete_folder(f"global_step_{iteration}")
    assert apply_retention(Checkpoints(store, 2), CheckpointSection(keep=1)).iterations == [1]
    assert Checkpoints(store, 2).newest().manifest.iteration == 2


def test_an_abandoned_save_of_this_attempt_is_removed_after_a_later_commit(store):
    checkpoints = filled(store, (1,))
    abandoned, flying = manifest(store, 2), manifest(store, 4)
    checkpoints.commit(manifest(store, 3))
    apply_retention(checkpoints, CheckpointSection(keep=2))
    assert store.size(abandoned.files[0].path) is None
    assert store.size(flying.files[0].path) == 10, "later than the newest commit: it may be in flight"


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("next_one", ["next attempt", "prune by hand"])
def test_a_deletion_killed_at_any_call_leaves_whole_checkpoints_and_is_completed(store, is_late, next_one):
    policy, at = CheckpointSection(keep=2), 0
    while True:
        empty(store)
        checkpoints = filled(store)
        checkpoints.store = KilledStore(store, at, is_late=is_late)
        try:
            apply_retention(checkpoints, policy)
        except Killed:
            pass
        else:
            break
        for name in store.names("manifests"):
            Checkpoints(store, 0).whole(f"manifests/{name}")
        assert iterations_of(store)[-2:] == [4, 5]
        later = Checkpoints(store, 2)
        if next_one == "next attempt":
            later.adopt(later.newest().manifest)
        apply_retention(later, policy)
        assert iterations_of(store) == [4, 5]
        assert store.names("") == sorted(
            ["adopted", "global_step_4", "global_step_5", "latest_checkpointed_iteration.txt", "manifests"]
        )
        at += 1
    assert at > 10, "the kills met something"


def test_a_deletion_that_the_store_refused_is_repeated_by_the_same_process(store):
    class Refusing:
        def __getattr__(self, name):
            return getattr(store, name)

        def delete_folder(self, folder):
            raise StoreUnreachable(f"{folder}: 503", is_passing=True)

    checkpoints, policy = filled(store), CheckpointSection(keep=2)
    checkpoints.leftovers.is_searched = True
    checkpoints.store = Refusing()
    with pytest.raises(StoreUnreachable):
        apply_retention(checkpoints, policy)
    assert iterations_of(store) == [2, 3, 4, 5]
    checkpoints.store = store
    assert apply_retention(checkpoints, policy).iterations == [2, 3]
    assert not checkpoints.leftovers.commits
    assert [name for name in store.names("") if name.startswith("global")] == [
        "global_step_4",
        "global_step_5",
    ]


def test_files_that_stay_are_named_and_tried_again(tmp_path):
    store = open_store(str(tmp_path / "run"), {})
    checkpoints = filled(store)
    checkpoints.store, real = KeepsFolders(store), store
    removed = apply_retention(checkpoints, CheckpointSection(keep=4))
    assert removed.note == "files of the deleted checkpoints 1 are still there"
    assert checkpoints.leftovers.commits == {Commit(1, 1)}
    checkpoints.store = real
    assert apply_retention(checkpoints, CheckpointSection(keep=4)).note == ""
    assert real.names("global_step_1") == []


def test_a_retention_waits_for_the_one_before_it(store):
    """A store so slow that the next commit comes before the files of the last one are deleted."""

    class Slow:
        def __init__(self):
            self.began, self.goes_on, self.looks = threading.Event(), threading.Event(), 0

        def __getattr__(self, name):
            return getattr(store, name)

        def names(self, folder):
            self.looks += folder == "manifests"
            return store.names(folder)

        def delete_folder(self, folder):
            self.began.set()
            assert self.goes_on.wait(HANG_S)
            store.delete_folder(folder)

    checkpoints, slow = filled(store), Slow()
    checkpoints.store = slow
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(apply_retention, checkpoints, CheckpointSection(keep=3))
        assert slow.began.wait(HANG_S)
        checkpoints.store = store
        checkpoints.commit(manifest(store, 6))
        checkpoints.store = slow
        second = pool.submit(apply_retention, checkpoints, CheckpointSection(keep=3))
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert slow.looks == 1, "the second has not looked yet"
        slow.goes_on.set()
        assert (first.result(20).iterations, second.result(20).iterations) == ([1, 2], [3])
    assert not checkpoints.leftovers.commits
    assert iterations_of(store) == [4, 5, 6]


class KeepsFolders:
    """As a folder that another process has open on NFS, or that belongs to somebody else."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def delete_folder(self, folder):
        pass


@pytest.mark.filterwarnings("ignore")
def test_unfinished_uploads_of_earlier_attempts_are_aborted_and_no_others(s3_endpoint, tmp_path):
    options = {"endpoint_url": s3_endpoint}
    url = f"s3://{BUCKET}/{tmp_path.name}"
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url, **options)
    bucket, prefix, _ = filesystem.split_path(root)
    names = ["global_step_3/000001-abababab/rank-0", "global_step_4/000002-cdcdcdcd/rank-0", "notes/of-mine"]
    keys = [f"{prefix}/{name}" for name in names] + [f"{prefix}-other/{names[0]}"]
    for key in keys:
        filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    assert abort_uploads(url, options, before=2) == 1
    left = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(keys[1:])
    assert abort_uploads(str(tmp_path), {}, before=2) == 0
    assert abort_uploads(f"memory://{tmp_path.name}", {}, before=2) == 0
    assert abort_uploads("s3://no-such-bucket/run", options, before=2) == 0


def test_rows_of_a_manifest_may_be_the_source_of_values(store):
    """Names of numbers that are not finite, as manifests have them, are no values."""
    made = msgspec.structs.replace(manifest(store, 2), row=row(2, "NaN"))
    assert metric_values([made.row], "critic/rewards/mean") == {}


def test_a_validation_with_many_failures_chooses_no_checkpoint():
    metric, share = "val-core/a/b/exact/mean@1", "val-aux/a/b/exact/failed_share"
    rows = [
        {STEP: 1, metric: 0.5, share: 0.0}, {STEP: 2, metric: 1.0, share: 0.2}, {STEP: 3, metric: 0.6},
        {STEP: 4, metric: 0.9}, {STEP: 4, metric: 0.9, share: 0.3},
    ]  # fmt: skip
    assert metric_values(rows, metric) == {1: 0.5, 3: 0.6}
    assert metric_values([{STEP: 2, "critic/rewards/mean": 1.0, share: 0.2}], "critic/rewards/mean") == {
        2: 1.0
    }
