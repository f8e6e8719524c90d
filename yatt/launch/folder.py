"""The run folder at the start: made, or found and compared."""

import contextlib
import os
import secrets
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.attempt_claim import remove_leftovers, skip_attempts
from yatt.adapters.curve import make_keys
from yatt.adapters.files import claim, make_private, publish, read_or_none, share_with
from yatt.adapters.ledger import STARTED, attempts, note
from yatt.adapters.lines import make_ready
from yatt.adapters.segments import newest_segment
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.ownership import claim_store
from yatt.checkpoint.run_store import check_presence, open_run_store, store_url, take_hold
from yatt.checkpoint.store import Store
from yatt.config.load import load_resolved, resolved_text
from yatt.config.ranges import FILE
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointsMissing, ConfigError, StoreUnreachable, YattError
from yatt.launch.folder_wait import FolderWait
from yatt.launch.preflight import model_limit
from yatt.paths import RunPaths


def completed(config: RunConfig) -> RunConfig:
    """The same config with every path absolute, model limits, the run's id and time filled in: it means the
    same anywhere.

    Raises:
        ConfigError: the folder that relative paths start in cannot be part of a batch script.
    """
    if wrong := FILE.fault(str(Path.cwd())):
        raise ConfigError(f"the working folder {str(Path.cwd())!r} {wrong}; start from another one.")
    folder, origin = _absolute(config.run.dir), config.run.from_checkpoint
    paths = RunPaths(Path(folder))
    known = _config_of(paths) if paths.config.is_file() else None
    return replace(
        config,
        run=replace(
            config.run,
            dir=folder,
            id=config.run.id or (known.run.id if known else new_id()),
            from_checkpoint=replace(origin, url=_absolute_url(origin.url)),
        ),
        data=replace(
            config.data,
            template_time=config.data.template_time
            or (known.data.template_time if known else clock.wall_iso()),
            train_files=tuple(map(_absolute, config.data.train_files)),
            val_files=tuple(map(_absolute, config.data.val_files)),
        ),
        model=replace(config.model, path=_absolute(config.model.path)),
        genrms=tuple(
            replace(
                g,
                model=_absolute(g.model),
                path=_absolute(g.path) if g.path else "",
                max_model_tokens=g.max_model_tokens or model_limit(g.model),
            )
            for g in config.genrms
        ),
        rewards=tuple(
            r if r.path.startswith("builtin:") else replace(r, path=_absolute(r.path)) for r in config.rewards
        ),
        checkpoint=replace(config.checkpoint, url=_absolute_url(config.checkpoint.url)),
    )


def new_id() -> str:
    """A random run id; begins with a letter, so that YAML reads it as text."""
    return f"r{secrets.token_hex(6)}"


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_url(url: str) -> str:
    return url if not url or "://" in url else _absolute(url)


def check_folder(config: RunConfig) -> RunPaths:
    """The run's folder, if it can be made or is this run's; nothing is changed.

    Raises:
        ConfigError: it holds something else, or a run with another config.
    """
    paths = RunPaths(Path(config.run.dir))
    _refuse_strangers_folder(paths)
    if paths.config.exists():
        _compare(_config_of(paths), config, paths.root)
    return paths


def open_folder(config: RunConfig, *, starts_now: bool = True) -> RunPaths:
    """Make the run's folder, or find it with the same config; claim its checkpoint store.

    Args:
        starts_now: take the store over from another folder of the run; else the first start does it, in
            `await_committed`, and until then the other one may go on.

    Raises:
        ConfigError: the folder cannot be written to, or it or the store belongs to another run.
    """
    paths = check_folder(config)
    is_new = not paths.root.exists()
    make_root(paths.root, config.run.share)
    if not claim(paths.config, resolved_text(config).encode()):
        is_new = False  # another start has made it meanwhile
        _compare(_config_of(paths), config, paths.root)
    try:
        _claim_store(config, paths, starts_now=starts_now)
    except YattError as error:
        if is_new:  # with another config the next try would be refused for this one's sake
            shutil.rmtree(paths.root)
            raise
        if not _is_waited_for(error):
            raise
    make_keys(paths.keys)
    return paths


def _is_waited_for(error: YattError) -> bool:
    """Whether the launcher waits for the store; what stands in the place of a missing one is not claimed."""
    return isinstance(error, CheckpointsMissing) or (isinstance(error, StoreUnreachable) and error.is_passing)


def _refuse_strangers_folder(paths: RunPaths) -> None:
    """A folder that holds something else is neither used nor changed.

    Raises:
        ConfigError: it is such a folder, or no folder.
    """
    if not os.path.lexists(paths.root) or paths.config.is_file():
        return
    if not paths.root.is_dir():
        raise ConfigError(f"run.dir: {paths.root} is not a folder. Name another one.")
    try:
        holds = next(iter(sorted(os.listdir(paths.root))), None)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {paths.root} cannot be read ({error.strerror}). Name another one."
        ) from error
    if holds is not None:
        raise ConfigError(
            f"run.dir: {paths.root} is no run folder and is not empty (it holds '{holds}'). Name a new "
            f"folder, {paths.root / 'run'} say; nothing in it was changed."
        )


