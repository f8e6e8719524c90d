"""A checkpoint store belongs to one run: strangers are refused, and what they may do on purpose works."""

import hashlib
import json
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from tests.runs import RunFile, rows, yatt
from yatt.adapters.run_folder.ledger import STARTED, newest_attempt, write_record
from yatt.checkpoint.commit.holders import Holder, Place, check_held, hold_store
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.ownership import claim_store, store_owner
from yatt.checkpoint.commit.run_store import claimed_run_store, own_folder_id
from yatt.checkpoint.store.store import FolderStore, Store
from yatt.config.load import load_resolved, load_run_config
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.errors import EXIT_DO_NOT_RESTART, ConfigError, StoreTakenOver
from yatt.launch.folder.committed import await_committed
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.site_defaults import with_store
from yatt.obs.metrics import comparable_results

SMALL = {"launch": {"nodes": 1}, "optimizer": {"lr_decay_style": "constant"}}


def run_file(folder: Path, url: Path, *, iterations: int = 2, **run: Any) -> RunFile:
    return RunFile(folder, {
        **SMALL,
        "run": {"dir": str(folder / "run"), "deterministic": True, **run},
        "trainer": {"total_iterations": iterations},
        "checkpoint": {"save_every": 1, "keep": 2, "url": str(url)},
    })  # fmt: skip


