"""Copies models, data, container images and the Python environment to a node's local disk before an attempt.

This is an optimization: what cannot be copied in time is read from its original place, and a line reports it.
A node's step copies the files that this node's roles read. A separate step outside of the container copies
the image (`yatt.launch.attempt.images`); this module is its program.

A Python environment is unpacked from an archive, compared, and tried before use: with torch and vLLM it has
about 80,000 files, and each worker opens thousands of them when it starts; from a shared filesystem, hundreds
of nodes together open millions.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template

from yatt import clock
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.adapters.node_local.copied_files import GivenUp
from yatt.adapters.node_local.local_copy import LocalCopies
from yatt.adapters.node_local.local_folder import MEMORY, SHARED, mount_of
from yatt.checkpoint.store.store import is_folder
from yatt.config.schema import RunConfig
from yatt.config.site import StageSection
from yatt.core.gpus.placement import ROLLOUT, TRAINER, genrm_role, placement_of
from yatt.errors import words_of

LOOK_S, CLOSE_S = 0.1, 5.0
SAID_S = 1.0
"""Copies that took less time are not reported."""

H_S = 3600.0

TRIAL_S = 60.0
"""Time limit of the process that tries the unpacked environment."""

_TRIAL = "import sys, yatt.control.__main__; print(sys.prefix)"


class UnusableEnvironment(Exception):
    """The unpacked environment is not the one that this process runs in."""


def refuse_other_environments() -> None:
    """Raises UnusableEnvironment unless this process runs in a virtual environment, which can be moved."""
    if sys.prefix == sys.base_prefix:
        raise UnusableEnvironment(f"{sys.prefix} is not a virtual environment")


def python_of_copy(copy: Path, env: Mapping[str, str]) -> str:
    """Returns the interpreter of an unpacked copy of this process's environment.

    Raises:
        UnusableEnvironment: the copy has other packages, or its interpreter does not start there.
        OSError: a folder cannot be read.
    """
    original, root = Path(sys.prefix), _root_of(copy)
    here, there = _packages(original), _packages(root)
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise UnusableEnvironment(
            f"the archive was made of another state of {original} ({', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}); make it again"
        )
    python = root / "bin" / Path(sys.executable).name
    try:
        done = subprocess.run(
            [python, "-P", "-c", _TRIAL],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnusableEnvironment(f"its {python.name} cannot be run: {error}") from error
    if done.returncode or done.stdout.strip() != os.path.abspath(root):
        last = (done.stderr.strip().splitlines() or [f"it belongs to {done.stdout.strip()}"])[-1]
        raise UnusableEnvironment(f"its {python.name} does not work: {last}")
    return str(python)


def _root_of(copy: Path) -> Path:
    """Returns the environment's folder: the archive's own root, or its only folder.

    Raises:
        UnusableEnvironment: it is neither.
        OSError: the copy cannot be read.
    """
    for folder in (
        copy,
        *(path for path in sorted(copy.iterdir()) if path.is_dir() and not path.is_symlink()),
    ):
        if (folder / "pyvenv.cfg").is_file():
            return folder
    raise UnusableEnvironment("the archive has no pyvenv.cfg at its root or in a folder there")


def _packages(prefix: Path) -> dict[str, int]:
    """Returns when each package was installed, in seconds since 1970, by the name of its folder."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        record.parent.name: int(record.stat().st_mtime)
        for record in (prefix / "lib" / version / "site-packages").glob("*.dist-info/RECORD")
    }


