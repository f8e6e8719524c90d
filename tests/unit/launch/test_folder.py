"""The run folder at the start: a stranger's folder is neither used nor changed."""

import argparse
import os
import pwd
import shutil
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
import zmq.auth

from tests.obs_runs import make_run
from yatt.adapters.net.curve import ENDS, make_keys
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.cli.commands.evaluating import _source_of_run
from yatt.cli.commands.look import status
from yatt.cli.sources import model_folder, run_source
from yatt.config.load import load_resolved, resolved_text
from yatt.config.sections.ranges import FILE
from yatt.errors import ConfigError
from yatt.launch.folder.folder import (
    check_folder,
    open_attempt,
    open_existing,
    open_folder,
    refuse_strangers_run,
)  # fmt: skip
from yatt.launch.folder.folder_wait import FolderWait
from yatt.launch.resolve.completed import completed_config
from yatt.paths import RunPaths


def config_in(tmp_path: Path, **run: str):
    source = tmp_path / "source"
    source.mkdir()
    config = load_resolved(make_run(source).config)
    return replace(config, run=replace(config.run, dir=str(tmp_path / "run"), **run))


def modes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): stat.S_IMODE(p.lstat().st_mode) for p in [root, *root.rglob("*")]}


@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", ".hidden", ".notes.12.deadbeef"])
def test_a_folder_that_holds_something_else_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    config = config_in(tmp_path)
    root = tmp_path / "run"
    root.mkdir()
    (root / name).write_text("title: mine\n")
    root.chmod(0o2775)
    before = modes(root)
    with pytest.raises(ConfigError, match=r"run\.dir: .*write another folder|run\.dir: .*Write a new folder"):
        open_folder(config)
    assert modes(root) == before and [p.name for p in root.iterdir()] == [name]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        open_folder(config)


def test_the_config_of_another_run_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    other = replace(config, run=replace(config.run, dir=str(tmp_path / "elsewhere")))
    open_folder(other)
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has the config\.yaml of the run .*elsewhere"):
        open_folder(config)


def test_an_empty_folder_and_the_runs_own_are_used(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "run").mkdir()
    open_folder(config)
    open_folder(config)
    assert (tmp_path / "run" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("share", "umask", "root", "file", "keys"),
    [
        ("private", 0o022, 0o700, 0o644, 0o700),
        ("private", 0o077, 0o700, 0o600, 0o700),
        ("group", 0o077, 0o750, 0o640, 0o700),
    ],
)
def test_files_honour_the_umask_and_keys_are_private(
    tmp_path: Path, share: str, umask: int, root: int, file: int, keys: int
) -> None:
    config = config_in(tmp_path, share=share)
    before = os.umask(umask)
    try:
        paths = open_folder(config)
    finally:
        os.umask(before)
    found = modes(paths.root)
    assert (found["."], found["config.yaml"], found["keys"]) == (root, file, keys)
    assert {mode for name, mode in found.items() if name.endswith("key_secret")} == {0o600}


def test_a_working_folder_that_would_break_a_batch_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_in(tmp_path))
    bad = tmp_path / "a\nb"
    bad.mkdir()
    monkeypatch.chdir(bad)
    with pytest.raises(ConfigError, match="contains a line break"):
        completed_config(config)


def test_every_path_of_the_config_means_the_same_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, given = config_in(tmp_path), 0
    for section in fields(config):
        if section.name == "launch":
            continue  # node-local folders
        for key, kind in get_type_hints(type(getattr(config, section.name)), include_extras=True).items():
            if kind == Annotated[str, FILE]:
                given += 1
                changed = replace(getattr(config, section.name), **{key: "here/file"})
                config = replace(config, **{section.name: changed})
    text = resolved_text(completed_config(config))
    assert given >= 5 and text.count(str(tmp_path / "here" / "file")) == text.count("here/file") == given


