"""The config as a node's processes see it: with paths of copies on its own disk (`yatt.launch.staging`)."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from yatt.config.load import load_attempt
from yatt.config.schema import RunConfig
from yatt.paths import RunPaths

STAGED = "YATT_STAGED"
"""The variable that tells a node's processes which copies there are: JSON, from source to copy."""


def load_on_node(paths: RunPaths, epoch: int) -> RunConfig:
    """As `load_attempt`, for a controller or worker.

    Raises:
        ConfigError: as `load_attempt`.
    """
    return with_copies(load_attempt(paths, epoch), json.loads(os.environ.get(STAGED, "{}")))


def with_copies(config: RunConfig, copies: Mapping[str, str]) -> RunConfig:
    """The same config, which reads the copies instead of their sources; one that is gone is not used."""

    def place(source: str) -> str:
        copy = copies.get(source, source)
        return copy if Path(copy).exists() else source

    return replace(
        config,
        model=replace(config.model, path=place(config.model.path)),
        genrms=tuple(replace(genrm, model=place(genrm.model)) for genrm in config.genrms),
        data=replace(
            config.data,
            train_files=tuple(map(place, config.data.train_files)),
            val_files=tuple(map(place, config.data.val_files)),
        ),
    )
