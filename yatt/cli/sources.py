"""What the commands about checkpoints work on: a run folder, or the URL of a checkpoint store."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from yatt import clock
from yatt.adapters.files.segments import SegmentTail
from yatt.adapters.inputs.model_family import MODEL_KEY, critic_key, model_of_run
from yatt.adapters.run_folder.run_config import load_run
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.run_store import check_presence, store_url
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store, open_store
from yatt.config.schema import ModelSection, RunConfig
from yatt.core.attempts.checkpoint_names import named_commit
from yatt.core.attempts.claims import Commit
from yatt.credentials import redacted_text
from yatt.errors import CheckpointError, ConfigError
from yatt.launch.folder.folder import refuse_strangers_run
from yatt.models.folder import ModelFolder
from yatt.models.model import with_value_head
from yatt.paths import RunPaths
from yatt.records.events.log import logged_event
from yatt.records.events.saves import CheckpointCommitted

ANSWER_S = 60.0
"""Longest wait for a store that fails temporarily."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint store, and the run that it was found by, if any."""

    url: str
    checkpoints: Checkpoints
    paths: RunPaths | None = None
    config: RunConfig | None = None

    @property
    def shown(self) -> str:
        """The URL for messages."""
        return redacted_text(self.url)


def run_source(run: Path) -> Source:
    """Returns the checkpoints of a run folder.

    Raises:
        ConfigError: it is not a run folder.
        CheckpointsMissing: its store lists none, although some were committed.
    """
    paths = RunPaths(run.absolute())
    if not paths.config.is_file():
        also = "; for a checkpoint store add --store" if (run / "manifests").is_dir() else ""
        raise ConfigError(f"{run} is not a run folder: it has no config.yaml{also}.")
    config = load_run(paths)
    url = store_url(config, paths.root)
    store = patient_store(open_store(url, config.checkpoint.storage_options))
    check_presence(store, url, paths)
    return Source(url, Checkpoints(store, 0), paths, config)


def store_source(url: str, options: Mapping[str, Any]) -> Source:
    """Returns the checkpoints in a store.

    Raises:
        ConfigError: the URL cannot be used.
    """
    place = url if "://" in url else str(Path(url).absolute())
    return Source(place, Checkpoints(patient_store(open_store(place, options)), 0))


def patient_store(store: Store) -> Store:
    """Returns the store with retries; waits are reported on the terminal."""

    def say(error: str) -> None:
        if error:
            sys.stderr.write(f"yatt: the store fails ({error}); trying again, up to {ANSWER_S:g} s\n")

    return PatientStore(store, limit_s=ANSWER_S, say=say)


def parsed_options(settings: Sequence[str]) -> dict[str, Any]:
    """Returns options for fsspec from KEY=VALUE; a value is YAML, so that `anon=true` is a boolean.

    Raises:
        ConfigError: a setting is none.
    """
    found = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {key}: its value is not YAML; put it in quotes.") from error
        if not key or not equals:
            raise ConfigError(f"--option {redacted_text(setting)}: write KEY=VALUE.")
    return found


def chosen_manifest(source: Source, iteration: int) -> str:
    """Returns the manifest of this iteration, or (0) of the newest whole checkpoint.

    Raises:
        ConfigError: there is none.
        CheckpointError: none of them is whole.
    """
    names = all_of(source, iteration)
    if iteration:
        return names[0]
    skipped = []
    for name in names:
        try:
            source.checkpoints.whole(name)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        for reason in skipped:
            sys.stderr.write(f"yatt: skipped {reason}\n")
        return name
    raise CheckpointError(f"{source.shown} has no whole checkpoint: {'; '.join(skipped)}")


def all_of(source: Source, iteration: int) -> tuple[str, ...]:
    """Returns the manifests of this iteration, or (0) of all in the lineage, newest first.

    Raises:
        ConfigError: there is none.
    """
    candidates = source.checkpoints.candidates()
    if names := candidates.of_iteration(iteration):
        return names
    known = ", ".join(str(named_commit(name).iteration) for name in candidates.names[:10])
    if not candidates.names:
        raise ConfigError(f"{source.shown} has no committed checkpoint.")
    stale = any(named_commit(name).iteration == iteration for name in candidates.stale)
    why = "only one of a stale attempt" if stale else "none"
    raise ConfigError(f"{source.shown}: of iteration {iteration} there is {why}; write one of {known}.")


def model_folder(
    source: Source, folder: Path | None, family: Path | None, *, is_critic: bool = False
) -> ModelFolder:
    """Returns the policy's model, or the critic's.

    Args:
        folder: replaces the run's `model.path`, or the critic's folder.
        family: replaces the run's `model.family`.

    Raises:
        ConfigError: it is unknown, or its config.json cannot be used.
    """
    if source.config is None and folder is None:
        raise ConfigError(
            f"{source.shown} does not say which model it is of; add --model FOLDER with the config and the "
            f"tokenizer of the {'critic' if is_critic else 'policy'}."
        )
    section, key = _first_model(source, folder, is_critic=is_critic)
    section = replace(section, path=str((folder or Path(section.path)).absolute()))
    if family is not None:
        section = replace(section, family=str(family.absolute()))
    elif section.family and source.paths is not None:  # its file is run
        refuse_strangers_run(source.paths)
    try:
        model = model_of_run(section, key=key)
    except ConfigError as error:
        if folder is not None:
            raise
        raise ConfigError(f"{error} Or write where it is now: --model FOLDER.") from error.__cause__
    if is_critic or (source.config is not None and source.config.run.kind == "reward_model"):
        model = with_value_head(model)
    return ModelFolder(path=Path(section.path), model=model)


def _first_model(source: Source, folder: Path | None, *, is_critic: bool) -> tuple[ModelSection, str]:
    """Returns the section of the model that the policy or critic began with, and what gives its folder."""
    config = source.config
    if config is None:
        return ModelSection(path=str(folder)), "--model"
    section, key = (config.critic_model, critic_key(config)) if is_critic else (config.model, MODEL_KEY)
    return section, "--model" if folder is not None else key


def ages_s(source: Source) -> dict[Commit, float]:
    """Returns the seconds since each commit that the run's events record; for people only."""
    if source.paths is None:
        return {}
    now, found = datetime.fromisoformat(clock.wall_iso()), {}
    for batch in SegmentTail(source.paths.events, logged_event).batches():
        for logged in batch:
            if isinstance(logged.event, CheckpointCommitted):
                age = now - datetime.fromisoformat(logged.wall)
                found[Commit(logged.event.iteration, logged.attempt)] = max(0.0, age.total_seconds())
    return found


def manifest_of(source: Source, name: str) -> Manifest:
    """Reads a manifest.

    Raises:
        CheckpointError: it is damaged.
    """
    return source.checkpoints.read(name)
