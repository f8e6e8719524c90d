"""`yatt sft`: checks the file, then trains in a separate process; once for the same inputs."""

import hashlib
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from yatt.adapters.files.files import write_atomically
from yatt.adapters.inputs.data_rows import has_column
from yatt.adapters.processes.watched_trial import run_watched
from yatt.config.load import load_as, resolved_text
from yatt.config.sections.sft import VIDEOS, SftConfig, sft_rules
from yatt.config.tree import files_and_arguments
from yatt.launch.resolve.data_files import MEDIA_STORE, made_folder, made_references
from yatt.launch.resolve.making_media import MediaMaking
from yatt.models.folder import takes_pictures

MADE_FROM = "yatt-sft.sha256"
START_S = 600.0
"""Longest time without progress before the first picture: libraries are imported, and rows are read."""

MAKING_S = 3600.0
"""Longest time to make references to the pictures of a file."""


def run_sft(file: Path, more: list[str]) -> int:
    """Trains, unless `output` was made from the same file and data; returns the exit code.

    Raises:
        ConfigError: the SFT file has a mistake; nothing was started.
    """
    config = load_as(SftConfig, *files_and_arguments(file, more), sft_rules)
    output = Path(config.output)
    config = with_pictures(config, made_folder(config.output))
    digest = _digest(config)
    if (output / MADE_FROM).is_file() and (output / MADE_FROM).read_text() == digest:
        sys.stdout.write(f"{output} already exists and was made from the same file and data: nothing to do\n")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    (output / MADE_FROM).unlink(missing_ok=True)
    write_atomically(output / "sft.yaml", resolved_text(config).encode())
    # Transformers and megatron warn that Transformer Engine and Apex are not installed.
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    argv = [sys.executable, "-P", "-m", "yatt.trainer.sft_main", str(output / "sft.yaml")]
    if config.prepared_folder is not None:
        arguments = [str(output / "sft.yaml"), str(config.prepared_folder)]
        run_watched("yatt.media.prepare_files", arguments, START_S)
    exit_code = subprocess.run(argv, check=False, env=env).returncode
    if exit_code == 0:
        write_atomically(output / MADE_FROM, digest.encode())
    return exit_code


def with_pictures(config: SftConfig, folder: Path) -> SftConfig:
    """Returns the config with references in place of the pictures of its rows, if its model takes some.

    Raises:
        ConfigError: rows have pictures that cannot be used.
    """
    if not config.start or not takes_pictures(config.start):
        return config
    store = str(folder / MEDIA_STORE)
    making = MediaMaking(
        image_key=config.image_key,
        video_key=VIDEOS,
        columns=None,
        root=config.media_root,
        store=store,
        most_pixels=config.media.most_pixels,
        most_per_prompt=config.media.most_per_prompt,
        storage_options=config.media.storage_options,
        model=config.start,
        video=asdict(config.media.video),
    )

    def made(path: str, key: str) -> str:
        if not path or not has_column(Path(path), (config.image_key, VIDEOS)):
            return path
        return made_references(making, path, folder, key, MAKING_S, is_anew=True)

    files = made(config.train_file, "train_file"), made(config.validation.file, "validation.file")
    if files == (config.train_file, config.validation.file):
        return config
    validation = replace(config.validation, file=files[1])
    return replace(config, train_file=files[0], validation=validation, media_store=store)


def _digest(config: SftConfig) -> str:
    """Returns the SHA-256 of all inputs of the model."""
    parts = [resolved_text(config).encode(), Path(config.train_file).read_bytes()]
    if config.start:
        parts += [path.read_bytes() for path in sorted(Path(config.start).glob("*.safetensors"))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