def _config_of(paths: RunPaths) -> RunConfig:
    try:
        found = load_resolved(paths.config)
    except ConfigError as error:
        raise ConfigError(
            f"run.dir: {paths.root} has a config.yaml that is no run's; name another folder. {error}"
        ) from error
    if Path(found.run.dir) != paths.root:
        raise ConfigError(
            f"run.dir: {paths.root} holds a config.yaml of the run {found.run.dir}; name another folder."
        )
    return found


def make_root(root: Path, share: str) -> None:
    """Create the run folder, or find it; readable by nobody else, or by its group.

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
    if starts_now or attempts(paths):
        take_over(store, config, paths)


def take_over(store: Store, config: RunConfig, paths: RunPaths) -> None:
    """Make the store this folder's. A store that outlived its run's folder has commits of attempts that the
    new folder knows nothing of: its attempts are numbered from there on.

    Raises:
        StoreTakenOver: this folder has begun, and another one has the store.
        StoreUnreachable: the store does not answer.
    """
    url = store_url(config, paths.root)
    if (before := take_hold(store, paths, config.run.id)) is not None:
        sys.stderr.write(
            f"yatt: the checkpoints in {url} were those of {before}; {paths.root} goes on with them. A run "
            "that still goes on there ends at its next checkpoint.\n"
        )
    if newest := Checkpoints(store, 0).newest_attempt():
        skip_attempts(paths, newest)


def open_existing(folder: Path) -> tuple[RunPaths, RunConfig]:
    """A run that is there, and its config.

    Raises:
        ConfigError: it is no run folder, or was moved.
    """
    paths = RunPaths(folder.absolute())
    if not paths.config.exists():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml. Give the folder of run.dir.")
    config = load_resolved(paths.config)
    if Path(config.run.dir) != paths.root:
        raise ConfigError(
            f"{folder} was moved: its run.dir is {config.run.dir}. Move it back, or link it there."
        )
    share_with(config.run.share)
    return paths, config


def _compare(before: RunConfig, now: RunConfig, root: Path) -> None:
    changed = list(_differences(asdict(before), asdict(now), ""))
    filled = ("run.id: ", "data.template_time: ")
    if before.run.id != now.run.id and all(line.startswith(filled) for line in changed):
        raise ConfigError(
            f"{root} belongs to another start, which made it first: its run is {before.run.id}, this one is "
            f"{now.run.id}. Nothing was started here; `yatt status {root}` shows the other. If you wrote "
            "run.id yourself, remove it, or name another run.dir."
        )
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise ConfigError(
            f"{root} holds a run with another config:\n{listed}\nA run goes on with the config it was "
            f"started with: `yatt resume {root}`. For a new run name another run.dir."
        )


def _differences(before: Any, now: Any, key: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [
            line
            for name in before
            for line in _differences(before[name], now[name], f"{key}.{name}" if key else name)
        ]
    return [] if before == now else [f"{key}: was {before!r}, is {now!r}"]


def write_attempt_config(paths: RunPaths, attempt: int, config: RunConfig) -> None:
    """What this attempt runs with, if that is not the run's own config."""
    text = resolved_text(config).encode()
    if read_or_none(paths.config) != text:
        publish(paths.attempt_config(attempt), text)


def open_attempt(
    wait: FolderWait, paths: RunPaths, attempt: int, config: RunConfig, about: dict[str, Any]
) -> None:
    """Make the run folder ready for an attempt whose number is claimed, and note that it begins.

    Args:
        wait: carries out each step, as long as the folder fails.
        about: content of the attempt's `started.json`.

    Raises:
        StaleAttempt: a newer attempt was claimed.
        FolderUnreachable, StoppedWaiting: as `wait`.
    """
    wait(partial(remove_leftovers, paths, attempt))
    for said in wait(partial(ready_people_files, paths)):
        wait.say(said)
    wait(partial(make_keys, paths.keys))  # lost or damaged ones are mended while nothing is at work
    wait(partial(note, paths, attempt, STARTED, about))
    wait(partial(write_attempt_config, paths, attempt, config))
    with contextlib.suppress(OSError):  # the link is for people
        link_latest(paths, attempt)


def link_latest(paths: RunPaths, attempt: int) -> None:
    """Point `latest`, which is for people, at an attempt. What else has the name is renamed."""
    link = paths.root / f".latest.{os.getpid()}"
    if paths.latest.is_dir() and not paths.latest.is_symlink():
        make_ready(paths.latest)
    link.unlink(missing_ok=True)
    link.symlink_to(Path("attempts") / f"{attempt:06d}")
    os.replace(link, paths.latest)


def ready_people_files(paths: RunPaths) -> list[str]:
    """Make the files that are for people ready to be gone on with; gives what a person should know."""
    files = (newest_segment(paths.events), paths.metrics, paths.samples)
    return [said for path in files if (said := make_ready(path))]
