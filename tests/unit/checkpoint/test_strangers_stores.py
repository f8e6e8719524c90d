"""What a stranger's store says is a sentence, and never a way to another file."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.hostile_manifests import DEEP, sealed_fields
from tests.saved_weights import save
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, manifest_fault, read_manifest
from yatt.checkpoint.commit.ownership import claim_store
from yatt.checkpoint.commit.verifying import verify_checkpoint
from yatt.checkpoint.convert.copying import copy_to_store
from yatt.checkpoint.store.store import FolderStore
from yatt.cli.main import main
from yatt.config.load import load_run_config
from yatt.core.attempts import checkpoint_names as names
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError, ConfigError
from yatt.launch.checks.preflight import check_origin

NAME = "manifests/00000002.000001.json"


@pytest.fixture
def theirs(run, tmp_path):
    """A copy of the run's store, and things beside it."""
    shutil.copytree(run.run_dir / "checkpoints", tmp_path / "theirs")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "dot_profile").write_text("umask 022")
    return tmp_path / "theirs"


@pytest.fixture
def typed(monkeypatch, capsys):
    def type_(*words):
        monkeypatch.setattr(sys, "argv", ["yatt", *map(str, words)])
        code = main()
        said = capsys.readouterr()
        return code, said.out + said.err

    return type_


def rewrite(store: Path, change) -> dict:
    """Changes the manifest of iteration 2 and seals it again."""
    fields = json.loads((store / NAME).read_bytes())
    change(fields)
    (store / NAME).write_bytes(sealed_fields(fields))
    return fields


def with_path(path: str, *, size_bytes: int = 9, checksum: str | None = None):
    """Makes the manifest say that this is its first file."""

    def change(fields: dict) -> None:
        first = fields["files"][0]
        first |= {"path": path, "size_bytes": size_bytes, "tensors": []}
        if checksum is not None:
            first["checksum"] = checksum

    return change


def things(theirs: Path) -> tuple[str, str]:
    return (theirs.parent / "thesis" / "chapter").read_text(), (theirs.parent / "dot_profile").read_text()


@pytest.mark.parametrize("path", ["../dot_profile", "{folder}/dot_profile"])
def test_a_copy_never_writes_outside_of_its_target(theirs, typed, tmp_path, path):
    import xxhash

    theirs_profile, mine = b"curl evil", tmp_path / "home" / "copy"
    mine.mkdir(parents=True)
    (mine.parent / "dot_profile").write_text("umask 022")
    (tmp_path / "dot_profile").write_bytes(theirs_profile)
    sum_ = xxhash.xxh3_128_hexdigest(theirs_profile)
    rewrite(theirs, with_path(path.format(folder=tmp_path), checksum=sum_))
    code, said = typed("ckpt", "copy", theirs, mine, 2, "--store")
    assert (code, "is not named as this checkpoint's files are" in said) == (1, True), said
    assert (mine.parent / "dot_profile").read_text() == "umask 022"


@pytest.mark.parametrize(
    "path", ["../thesis/chapter", "top.safetensors", "global_step_1/x/rank-00000.safetensors"]
)
def test_a_copy_that_fails_deletes_nothing_of_others(theirs, typed, tmp_path, path):
    mine = tmp_path / "copy"
    assert typed("ckpt", "copy", theirs, mine, 1, "--store")[0] == 0
    (theirs / "top.safetensors").write_bytes(b"123456789")
    before = sorted(mine.rglob("*"))
    rewrite(theirs, with_path(path))
    assert typed("ckpt", "copy", theirs, mine, 2, "--store")[0] == 1
    assert sorted(mine.rglob("*")) == before
    assert things(theirs) == ("years of work", "umask 022")
    assert typed("ckpt", "verify", mine, 1, "--store")[0] == 0


@pytest.mark.parametrize("end", [KeyboardInterrupt, CheckpointError])
def test_an_interrupted_copy_leaves_what_was_there(theirs, tmp_path, end):
    target, source = FolderStore(tmp_path / "copy"), Checkpoints(FolderStore(theirs), 0)
    folder = source.read(NAME).files[0].path.rpartition("/")[0]
    others = [f"{folder}/node-00099.groups", "global_step_2/000001-00000000/rank-00000.safetensors"]
    for other in others:
        target.write(other, b"another's")

    def tick(_: int) -> None:
        raise end("now")

    with pytest.raises(end):
        copy_to_store(source, NAME, target, "copy", tick)
    assert target.names(folder) == ["node-00099.groups"]
    assert all(target.read(other) == b"another's" for other in others)