def finished(run: RunFile, *arguments: str) -> str:
    done = yatt("run", str(run.write()), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(run: RunFile, *arguments: str) -> str:
    done = yatt("run", str(run.write()), *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def metrics(run: RunFile) -> list[dict[str, Any]]:
    return [comparable_results(row) for row in rows(run.run_dir / "metrics.jsonl")]


def model(run: RunFile) -> dict[str, bytes]:
    files = sorted((run.run_dir / "model").glob("*.safetensors"))
    return {name: t.numpy().tobytes() for file in files for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, Path]:
    """A finished run of two iterations, and its store."""
    folder = tmp_path_factory.mktemp("origin")
    run = run_file(folder, folder / "store")
    finished(run)
    return run, folder / "store"


@pytest.fixture
def untouched(origin):
    """The other run's store is as it was, whatever the test did."""
    before = tree(origin[1])
    yield
    assert tree(origin[1]) == before


@pytest.mark.slow
def test_a_fresh_run_with_anothers_store_is_refused_before_it_starts(origin, untouched, tmp_path) -> None:
    first, store = origin
    second = run_file(tmp_path, store, iterations=4, seed=7)
    said = refusal(second)
    owner = load_resolved(first.run_dir / "config.yaml").run.id
    assert f"checkpoint.url: {store} belongs to run {owner}; this run is r" in said
    assert f"write run.id: {owner}" in said
    assert f"write run.from_checkpoint.url: {store}" in said
    assert not second.run_dir.exists()


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_is_taken_over_by_its_id(origin, tmp_path) -> None:
    first, store = origin
    taken = tmp_path / "store"
    shutil.copytree(store, taken)
    run = run_file(tmp_path, taken, iterations=4)
    for name in ("policy", "train.jsonl", "reward.py"):
        source = first.folder / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    assert "belongs to run" in refusal(run)
    owner = (taken / "run_id").read_text().strip()
    finished(run, f"run.id={owner}")
    resumed = [e["iteration"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "attempt.resume"]
    assert resumed == [2]
    assert sorted(path.name for path in (run.run_dir / "attempts").iterdir()) == ["000002"]
    names = sorted(path.name for path in (taken / "manifests").iterdir())
    assert names == ["00000003.000002.json", "00000004.000002.json"]


@pytest.mark.slow
def test_the_whole_state_of_another_run_goes_on_as_it_would_have_gone_on_itself(
    origin, untouched, tmp_path
) -> None:
    _, store = origin
    calm = run_file(tmp_path / "calm", tmp_path / "calm-store", iterations=4)
    finished(calm)
    origin_of = {"url": str(store), "take": "state"}
    second = run_file(tmp_path / "new", tmp_path / "new-store", iterations=4, from_checkpoint=origin_of)
    finished(second)
    assert metrics(second) == metrics(calm)[2:]
    assert model(second) == model(calm)
    assert (tmp_path / "new-store" / "started_from").read_text() == "manifests/00000002.000001.json\n"
    manifests = sorted((tmp_path / "new-store" / "manifests").iterdir())
    ids = {json.loads(path.read_text())["run_id"] for path in manifests}
    assert ids == {load_resolved(second.run_dir / "config.yaml").run.id}
    assert ids.isdisjoint({store_owner(FolderStore(store))})


@pytest.mark.slow
def test_the_weights_of_a_named_checkpoint_start_a_run_at_iteration_0(origin, untouched, tmp_path) -> None:
    first, store = origin
    origin_of = {"url": str(store), "iteration": 2, "take": "weights"}
    second = run_file(tmp_path, tmp_path / "store", from_checkpoint=origin_of)
    second.settings["optimizer"] = {"lr": 0.0}
    finished(second)
    assert [row["training/global_step"] for row in metrics(second)] == [1, 2]
    assert model(second) == model(first), "with a learning rate of 0 the weights stay where they started"


@pytest.mark.slow
def test_a_checkpoint_to_start_from_that_is_not_there_is_said_before_the_start(
    origin, untouched, tmp_path
) -> None:
    _, store = origin
    origin_of = {"url": str(store), "iteration": 9}
    run = run_file(tmp_path, tmp_path / "store", from_checkpoint=origin_of)
    assert f"run.from_checkpoint: {store} has no checkpoint of iteration 9" in refusal(run)


def test_an_attempt_refuses_a_store_that_another_run_has_claimed_since(tmp_path) -> None:
    run = run_file(tmp_path, tmp_path / "store")
    config = completed_config(load_run_config([run.write()], []))
    paths = open_folder(config)
    claimed_run_store(config, paths.root, print)
    (tmp_path / "store" / "run_id").write_text("another\n")
    with pytest.raises(ConfigError, match="belongs to run another"):
        claimed_run_store(config, paths.root, print)


def test_concurrent_runs_claim_a_store_once_and_the_loser_leaves_no_folder(tmp_path) -> None:
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    second = completed_config(load_run_config([run_file(tmp_path / "b", tmp_path / "store").write()], []))
    assert open_folder(first).config.exists()
    with pytest.raises(ConfigError, match=f"belongs to run {first.run.id}"):
        open_folder(second)
    assert not (tmp_path / "b" / "run").exists()
    assert completed_config(first).run.id == first.run.id


def test_checkpoints_that_nobody_claimed_are_not_taken_for_ones_own(tmp_path) -> None:
    store = FolderStore(tmp_path)
    store.write("manifests/00000001.000001.json", b"{}")
    with pytest.raises(ConfigError, match="checkpoints that no run has claimed"):
        claim_store(store, str(tmp_path), "mine")
    assert store_owner(store) == ""


def test_two_users_runs_of_one_name_have_places_of_their_own_at_the_site(tmp_path) -> None:
    site = SiteConfig(checkpoint_url_prefix="s3://team/ckpt")
    urls = set()
    for user in ("ana", "ben"):
        run = RunFile(tmp_path / user, {"run": {"dir": str(tmp_path / user / "exp1")}})
        config = completed_config(load_run_config([run.write()], []))
        urls.add(with_store(config, site).checkpoint.url)
        assert with_store(replace(config), site).checkpoint.url in urls
    assert len(urls) == 2
    assert all(url.startswith("s3://team/ckpt/exp1-r") for url in urls)


def test_a_folder_whose_store_was_taken_over_commits_nothing_and_starts_nothing(tmp_path, capsys) -> None:
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    old = open_folder(first)
    store = claimed_run_store(first, old.root, print)
    write_record(old, 1, STARTED, {"committed": 0})
    at_work = Checkpoints(store, 1, first.run.id, own_folder_id(old, store))
    at_work.adopt(None)
    at_work.commit(manifest_of(first, store, iteration=1, attempt=1))
    assert "yatt:" not in capsys.readouterr().err

    second = replace(first, run=replace(first.run, dir=str(tmp_path / "b" / "run")))
    new = open_folder(second)
    said = capsys.readouterr().err
    assert (
        f"{new.root} takes the checkpoints in " in said
        and f"over from {old.root} of {socket.gethostname()}." in said
    )
    with pytest.raises(StoreTakenOver, match=f"was taken over by {new.root} of ") as caught:
        at_work.commit(manifest_of(first, store, iteration=2, attempt=1))
    assert caught.value.exit_code == EXIT_DO_NOT_RESTART
    assert at_work.newest().manifest.iteration == 1
    for begin in (lambda: claimed_run_store(first, old.root, print), lambda: open_folder(first)):
        with pytest.raises(StoreTakenOver):
            begin()
    claimed_run_store(second, new.root, print)
    assert open_folder(second) == new, "the new folder goes on, however often it is started"


def test_a_store_with_an_attempt_that_no_run_has_made_is_not_taken_over(tmp_path) -> None:
    """A start after it would have a number that no name has, so that its commits would be nobody's."""
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    store = claimed_run_store(first, open_folder(first).root, print)
    store.create("adopted/999999999999999.json", b'{"iteration":0,"attempt":0}')
    second = replace(first, run=replace(first.run, dir=str(tmp_path / "b" / "run")))
    with pytest.raises(ConfigError, match="has a record of attempt 999999999999999, which no run has made"):
        open_folder(second)
    assert claimed_run_store(first, Path(first.run.dir), print), "the first folder still holds it"


def test_a_folder_that_lost_its_id_is_known_by_its_place(tmp_path) -> None:
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    old = open_folder(first)
    claimed_run_store(first, old.root, print)
    write_record(old, 1, STARTED, {"committed": 0})
    known = old.folder_id.read_text()
    damaged = [partial(old.folder_id.write_bytes, bad) for bad in (b"", bytes(13), b"\xff" * 13, b"none")]
    for damage in (old.folder_id.unlink, *damaged):
        damage()
        claimed_run_store(first, old.root, print)
        assert old.folder_id.read_text() == known


def test_a_new_folder_of_the_same_path_on_another_machine_takes_over(tmp_path, monkeypatch) -> None:
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    old = open_folder(first)
    claimed_run_store(first, old.root, print)
    write_record(old, 1, STARTED, {"committed": 0})
    known = old.folder_id.read_text().strip()
    old.root.rename(tmp_path / "of-machine-a")
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-b")
    new = open_folder(first)
    assert new.root == old.root and new.folder_id.read_text().strip() != known
    with pytest.raises(StoreTakenOver, match=f"was taken over by {new.root} of machine-b"):
        check_held(FolderStore(tmp_path / "store"), known, first.run.id)


def test_a_folder_that_is_only_made_ready_takes_nothing_over_until_it_starts(tmp_path, capsys) -> None:
    """A job may wait for days, or be refused; the folder that has the store may go on meanwhile."""
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    old = open_folder(first)
    store = claimed_run_store(first, old.root, print)
    write_record(old, 1, STARTED, {"committed": 0})
    second = replace(first, run=replace(first.run, dir=str(tmp_path / "b" / "run")))
    new = open_folder(second, starts_now=False)
    check_held(store, own_folder_id(old, store), first.run.id)
    at_work = Checkpoints(store, 3, first.run.id, own_folder_id(old, store))
    at_work.adopt(None)
    at_work.commit(manifest_of(first, store, iteration=1, attempt=3))
    capsys.readouterr()

    assert await_committed(second, new.root, is_told=lambda: False, say=print, begins=True) == 1
    assert f"over from {old.root} of" in capsys.readouterr().err
    claimed_run_store(second, new.root, print)
    assert newest_attempt(new) == 3, "the next attempt is numbered above those of the other folder"
    with pytest.raises(StoreTakenOver):
        at_work.commit(manifest_of(first, store, iteration=2, attempt=3))
    with pytest.raises(StoreTakenOver):
        open_folder(first, starts_now=False)


def test_a_store_from_before_there_were_notes_belongs_to_the_folder_that_goes_on(tmp_path) -> None:
    first = completed_config(load_run_config([run_file(tmp_path / "a", tmp_path / "store").write()], []))
    old = open_folder(first)
    write_record(old, 1, STARTED, {"committed": 0})
    shutil.rmtree(tmp_path / "store" / "holders")
    old.folder_id.unlink()
    store = claimed_run_store(first, old.root, print)
    assert len(store.names("holders")) == 1


def test_concurrent_store_takeover_has_one_winner(tmp_path) -> None:
    store = FolderStore(tmp_path)
    hold_store(store, "a", Place("/a", "h"), takes_over=False)
    for folder_id in ("c", "b"):  # both have seen the first note only
        store.create(Holder(2, folder_id).name, b"{}")
    check_held(store, "c", "run")
    with pytest.raises(StoreTakenOver):
        check_held(store, "b", "run")


def manifest_of(config: RunConfig, store: Store, *, iteration: int, attempt: int) -> Manifest:
    return Manifest(
        iteration=iteration, attempt=attempt, run_id=config.run.id, config_hash="x", files=(),
        common=msgspec.Raw(b"{}"), nodes=(),
    )  # fmt: skip
