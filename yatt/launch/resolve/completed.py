"""The config of a run as its folder keeps it: complete, and with the same meaning on every node."""

import secrets
from dataclasses import replace
from pathlib import Path

from yatt import clock
from yatt.adapters.run_folder.run_config import load_run
from yatt.config.schema import RunConfig
from yatt.config.sections.operation import TRACKERS
from yatt.config.sections.ranges import FILE
from yatt.errors import ConfigError
from yatt.launch.resolve.data_files import with_files
from yatt.models.folder import CONFIG, decoder_config
from yatt.paths import RunPaths
from yatt.plain_files import read_json_object


def completed_config(config: RunConfig) -> RunConfig:
    """Returns the config with absolute paths, model limits, run id and time: the same on every node.

    Raises:
        ConfigError: the name of the working folder cannot be written into a batch script; or no file fits a
            pattern.
    """
    if wrong := FILE.fault(str(Path.cwd())):
        raise ConfigError(f"the working folder {str(Path.cwd())!r} {wrong}; run yatt in another folder.")
    config = with_files(config)
    folder, origin = _absolute(config.run.dir), config.run.from_checkpoint
    paths = RunPaths(Path(folder))
    known = config_of_run(paths) if paths.config.is_file() else None
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
            map=_absolute_or_none(config.data.map),
            media_root=_absolute_url(config.data.media_root),
            media_store=_absolute_or_none(config.data.media_store),
        ),
        model=replace(
            config.model,
            path=_absolute(config.model.path),
            family=_absolute_or_none(config.model.family),
        ),
        critic=replace(config.critic, path=_absolute_or_none(config.critic.path)),
        environment=replace(config.environment, path=_absolute_or_none(config.environment.path)),
        algorithm=replace(config.algorithm, path=_absolute_or_none(config.algorithm.path)),
        genrms=tuple(
            replace(
                g,
                model=_absolute(g.model) if g.has_engine else g.model,
                path=_absolute_or_none(g.path),
                refresh=replace(g.refresh, url=_absolute_url(g.refresh.url)),
                max_model_tokens=g.max_model_tokens or (model_limit(g.model) if g.has_engine else 0),
            )
            for g in config.genrms
        ),
        rewards=tuple(
            r if r.path.startswith("builtin:") else replace(r, path=_absolute(r.path)) for r in config.rewards
        ),
        checkpoint=replace(config.checkpoint, url=_absolute_url(config.checkpoint.url)),
        logging=replace(config.logging, trackers=tuple(map(_absolute_tracker, config.logging.trackers))),
    )


def new_id() -> str:
    """Returns a random run id; it begins with a letter, so that YAML reads it as text."""
    return f"r{secrets.token_hex(6)}"


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_or_none(path: str) -> str:
    return _absolute(path) if path else ""


def _absolute_tracker(tracker: str) -> str:
    return tracker if tracker in TRACKERS else _absolute(tracker)


def _absolute_url(url: str) -> str:
    return url if not url or "://" in url else _absolute(url)


def config_of_run(paths: RunPaths) -> RunConfig:
    """Reads the config of an existing run folder.

    Raises:
        ConfigError: the file is not a config, or of a run in another folder.
    """
    try:
        found = load_run(paths)
    except ConfigError as error:
        says = f"{paths.root} has a config.yaml that is not a run's; write another folder. {error}"
        raise ConfigError(says, key="run.dir") from error
    if Path(found.run.dir) != paths.root:
        says = f"{paths.root} has the config.yaml of the run {found.run.dir}; write another folder."
        raise ConfigError(says, key="run.dir")
    return found


def model_limit(folder: str) -> int:
    """Returns the model's context length by its config.json; 0 if it is not set there."""
    try:
        values = read_json_object(Path(folder) / CONFIG) or {}
        limit = decoder_config(values).get("max_position_embeddings", 0)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return 0  # `check_model` reports it
    return limit if type(limit) is int and limit > 0 else 0  # `check_model` reports a wrong value