def test_a_file_without_end_is_damage_at_once(theirs, typed):
    (theirs.parent / "zeros").symlink_to("/dev/zero")
    rewrite(theirs, with_path("../zeros", size_bytes=1 << 50))
    for words in (["verify", theirs, 2], ["copy", theirs, theirs.parent / "copy", 2]):
        code, said = typed("ckpt", *words, "--store")
        assert (code, "'../zeros' is not named as this checkpoint's files are" in said) == (1, True), said


@pytest.mark.parametrize("kind", ["link", "zeros", "pipe", "folder"])
def test_special_files_are_neither_read_nor_waited_for(theirs, typed, kind):
    path = theirs / Checkpoints(FolderStore(theirs), 0).read(NAME).files[0].path
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "zeros" else theirs.parent / "dot_profile")
    why = "is a link, and none is followed" if path.is_symlink() else "is not a regular file"
    code, said = typed("ckpt", "verify", theirs, 2, "--store")
    assert (code, why in said) == (1, True), said
    for words in (["copy", theirs, theirs.parent / "copy", 2], ["export", theirs, 2, theirs.parent / "hf"]):
        more = ["--model", theirs.parent] if words[0] == "export" else []
        assert typed("ckpt", *words, *more, "--store")[0] in (1, 2)
    assert stat.S_IFMT(path.lstat().st_mode) and things(theirs) == ("years of work", "umask 022")


def test_a_linked_folder_is_no_way_to_delete_others_files(run, typed, tmp_path):
    shutil.copytree(run.folder, tmp_path / "mine", symlinks=True)
    folder = tmp_path / "mine" / "run"
    shutil.copytree(run.run_dir, folder, dirs_exist_ok=True)
    store, thesis = folder / "checkpoints", tmp_path / "thesis" / "000000-0123abcd"
    thesis.mkdir(parents=True)
    (thesis / "chapter").write_text("years of work")
    (store / "global_step_7").symlink_to(thesis.parent)
    with pytest.raises(CheckpointError, match="is a link, and none is followed"):
        FolderStore(store).delete_folder("global_step_7/000000-0123abcd")
    typed("ckpt", "prune", folder, "--keep", "1")
    assert (thesis / "chapter").read_text() == "years of work"


def test_what_was_not_written_by_yatt_is_no_save(theirs, tmp_path, run):
    from tests.unit.checkpoint.test_hf_export import opened
    from yatt.checkpoint.convert.from_hf import to_checkpoint

    other = tmp_path / "others"
    for name in ("global_step_1/actor/model.pt", "global_step_1/2024-results/table"):
        (other / name).parent.mkdir(parents=True)
        (other / name).write_text("another tool's")
    to_checkpoint(opened(run.folder / "policy"), FolderStore(other), "others", "r1", lambda _: None)
    assert (other / "global_step_1" / "actor" / "model.pt").exists()
    assert (other / "global_step_1" / "2024-results" / "table").exists()


def first_piece(fields: dict) -> dict:
    return fields["files"][0]["tensors"][0]


ABSURD = {
    "not named as this": with_path("x"),
    "is not named as this checkpoint's": lambda f: f.update(iteration=3),
    "its files are in several folders": lambda f: f["nodes"][0].update(
        path="global_step_2/000001-00000000/node-00000.groups"
    ),
    "it names a file twice": lambda f: f["files"].append(f["files"][0]),
    "cannot have": lambda f: f["files"][0].update(size_bytes=1 << 49),
    "has the unknown dtype 'int4'": lambda f: first_piece(f).update(dtype="int4"),
    "another number of dimensions": lambda f: first_piece(f).update(local_shape=[1]),
    "cannot have the shape": lambda f: first_piece(f).update(global_shape=[1 << 40, 1 << 40]),
    "has a part outside of its shape": lambda f: first_piece(f).update(global_offset=[1 << 40, 0]),
    "bytes of float32": lambda f: first_piece(f).update(size_bytes=7),
    "overlap others": lambda f: f["files"][0]["tensors"][1].update(begin=0),
    "has pieces of different tensors": lambda f: f["files"][0]["tensors"][2].update(
        key=first_piece(f)["key"]
    ),
    "its tensors end at byte": lambda f: f["files"][0].update(size_bytes=100),
    "length <= 512": lambda f: first_piece(f).update(key="a" * 513),
    "length <= 8": lambda f: first_piece(f).update(global_shape=[1] * 40),
    "`int` >= 0": lambda f: f["files"][0].update(size_bytes=-1),
    "`int` <= 1125899906842624": lambda f: first_piece(f).update(global_shape=[1 << 80, 1]),
    "nested too deeply": lambda f: f.update(common=DEEP),
    "the trainer's scalars cannot be read": lambda f: f.update(common={"scheduler": []}),
    "at `$.row[...]`": lambda f: f.update(row={"x": [1]}),
    "unknown field": lambda f: f.update(more=1),
}  # fmt: skip


