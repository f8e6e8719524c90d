"""What commands about GenRMs share: the config, the device, and the folder of a result."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.machine.nvml import visible_count
from yatt.adapters.run_folder.run_config import load_run
from yatt.checkpoint.convert.hf_folder import whole_folder
from yatt.config.load import load_command, load_over
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import ConfigError
from yatt.launch.node.device import device_of
from yatt.paths import RunPaths

RESULT, PAGE = "result.json", "page.html"


def config_of(path: Path, words: list[str]) -> RunConfig:
    """Returns the config of a run file or a run folder, with changes.

    Raises:
        ConfigError: it cannot be read, or a change is impossible.
    """
    if path.is_dir():
        paths = RunPaths(path.absolute())
        paths.check_is_run()
        return load_over(load_run(paths), words, lambda _: ())
    return load_command(path, words)


def place_of_genrm(config: RunConfig, genrm: GenRMSection) -> int:
    """Returns which one of the run file's GenRMs it is, for keys in messages."""
    return [each.name for each in config.genrms].index(genrm.name)


def device_here(config: RunConfig, wanted: str) -> tuple[str, int]:
    """Returns the device of engines on this machine, and its number of GPUs.

    Raises:
        ConfigError: no GPU may be used.
    """
    device = device_of(config.launch.device if wanted == "auto" else wanted)
    gpus = visible_count(os.environ.get("CUDA_VISIBLE_DEVICES")) if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise ConfigError("CUDA_VISIBLE_DEVICES is empty: no GPU may be used; set it, or write --device cpu.")
    return device, gpus


def asked_with(genrm: GenRMSection, config: RunConfig) -> dict[str, Any]:
    """Returns how a GenRM was asked."""
    return {
        "model": genrm.model,
        "by": genrm.judging.by if genrm.kind == "text" else genrm.kind,
        "read": genrm.verdict.read,
        "votes": genrm.votes,
        "temperature": genrm.temperature,
        "seed": config.run.seed,
    }


def policy_note(config: RunConfig, name: str) -> str:
    """Returns what is to be said of a GenRM whose weights change in a run; empty: they do not."""
    for genrm in config.genrms:
        if genrm.name == name and genrm.is_policy:
            return f"'{name}' is the policy; it was asked with the weights of {config.model.path}."
        if genrm.name == name and genrm.refresh.url:
            return f"'{name}' takes weights of another run; it was asked with those of {genrm.model}."
    return ""


def write_result_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a new folder, which appears when it is whole.

    Raises:
        ConfigError: the folder exists and is not empty.
        OSError: a disk is full, or fails.
    """
    with whole_folder(out) as folder:
        for name, content in files.items():
            with (folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())


def result_bytes(record: msgspec.Struct) -> bytes:
    """Returns a record as a JSON file."""
    return msgspec.json.format(result_line(record).encode(), indent=1) + b"\n"


def result_line(record: msgspec.Struct) -> str:
    """Returns a record as one line of JSON. A text may have half characters, as names of files that are not
    UTF-8 do, which JSON has not: they are written as Python escapes."""
    return msgspec.json.encode(_whole_texts(msgspec.to_builtins(record))).decode()


def _whole_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_whole_texts(key): _whole_texts(each) for key, each in value.items()}
    return [_whole_texts(each) for each in value] if isinstance(value, list | tuple) else value
