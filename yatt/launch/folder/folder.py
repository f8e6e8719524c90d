"""Creates the run folder when a run starts, or compares an existing one with the config."""

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files.files import (
    create_exclusively,
    make_private,
    read_or_none,
    share_with,
    write_atomically,
)
from yatt.adapters.files.lines import make_ready
from yatt.adapters.files.segments import newest_segment
from yatt.adapters.net.curve import make_keys
from yatt.adapters.run_folder.attempt_claim import remove_leftovers, skip_attempts
from yatt.adapters.run_folder.ledger import STARTED, started_attempts, write_record
from yatt.adapters.run_folder.run_config import check_unedited, load_run, seal_config
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import claim_store
from yatt.checkpoint.commit.run_store import check_presence, open_run_store, store_url, take_hold
from yatt.checkpoint.store.store import Store
from yatt.config.changing import changed_keys, is_allowed
from yatt.config.load import resolved_text
from yatt.config.schema import RunConfig
from yatt.core.attempts.checkpoint_names import MOST_ATTEMPTS
from yatt.errors import CheckpointsMissing, ConfigError, StoreUnreachable, YattError
from yatt.launch.folder.folder_wait import FolderWait
from yatt.launch.resolve.completed import config_of_run
from yatt.launch.resolve.plan import Resized
from yatt.launch.resolve.resolved import Resolved, resolve_config
from yatt.paths import RunPaths

TRUSTED = "YATT_TRUSTED_OWNERS"
"""Environment variable with names of users, separated by commas, whose runs this user goes on with."""


def check_folder(config: RunConfig) -> RunPaths:
    """Returns the run's folder, if it is new or belongs to this run; changes nothing.

    Raises:
        ConfigError: the folder contains something else, or a run with another config.
    """
    paths = RunPaths(Path(config.run.dir))
    _refuse_strangers_folder(paths)
    if paths.config.exists():
        check_unedited(paths)
        _compare(config_of_run(paths), config, paths.root)
    return paths


def open_folder(config: RunConfig, *, starts_now: bool = True) -> RunPaths:
    """Creates the run's folder, or finds it with the same config; claims its checkpoint store.

    Args:
        starts_now: take the store over from another folder of the run; else the first start does it in
            `await_committed`, and until then the other folder may continue.

    Raises:
        ConfigError: the folder cannot be written to, or it or the store belongs to another run.
    """
    paths = check_folder(config)
    is_new = not paths.root.exists()
    make_root(paths.root, config.run.share)
    if not create_exclusively(paths.config, resolved_text(config).encode()):
        is_new = False  # another start has created it meanwhile
        _compare(config_of_run(paths), config, paths.root)
    seal_config(paths)
    try:
        if config.trains:
            _claim_store(config, paths, starts_now=starts_now)
    except YattError as error:
        if is_new:  # else it would refuse the next try with a corrected config
            shutil.rmtree(paths.root)
            raise
        if not _is_waited_for(error):
            raise
    make_keys(paths.keys)
    return paths


def _is_waited_for(error: YattError) -> bool:
    """Whether the launcher waits for the store. A store that lists no checkpoints is not claimed."""
    return isinstance(error, CheckpointsMissing) or (isinstance(error, StoreUnreachable) and error.is_passing)


def _refuse_strangers_folder(paths: RunPaths) -> None:
    """Refuses a folder that contains something else; changes nothing.

    Raises:
        ConfigError: it is such a folder, or not a folder.
    """
    if paths.config.is_file():
        return
    if not os.path.lexists(paths.root):
        _refuse_parent(paths.root)
        return
    if not paths.root.is_dir():
        raise ConfigError(f"{paths.root} is not a folder. Write another one.", key="run.dir")
    try:
        holds = next(iter(sorted(os.listdir(paths.root))), None)
    except OSError as error:
        says = f"{paths.root} cannot be read ({error.strerror}). Write another one."
        raise ConfigError(says, key="run.dir") from error
    if holds is not None:
        raise ConfigError(
            f"{paths.root} is not a run folder and is not empty (it contains '{holds}'). Write a new "
            f"folder, for example {paths.root / 'run'}; nothing was changed.",
            key="run.dir",
        )


def _refuse_parent(root: Path) -> None:
    """Refuses a folder that cannot be made.

    Raises:
        ConfigError: something else is in the way, or the user may not write there.
    """
    parent = next(folder for folder in root.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{root}: cannot be used as a folder of the run: {parent} is no folder that you may write to. "
            "Write another one.",
            key="run.dir",
        )


def make_root(root: Path, share: str) -> None:
    """Creates the run folder, or finds it; readable by the user only, or by the user's group.

    Raises:
        ConfigError: it cannot be created or is another user's.
    """
    make_private(root)
    share_with(share)
    if share == "group":
        root.chmod(0o750)


def _claim_store(config: RunConfig, paths: RunPaths, *, starts_now: bool) -> None:
    store, url = open_run_store(config, paths.root), store_url(config, paths.root)
    check_presence(store, url, paths)
    claim_store(store, url, config.run.id)
    if starts_now or started_attempts(paths):
        take_over(store, config, paths)


