"""`yatt submit --sweep key=a,b,c`: submits one run per value, or per combination of values."""

import hashlib
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from yatt.adapters.files.patience import is_passing
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, AlreadyGoing, ConfigError, YattError
from yatt.printable import printable_lines

MOST = 1000
MOST_NAME = 80
_OTHER = re.compile(r"[^\w.,=+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class SweepMember:
    """One run of a sweep: the last part of its folder name, and its settings as ``key=value``."""

    name: str
    settings: tuple[str, ...]


def sweep_members(sweeps: list[str]) -> list[SweepMember]:
    """Returns every combination, in the order in which the values are written.

    Args:
        sweeps: ``key=a,b,c`` each; values are YAML, so a list is one value: ``key=[1,2],[3]``.

    Raises:
        ConfigError: no key, no value, a duplicate key or value, or more than `MOST` runs.
    """
    listed: list[list[str]] = []
    keys: list[str] = []
    for text in sweeps:
        key, _, values = text.partition("=")
        found = _values(text, values)
        if not key or not found:
            raise ConfigError(f"--sweep {text}: write key=a,b,c.")
        if len(set(found)) < len(found):
            raise ConfigError(f"--sweep {text}: a value is listed twice; remove one of them.")
        keys.append(key)
        listed.append([f"{key}={value}" for value in found])
    if len(set(keys)) < len(keys):
        raise ConfigError("--sweep: a key is given twice; write all of its values in one --sweep.")
    combined = list(itertools.islice(itertools.product(*listed), MOST + 1))
    if len(combined) > MOST:
        raise ConfigError(f"--sweep: more than {MOST} runs; write fewer values.")
    return [SweepMember(_name(settings), settings) for settings in combined]


def of_sweep(config: RunConfig, member: SweepMember) -> RunConfig:
    """Returns the config of one member, with its folder inside the sweep's folder.

    Raises:
        ConfigError: the run file sets run.id, which must be unique.
    """
    if config.run.id:
        raise ConfigError("--sweep: run.id must be unique; remove it, then each run gets its own id.")
    return replace(config, run=replace(config.run, dir=str(Path(config.run.dir) / member.name)))


def submit_each(found: list[SweepMember], submit: Callable[[SweepMember], object]) -> int:
    """Submits every member. Skips runs that are active already; a member with a mistake does not stop the
    others.

    Returns:
        The exit code: that of the first error, else 0.
    """
    code = EXIT_FINISHED
    for member in found:
        sys.stdout.write(f"{member.name}: {' '.join(member.settings)}\n")
        sys.stdout.flush()
        try:
            submit(member)
        except AlreadyGoing as error:
            sys.stdout.write(f"  {error}\n")
        except (YattError, OSError) as error:
            sys.stderr.write(f"yatt: {member.name}: {printable_lines(str(error))}\n")
            code = code or (EXIT_FAILED if is_passing(error) else getattr(error, "exit_code", EXIT_FAILED))
    return code


def _values(sweep: str, text: str) -> list[str]:
    """Returns the members of a YAML list as they are written."""
    try:
        node = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--sweep {sweep}: the values are not YAML: {error}") from error
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError(f"--sweep {sweep}: write key=a,b,c.")
    return [text[n.start_mark.index - 1 : n.end_mark.index - 1].strip() for n in node.value]


def _name(settings: tuple[str, ...]) -> str:
    """Folder name of a member: keys without their section, in characters that every filesystem accepts. Does
    not depend on the other members."""
    pairs = (setting.partition("=") for setting in settings)
    words = ",".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)
    name = _OTHER.sub("_", words)[:MOST_NAME]
    if name == words:
        return name
    return f"{name}-{hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"