@pytest.mark.parametrize("sentence", ABSURD)
def test_an_absurd_manifest_is_one_sentence(theirs, typed, sentence):
    rewrite(theirs, ABSURD[sentence])
    code, said = typed("ckpt", "verify", theirs, 2, "--store")
    assert (code, sentence in said) == (1, True), said
    for words in (["list", theirs], ["copy", theirs, theirs.parent / "copy", 2]):
        code, said = typed("ckpt", *words, "--store")
        assert sentence in said and "Traceback" not in said, said


def test_yatt_writes_nothing_that_it_would_refuse(theirs):
    manifest = Checkpoints(FolderStore(theirs), 0).read(NAME)
    assert manifest_fault(manifest) == ""
    store = FolderStore(theirs.parent / "new")
    claim_store(store, "new", "r1")
    checkpoints = Checkpoints(store, 1)
    checkpoints.adopt(None)
    wrong = msgspec.structs.replace(manifest, iteration=3)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 is not committed: its file .* is not named"):
        checkpoints.commit(wrong)


@pytest.mark.parametrize("harm", ["absurd", "no whole one"])
def test_a_run_that_would_start_from_it_is_refused_by_name(theirs, run, harm):
    for path in (theirs / "manifests").iterdir():
        path.write_bytes(
            b"{}"
            if harm == "no whole one"
            else sealed_fields(json.loads(path.read_bytes()) | {"common": DEEP})
        )
    config = load_run_config([run.folder / "run.yaml"], [f"run.from_checkpoint.url={theirs}"])
    with pytest.raises(
        ConfigError, match=r"run.from_checkpoint: no checkpoint in .* can be used: manifests/00000002"
    ):
        check_origin(config)


def policy_of(groups: list[dict]) -> SimpleNamespace:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = SimpleNamespace(param_groups=groups)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=10, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip
    return SimpleNamespace(optimizer=optimizer, scheduler=scheduler)


@pytest.mark.filterwarnings("ignore")
def test_a_trainers_scalars_are_taken_only_where_they_fit():
    from yatt.trainer.state.snapshot import _set_groups, _set_schedule

    group = {"params": [torch.zeros(1)], "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "lr": 0.5,
             "betas": (0.9, 0.99), "capturable": False}  # fmt: skip
    policy = policy_of([group])
    saved = {key: group[key] for key in ("wd_mult", "lr_mult", "is_decoupled_lr")}
    _set_groups(policy, [saved | {"lr": 1, "step": 3, "params": (0,), "fused": True, "betas": (0.1, 0.1)}])
    assert (group["lr"], group["step"], len(group["params"]), group["betas"]) == (1, 3, 1, (0.9, 0.99))
    assert "fused" not in group
    for wrong in ({"lr": "high"}, {"lr": True}, {"capturable": 1}, {"lr": None}):
        with pytest.raises(CheckpointError, match="the checkpoint's parameter group has"):
            _set_groups(policy, [saved | wrong])
    with pytest.raises(CheckpointError, match="has no parameter group"):
        _set_groups(policy, [])
    whole = policy.scheduler.state_dict() | {"num_steps": 4}
    _set_schedule(policy, whole)
    assert policy.scheduler.num_steps == 4
    for odd in ({}, {"num_steps": -1}, whole | {"num_steps": 1.5}, {"num_steps": 3}):
        with pytest.raises(CheckpointError, match="the checkpoint's schedule cannot be restored"):
            _set_schedule(policy, odd)


