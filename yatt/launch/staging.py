"""Models, data and container images are copied to a node's own disk before an attempt, and read there.

It is for speed only: what cannot be copied, or not in time, is read from where it is, and a line says so.
The step of a node copies what this node's roles read; the image is copied by a step of its own, outside of
the container (`yatt.launch.backends.images`), whose program this module is.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template

from yatt import clock
from yatt.adapters.descriptors import raise_soft_limit
from yatt.adapters.local_copy import GivenUp, LocalCopies
from yatt.adapters.local_folder import MEMORY, SHARED, mount_of
from yatt.config.schema import RunConfig
from yatt.config.site import StageSection
from yatt.core.placement import ROLLOUT, TRAINER, genrm_role, place
from yatt.errors import words_of

LOOK_S, CLOSE_S = 0.1, 5.0
SAID_S = 1.0
"""A copy that was there already is not worth a line."""

H_S = 3600.0


def fault_of(stage: StageSection, env: Mapping[str, str]) -> str:
    """Why this node would copy nothing, or gain nothing by it; empty if all is well."""
    if not stage.folder:
        return ""
    try:
        own = _copies_of(stage, env, lambda: False).folder
    except (OSError, KeyError, ValueError) as error:
        return f"stage.folder {stage.folder} cannot be used ({_words(error)})"
    kind = mount_of(os.path.realpath(own), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    if kind in MEMORY:
        return (
            f"stage.folder {own.parent} is in memory ({kind}): copies count against what the job is granted"
        )
    if kind.removeprefix("fuse.") not in SHARED:
        return ""
    return f"stage.folder {own.parent} is on {kind}, which is no disk of the node's own"


def _copies_of(stage: StageSection, env: Mapping[str, str], is_over: Callable[[], bool]) -> LocalCopies:
    """Raises: OSError, KeyError, ValueError: the folder cannot be used."""
    return LocalCopies.within(Path(Template(stage.folder).substitute(env)), is_over)


def sources_of(config: RunConfig, stage: StageSection, node: int) -> tuple[str, ...]:
    """The files and folders that the workers of this node read."""
    placement, found = place(config), list[str]()
    roles = {role for slab in placement.slabs_by_node.get(node, ()) for role in placement.roles_of(slab)}
    if "models" in stage.what:
        found += [config.model.path] if roles & {TRAINER, ROLLOUT} else []
        found += [genrm.model for genrm in config.genrms if genrm_role(genrm.name) in roles]
    if "data" in stage.what and node in placement.trainer_nodes:
        found += [*config.data.train_files, *config.data.val_files]
    return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class Staging:
    """The copies that one process of this node makes and uses.

    Attributes:
        env: variables for `stage.folder`.
        say: takes a line for people.
        is_told: whether this start is being ended.
    """

    stage: StageSection
    env: Mapping[str, str]
    say: Callable[[str], None]
    is_told: Callable[[], bool]
    _copies: LocalCopies | None = None
    _made: dict[str, str] = field(default_factory=dict)
    _at: str = ""
    _is_over: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the site asks for copies at all."""
        return bool(self.stage.folder)

    def run(self, sources: Iterable[str]) -> dict[str, str]:
        """Copy them, unless they are there; gives the copy of each source that has one now."""
        wanted = tuple(sources)
        if not self.is_wanted or not wanted:
            return {}
        raise_soft_limit()  # each copy is locked by a descriptor
        if not self._within(self.stage.limit_s, partial(self._copy, wanted), self.is_told):
            self._is_over = True
            if not self.is_told():
                limit = f"{self.stage.limit_s} s (stage.limit_s)"
                self.say(f"{self._at} was not copied within {limit}; it is read from where it is")
        return dict(self._made)

    def close(self) -> None:
        """The copies are not used any more; those that shall not be kept are removed, if that is quick."""
        if self._copies is not None:
            keep = bool(self.stage.keep_h)
            self._within(CLOSE_S, partial(self._copies.release, keep=keep), lambda: False)

    def _within(self, limit_s: float, work: Callable[[], None], is_told: Callable[[], bool]) -> bool:
        """Whether `work` was done in time, in a thread: a disk that stands still holds nobody."""
        thread = threading.Thread(target=self._guarded, args=(work,), name="staging", daemon=True)
        until_s = clock.monotonic_s() + limit_s
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            self.say(f"nothing is copied: {error}")
            return True
        while thread.is_alive() and clock.monotonic_s() < until_s and not is_told():
            thread.join(LOOK_S)
        return not thread.is_alive()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (it is for speed only)
            self.say(f"{self._at} is not copied ({words_of(error)}); it is read from where it is")

    def _copy(self, sources: tuple[str, ...]) -> None:
        self._at = self.stage.folder
        try:
            self._copies = _copies_of(self.stage, self.env, lambda: self._is_over)
            self._copies.prune(self.stage.keep_h * H_S)
        except (OSError, KeyError, ValueError) as error:
            self.say(f"stage.folder {self.stage.folder} cannot be used ({_words(error)}); nothing is copied")
            return
        for self._at in sources:
            try:
                self._take(self._copies, self._at)
            except GivenUp:
                return
            except OSError as error:
                self.say(f"{self._at} is not copied ({_words(error)}); it is read from where it is")

    def _take(self, copies: LocalCopies, source: str) -> None:
        began_s = clock.monotonic_s()
        copy = copies.take(Path(source))
        self._made[source] = str(copy)
        if (took_s := clock.monotonic_s() - began_s) > SAID_S:
            self.say(f"{source} was copied to {copy} in {took_s:.0f} s")


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no variable {error.args[0]}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def main() -> int:
    """Copy one file, and print where to: ``STAGE IMAGE``, the section as JSON."""
    parser = argparse.ArgumentParser(prog="yatt.launch.staging")
    parser.add_argument("stage")
    parser.add_argument("image")
    arguments = parser.parse_args()
    stage = StageSection(**json.loads(arguments.stage))

    def say(text: str) -> None:
        sys.stderr.write(f"yatt: {os.environ.get('SLURMD_NODENAME', 'a node')}: {text}\n")

    made = Staging(stage, os.environ, say, lambda: False).run([arguments.image])
    # At once: srun mixes what the tasks write.
    os.write(sys.stdout.fileno(), f"{made.get(arguments.image, arguments.image)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
