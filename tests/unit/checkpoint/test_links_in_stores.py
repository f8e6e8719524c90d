"""Links, and folders in one another, in a store: passed over by name, and no way to others' files."""

import gc
import os
import shutil
import sys

import pytest

from tests.saved_weights import save
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.retention import apply_retention
from yatt.checkpoint.convert.hf_folder import copy_side_files
from yatt.checkpoint.store.store import FolderStore
from yatt.cli.main import main
from yatt.config.load import load_run_config
from yatt.config.sections.operation import CheckpointSection
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_origin


@pytest.fixture
def theirs(run, tmp_path):
    shutil.copytree(run.run_dir / "checkpoints", tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("what", ["global_step_1", "global_step_0", "save", "manifest"])
def test_links_do_not_keep_old_checkpoints_from_being_deleted(
    run, theirs, tmp_path, monkeypatch, capsys, what
):
    store, archive = theirs, tmp_path / "archive"
    save(FolderStore(store), run.folder / "policy", iteration=3)
    archive.mkdir()
    (archive / "chapter").write_text("years of work")
    place = {
        "manifest": store / "manifests" / "00000001.000001.json",
        "save": store / "global_step_0" / "000001-0123abcd",
    }.get(what, store / what)  # fmt: skip
    place.parent.mkdir(exist_ok=True)
    if place.exists():  # somebody has moved an old checkpoint to another disk
        place.rename(archive / place.name)
        place.symlink_to(archive / place.name)
    else:
        place.symlink_to(archive)
    before = sorted(archive.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["yatt", "ckpt", "list", str(store), "--store"])
    code, said = main(), capsys.readouterr().out
    assert code == 0 and all(f"\n{number:>9}  " in said for number in (1, 2, 3)), said
    apply_retention(Checkpoints(FolderStore(store), 2), CheckpointSection(keep=1))
    assert FolderStore(store).names("manifests") == ["00000003.000001.json"]
    assert not (store / "global_step_2").exists() and sorted(archive.rglob("*")) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # rmtree leaves listings open
def test_a_folder_without_end_in_depth_does_not_stop_a_deletion(tmp_path, monkeypatch):
    store, depth = FolderStore(tmp_path), 2 * sys.getrecursionlimit()
    monkeypatch.chdir(tmp_path)
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(tmp_path)
    store.delete_folder("d")
    gc.collect()
    os.chdir(tmp_path)
    _remove_chain(depth)


def _remove_chain(depth: int) -> None:
    """Removes what `shutil.rmtree` cannot: folders in one another."""
    levels = 0
    while os.path.isdir("d"):
        os.chdir("d")
        levels += 1
    for _ in range(levels):
        os.chdir("..")
        os.rmdir("d")
    assert levels <= depth


@pytest.mark.parametrize("harm", ["manifests", "adopted", "global_step_2", "no files"])
def test_an_origin_with_links_or_without_files_is_the_users_mistake(theirs, run, harm):
    if harm == "no files":
        for path in theirs.rglob("*.safetensors"):
            path.unlink()
    else:
        shutil.rmtree(theirs / "global_step_1")
        (theirs / harm).rename(theirs.parent / "moved")
        (theirs / harm).symlink_to(theirs.parent / "moved")
    config = load_run_config([run.folder / "run.yaml"], [f"run.from_checkpoint.url={theirs}"])
    with pytest.raises(ConfigError, match=r"run.from_checkpoint.*(is a link|is missing)"):
        check_origin(config)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_files_beside_a_models_weights_are_neither_waited_for_nor_endless(tmp_path, kind):
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    path = tmp_path / "from" / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match=r"tokenizer.json (cannot be read: is not a regular|has more than)"):
        copy_side_files(tmp_path / "from", tmp_path / "to", "float32")