def test_the_time_that_templates_are_told_is_filled_in_once(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert not config.data.template_time
    first = completed_config(config)
    assert first.data.template_time
    open_folder(first)
    assert completed_config(config).data.template_time == first.data.template_time


@pytest.mark.parametrize("damage", ["gone", "one gone", "empty", "torn"])
def test_keys_that_are_lost_or_damaged_are_made_anew_both_of_them(tmp_path: Path, damage: str) -> None:
    paths = make_run(tmp_path)
    keys = make_keys(paths.keys)
    before = {end: keys.secret(end).read_bytes() for end in ENDS}
    make_keys(paths.keys)
    assert {end: keys.secret(end).read_bytes() for end in ENDS} == before, "whole ones stay"
    match damage:
        case "gone":
            shutil.rmtree(paths.keys)
        case "one gone":
            keys.secret("server").unlink()
        case "empty":
            keys.secret("client").write_bytes(b"")
        case "torn":
            keys.secret("client").write_bytes(before["client"][:-20])
    claim_attempt(paths)
    wait = FolderWait(root=paths.root, limit_s=5, signals=[], ending=frozenset(), say=print)
    open_attempt(wait, paths, 1, load_resolved(paths.config), {})
    assert all(keys.secret(end).read_bytes() != before[end] for end in ENDS)
    assert all(zmq.auth.load_certificate(keys.secret(end))[1] for end in ENDS)
    assert modes(paths.keys) == {".": 0o700, "server.key_secret": 0o600, "client.key_secret": 0o600}


def test_the_second_of_two_first_starts_hears_that_another_has_made_the_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path, id="")
    winner, loser = completed_config(config), completed_config(config)
    paths = open_folder(winner)
    for look in (check_folder, open_folder):
        with pytest.raises(ConfigError, match="belongs to another start, which created it first") as caught:
            look(loser)
        assert "yatt status" in str(caught.value) and "run.id: was" not in str(caught.value)
    assert load_resolved(paths.config).run.id == winner.run.id
    other = replace(loser, run=replace(loser.run, seed=loser.run.seed + 1))
    with pytest.raises(ConfigError, match=r"run\.seed: was 0, is 1"):
        check_folder(other)


def test_another_users_run_is_not_gone_on_with_unless_they_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config names functions, which would run as this user; looking at it needs no trust."""
    root = make_run(tmp_path).root
    assert open_existing(root)[0].root == root
    mine, name = os.getuid(), pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    for call in (lambda: open_existing(root), lambda: refuse_strangers_run(RunPaths(root))):
        with pytest.raises(
            ConfigError, match=rf"is a run of the user {name}: .* set YATT_TRUSTED_OWNERS={name}"
        ):
            call()
    assert status(root, as_json=True) == 0
    assert open_existing(root, runs_functions=False)[0].root == root
    arguments = argparse.Namespace(
        like=None, reward=[], prompt_key="", ground_truth_key="", max_tokens=0, iteration=0
    )
    with pytest.raises(ConfigError, match="its functions would run as you"):
        _source_of_run(arguments, root)
    source = run_source(root)
    own_family = replace(source.config, model=replace(source.config.model, family="their.py"))
    with pytest.raises(ConfigError, match="its functions would run as you"):  # an export, or `eval --like`
        model_folder(replace(source, config=own_family), None, None)
    monkeypatch.setenv("YATT_TRUSTED_OWNERS", f"somebody,{name}")
    assert open_existing(root)[0].root == root
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    with pytest.raises(ConfigError, match=f"of the user {mine}:"):
        open_existing(root)


def test_an_export_whose_model_folder_is_gone_names_its_key_and_the_option(tmp_path):
    """The folder of a policy or critic may be gone when the run is long over."""
    gone = str(tmp_path / "gone")
    paths = make_run(
        tmp_path, algorithm={"adv_estimator": "gae"}, critic={"path": gone}, model={"path": f"{gone}-too"}
    )
    source = run_source(paths.root)
    for is_critic, key in ((True, "critic.path"), (False, "model.path")):
        with pytest.raises(ConfigError, match=rf"^{key}: .* is now: --model FOLDER\.$"):
            model_folder(source, None, None, is_critic=is_critic)
        with pytest.raises(ConfigError, match=r"^--model: .*/empty has no config\.json; name"):
            model_folder(source, tmp_path / "empty", None, is_critic=is_critic)