def take_over(store: Store, config: RunConfig, paths: RunPaths) -> None:
    """Takes the store over for this folder. If the store has commits of attempts that this new folder does
    not know, attempts are numbered from there on.

    Raises:
        ConfigError: the store has a record of an attempt that no run can have made.
        StoreTakenOver: this folder has attempts, and another folder has taken the store over.
        StoreUnreachable: the store does not answer.
    """
    url, newest = store_url(config, paths.root), Checkpoints(store, 0).newest_attempt()
    if newest > MOST_ATTEMPTS:
        raise ConfigError(
            f"{url} has a record of attempt {newest}, which no run has made. Remove it from the store's "
            "`adopted` or `manifests`, or name another place.",
            key="checkpoint.url",
        )
    if (before := take_hold(store, paths, config.run.id)) is not None:
        sys.stderr.write(
            f"yatt: {paths.root} takes the checkpoints in {url} over from {before}. If a run is still active "
            "there, it ends at its next checkpoint.\n"
        )
    if newest:
        skip_attempts(paths, newest)


def open_existing(folder: Path, *, runs_functions: bool = True) -> tuple[RunPaths, RunConfig]:
    """Returns the paths and the config of an existing run.

    Args:
        runs_functions: whether the caller goes on to run the functions that the config names.

    Raises:
        ConfigError: it is not a run folder, was moved, or is another user's.
    """
    paths = RunPaths(folder.absolute())
    paths.check_is_run()
    if runs_functions:
        refuse_strangers_run(paths)
    check_unedited(paths)
    config = load_run(paths)
    if Path(config.run.dir) != paths.root:
        raise ConfigError(
            f"{folder} was moved: its run.dir is {config.run.dir}. Move it back, or link it there."
        )
    share_with(config.run.share)
    return paths, config


def take_changes(folder: Path, changes: Sequence[str], resized: Resized) -> Resolved:
    """Reads the run's config again, because another resume may have changed it, and records the changes.
    Nothing of the run may be active.

    Raises:
        ConfigError, OSError: see `resolve_config` and `Resolved.record`.
    """
    paths, config = open_existing(folder)
    new = resolve_config(config, changes=changes, resized=resized)
    new.record(paths)
    return new


def refuse_strangers_run(paths: RunPaths) -> None:
    """A run's functions run as whoever goes on with it, and its folder says where they are.

    Raises:
        ConfigError: folder or config are of another user, whom `TRUSTED` does not name.
    """
    trusted = os.environ.get(TRUSTED, "").split(",")
    for owner in {path.stat().st_uid for path in (paths.root, paths.config)} - {os.getuid()}:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = str(owner)
        if name not in trusted:
            raise ConfigError(
                f"{paths.root} is a run of the user {name}: its functions would run as you. If you trust "
                f"them, set {TRUSTED}={name}. A run of your own can start from its checkpoints "
                "(run.from_checkpoint)."
            )


def _compare(before: RunConfig, now: RunConfig, root: Path) -> None:
    listed = changed_keys(before, now)
    filled = ("run.id", "data.template_time")
    if before.run.id != now.run.id and all(change.key in filled for change in listed):
        raise ConfigError(
            f"{root} belongs to another start, which created it first: its run.id is {before.run.id}, this "
            f"start's is {now.run.id}. Nothing was started; `yatt status {root}` shows the other run. If you "
            "wrote run.id yourself, remove it, or write another run.dir."
        )
    if listed:
        lines = ";\n".join(f"  {change.in_words()}" for change in listed)
        is_possible = all(is_allowed(change, deterministic=before.run.deterministic) for change in listed)
        command = f"yatt resume {root}{' KEY=VALUE' if is_possible else ''}"
        raise ConfigError(
            f"{root} contains a run with another config:\n{lines}.\nA run keeps the config that it was "
            f"started with: resume it with `{command}`. For a new run, write another run.dir."
        )


def write_attempt_config(paths: RunPaths, attempt: int, config: RunConfig) -> None:
    """Writes the config of this attempt, if it differs from the run's config."""
    text = resolved_text(config).encode()
    if read_or_none(paths.config) != text:
        write_atomically(paths.attempt_config(attempt), text)


def open_attempt(
    wait: FolderWait, paths: RunPaths, attempt: int, config: RunConfig, about: dict[str, Any]
) -> None:
    """Prepares the run folder for an attempt whose number is claimed, and records its start.

    Args:
        wait: calls each function, and waits while the folder fails.
        about: content of the attempt's `started.json`.

    Raises:
        StaleAttempt: a newer attempt was claimed.
        FolderUnreachable, StoppedWaiting: see `wait`.
    """
    wait(partial(remove_leftovers, paths, attempt))
    for said in wait(partial(ready_people_files, paths)):
        wait.say(said)
    wait(partial(make_keys, paths.keys))  # replace lost or damaged keys while no process is running
    wait(partial(write_record, paths, attempt, STARTED, about))
    wait(partial(write_attempt_config, paths, attempt, config))
    with contextlib.suppress(OSError):  # the link is only for users
        link_latest(paths, attempt)


def link_latest(paths: RunPaths, attempt: int) -> None:
    """Points the link `latest` at an attempt. Any other file or folder of that name is renamed."""
    link = paths.root / f".latest.{os.getpid()}"
    if paths.latest.is_dir() and not paths.latest.is_symlink():
        make_ready(paths.latest)
    link.unlink(missing_ok=True)
    link.symlink_to(Path("attempts") / f"{attempt:06d}")
    os.replace(link, paths.latest)


def ready_people_files(paths: RunPaths) -> list[str]:
    """Prepares events, metrics and samples for appending; returns messages for the user."""
    files = (newest_segment(paths.events), paths.metrics, paths.samples)
    return [said for path in files if (said := make_ready(path))]