def test_names_are_read_as_they_are_written():
    for commit in (Commit(0, 0), Commit(7, 3), Commit(123456789, 1234567)):
        assert names.manifest_commit(names.manifest_name(commit)) == commit
        folder = names.save_folder(commit, "0123abcd")
        assert names.saved_commit(folder) == commit
        for path in (names.shard_path(folder, 3, 12), names.node_state_path(folder, 7)):
            assert names.path_fault(path, commit) == ""
            assert names.path_fault(path, Commit(commit.iteration + 1, commit.attempt))
        assert names.adoption_attempt(names.adoption_name(commit.attempt)) == commit.attempt
        assert names.step_iteration(names.step_folder(commit.iteration)) == commit.iteration
    others = ("manifests/1.1.json", "manifests/000000001.000001.json", "manifests/00000001.000001.json~", "",
              "manifests/\u0661\u0662000001.000001.json", "../manifests/00000001.000001.json")  # fmt: skip
    assert all(names.manifest_commit(other) is None for other in others)
    with pytest.raises(CheckpointError, match="is not a name of a manifest"):
        names.named_commit("manifests/1.1.json")


def test_what_was_read_needs_no_further_check(theirs):
    data = (theirs / NAME).read_bytes()
    assert isinstance(read_manifest(data, "here", ""), Manifest)
    with pytest.raises(CheckpointError, match="here: its content is not what was sealed"):
        read_manifest(data.replace(b'"config_hash":"test"', b'"config_hash":"tess"'), "here", "")


def test_saves_are_still_found(theirs, run):
    store = FolderStore(theirs.parent / "fresh")
    Checkpoints(store, 1).adopt(None)
    save(store, run.folder / "policy", iteration=3)
    assert (
        verify_checkpoint(Checkpoints(store, 0), "manifests/00000003.000001.json", lambda _: None).damages
        == ()
    )


@pytest.mark.parametrize("name", ["run_id", "adopted/000001.json", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_a_target_with_something_else_in_a_files_place_is_one_sentence(theirs, typed, tmp_path, name, kind):
    place = tmp_path / "mine" / name
    place.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        os.truncate(place, 1 << 40)
    code, said = typed("ckpt", "copy", theirs, tmp_path / "mine", 2, "--store")
    if name.startswith("latest"):  # a hint for others; the checkpoint exists without it
        assert code == 0, said
        return
    assert code in (1, 2) and said.count("\n") == 1 and f"{tmp_path}/mine" in said, said
    assert not list((tmp_path / "mine").rglob("*.safetensors"))


def test_an_owner_of_a_megabyte_is_not_repeated(theirs, typed, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run_id").write_text("x" * (1 << 20))
    code, said = typed("ckpt", "copy", theirs, tmp_path / "mine", 2, "--store")
    assert (code, "run_id has 1048576 bytes" in said, len(said) < 500) == (1, True, True), said[:500]


def test_a_failed_copy_leaves_what_another_is_writing(theirs, tmp_path):
    source, target = Checkpoints(FolderStore(theirs), 0), tmp_path / "copy"
    folder = target / source.read(NAME).files[0].path.rpartition("/")[0]

    def tick(_: int) -> None:
        (folder / ".rank-00099.safetensors.1.0123abcd").touch()
        raise CheckpointError("now")

    with pytest.raises(CheckpointError, match="now"):
        copy_to_store(source, NAME, FolderStore(target), "copy", tick)
    assert [path.name for path in folder.iterdir()] == [".rank-00099.safetensors.1.0123abcd"]


def test_a_thousand_damages_are_not_a_flood(theirs, typed):
    def add(fields: dict) -> None:
        empty = first_piece(fields) | {"begin": 0, "size_bytes": 0}
        empty |= {name: [0] for name in ("global_shape", "global_offset", "local_shape")}
        first = fields["files"][0]
        first["tensors"] = [empty | {"key": f"k{number}"} for number in range(1000)]

    rewrite(theirs, add)
    code, said = typed("ckpt", "verify", theirs, 2, "--store")
    assert (code, "more; --json lists all" in said, len(said) < 20_000) == (1, True, True), said[-300:]


def test_a_holders_note_of_a_megabyte_is_not_repeated(theirs):
    from yatt.checkpoint.commit.holders import check_held
    from yatt.errors import StoreTakenOver

    store = FolderStore(theirs)
    store.write("holders/000009.aaaaaaaaaaaa.json", b'{"host": "h", "folder": "' + b"x" * 900_000 + b'"}')
    with pytest.raises(StoreTakenOver, match="taken over by another folder") as caught:
        check_held(store, "000000000000", "r1")
    assert len(str(caught.value)) < 1000