def fault_of(stage: StageSection, env: Mapping[str, str]) -> str:
    """Returns why this node cannot copy, or would not gain by it; empty if staging works."""
    if not stage.folder:
        return ""
    try:
        own = _copies_of(stage, env, lambda: False).folder
    except (OSError, KeyError, ValueError) as error:
        return f"stage.folder {stage.folder} cannot be used ({_words(error)})"
    if stage.environment and not os.access(stage.environment, os.R_OK):
        return f"stage.environment {stage.environment} cannot be read"
    kind = mount_of(os.path.realpath(own), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    if kind in MEMORY:
        return f"stage.folder {own.parent} is in memory ({kind}): copies count against the memory of the job"
    if kind.removeprefix("fuse.") not in SHARED:
        return ""
    return f"stage.folder {own.parent} is on {kind}, which is not a local disk of the node"


def _copies_of(stage: StageSection, env: Mapping[str, str], is_over: Callable[[], bool]) -> LocalCopies:
    """Raises OSError, KeyError or ValueError if the folder cannot be used."""
    return LocalCopies.within(Path(Template(stage.folder).substitute(env)), is_over)


def sources_of(config: RunConfig, stage: StageSection, node: int) -> tuple[str, ...]:
    """Returns the files and folders that the workers of this node read."""
    placement, found = placement_of(config), list[str]()
    roles = {role for slab in placement.slabs_by_node.get(node, ()) for role in placement.roles_of(slab)}
    if "models" in stage.what:
        found += [config.model.path] if roles & {TRAINER, ROLLOUT} else []
        if config.has_critic and config.critic.path and TRAINER in roles:
            found.append(config.critic.path)
        found += [genrm.model for genrm in config.engine_genrms if genrm_role(genrm.name) in roles]
    if "data" in stage.what and node in placement.trainer_nodes:
        found += [*config.data.train_files, *config.data.val_files]
    return tuple(dict.fromkeys(found))


def media_folders(config: RunConfig, stage: StageSection) -> tuple[str, ...]:
    """Returns the folders from which every node's media process reads. A store to which environments add
    pictures during the run is none: it is not the same when its copy ends."""
    data = config.data
    if "media" not in stage.what or not data.media_store:
        return ()
    stored = [] if config.environment.images else [data.media_store]
    return (*([data.media_root] if data.media_root and is_folder(data.media_root) else []), *stored)


@dataclass(slots=True)
class Staging:
    """Copies made and used by one process of this node.

    Attributes:
        env: variables for `stage.folder`.
        say: prints one line for the user.
        is_told: whether this start of the job has to end.
    """

    stage: StageSection
    env: Mapping[str, str]
    say: Callable[[str], None]
    is_told: Callable[[], bool]
    _copies: LocalCopies | None = None
    _made: dict[str, str] = field(default_factory=dict)
    _python: str = sys.executable
    _at: str = ""
    _until_s: float | None = None
    _is_over: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the site file enables staging."""
        return bool(self.stage.folder)

    def run(self, sources: Iterable[str], media: Iterable[str] = ()) -> dict[str, str]:
        """Copies sources, then folders of media, that have no copy yet; returns the path of each copy."""
        if wanted := (*sources, *media):
            self._in_time(partial(self._copy, wanted, frozenset(media)))
        return dict(self._made)

    def local_python(self) -> str:
        """Returns the interpreter of the environment's copy on this node; this process's own if it has none.

        The copy is made if it is missing.
        """
        if self.stage.environment:
            self._in_time(self._unpack)
        return self._python

    def _in_time(self, work: Callable[[], None]) -> None:
        """Runs `work` unless staging is off. All calls together have `stage.limit_s`."""
        if not self.is_wanted or self._is_over:
            return
        raise_soft_limit()  # each copy is locked by a descriptor
        now_s = clock.monotonic_s()
        self._until_s = self._until_s or now_s + self.stage.limit_s
        if not self._within(self._until_s - now_s, work, self.is_told):
            self._is_over = True
            if not self.is_told():
                limit = f"{self.stage.limit_s} s (stage.limit_s)"
                self.say(f"{self._at} was not copied within {limit}; it is read from its original place")

    def close(self) -> None:
        """Releases the copies, and removes those that are not to be kept, within `CLOSE_S`."""
        if self._copies is not None:
            keep = bool(self.stage.keep_h)
            self._within(CLOSE_S, partial(self._copies.release, keep=keep), lambda: False)

    def _within(self, limit_s: float, work: Callable[[], None], is_told: Callable[[], bool]) -> bool:
        """Runs `work` in a thread, so that a disk that hangs blocks nothing; returns whether it ended in
        time."""
        thread = threading.Thread(target=self._guarded, args=(work,), name="staging", daemon=True)
        until_s = clock.monotonic_s() + limit_s
        try:
            thread.start()
        except RuntimeError as error:  # no thread could be started
            self.say(f"nothing is copied: {error}")
            return True
        while thread.is_alive() and clock.monotonic_s() < until_s and not is_told():
            thread.join(LOOK_S)
        return not thread.is_alive()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - staging is optional
            self.say(f"{self._at} is not copied ({words_of(error)}); it is read from its original place")

    def _opened(self) -> LocalCopies | None:
        """Returns the copies on this node, pruned once; None after one line if the folder cannot be used."""
        if self._copies is not None:
            return self._copies
        self._at = self.stage.folder
        try:
            copies = _copies_of(self.stage, self.env, lambda: self._is_over)
            copies.prune(self.stage.keep_h * H_S)
        except (OSError, KeyError, ValueError) as error:
            self.say(f"stage.folder {self.stage.folder} cannot be used ({_words(error)}); nothing is copied")
            self._is_over = True
            return None
        self._copies = copies
        return copies

    def _copy(self, sources: tuple[str, ...], media: frozenset[str]) -> None:
        if (copies := self._opened()) is None:
            return
        for self._at in sources:
            try:
                take = copies.take_media if self._at in media else copies.take
                self._made[self._at] = self._taken(take, self._at)
            except GivenUp:
                return
            except OSError as error:
                self.say(f"{self._at} is not copied ({_words(error)}); it is read from its original place")

    def _unpack(self) -> None:
        if (copies := self._opened()) is None:
            return
        self._at = f"the environment {sys.prefix}"
        try:
            refuse_other_environments()
            copy = self._taken(copies.unpack, self.stage.environment)
            self._python = python_of_copy(Path(copy), self.env)
        except GivenUp:
            return
        except (OSError, UnusableEnvironment) as error:
            self.say(
                f"{self._at} is not used from stage.environment, {self.stage.environment}: {_words(error)}"
            )

    def _taken(self, take: Callable[[Path], Path], source: str) -> str:
        began_s = clock.monotonic_s()
        copy = take(Path(source))
        if (took_s := clock.monotonic_s() - began_s) > SAID_S:
            self.say(f"{source} was copied to {copy} in {took_s:.0f} s")
        return str(copy)


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the environment variable {error.args[0]} is not set"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def main() -> int:
    """Copies one file and prints the path of the copy: ``STAGE IMAGE``, the section as JSON."""
    parser = argparse.ArgumentParser(prog="yatt.launch.node.staging")
    parser.add_argument("stage")
    parser.add_argument("image")
    arguments = parser.parse_args()
    stage = StageSection(**json.loads(arguments.stage))

    def say(text: str) -> None:
        sys.stderr.write(f"yatt: {os.environ.get('SLURMD_NODENAME', 'a node')}: {text}\n")

    made = Staging(stage, os.environ, say, lambda: False).run([arguments.image])
    # In one write, because srun mixes the output of tasks.
    os.write(sys.stdout.fileno(), f"{made.get(arguments.image, arguments.image)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
