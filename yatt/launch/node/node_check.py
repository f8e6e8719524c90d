"""The check of a node before an attempt starts on it.

It checks memory, folders, a network connection to itself, GPUs, and runs the site's own check. Any of these
may hang on a broken node, so all run in a thread with a time limit. A check that fails because of a bug in
yatt does not exclude the node.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yatt import clock
from yatt.adapters.machine.nvml import Nvml
from yatt.adapters.processes import bound
from yatt.adapters.processes.process import spawn_to
from yatt.config.site import SiteConfig
from yatt.control.gpus.processes import scratch
from yatt.core.attempts.exits import describe_exit
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, ConfigError, YattError, words_of
from yatt.launch.node.device import device_of
from yatt.launch.node.network import listening_place, own_address
from yatt.printable import printable

WRITTEN_BYTES = 1 << 20
LOOPBACK_S = 10.0
MEMORY_LEFT = 0.5
"""Fraction of the memory granted by Slurm that must be free; with less, other processes still hold it."""

FREE_S, LOOK_S = 20.0, 1.0
"""Longest wait for the previous attempt to free GPUs and memory, and the polling interval."""

KILLED_S = 5.0

SAID_BYTES, SHOWN_BYTES = 4096, 200
"""Bytes of the site check's output that are kept, and bytes of its last line that are shown as the reason."""

_SETTING = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors of a folder that point to a wrong name rather than to a broken node."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a node is left out. Exit code 2 means that the site file is probably wrong."""

    why: str
    exit_code: int = EXIT_FAILED


@dataclass(slots=True)
class NodeCheck:
    """The check of one node.

    Attributes:
        folders: the scratch folder and the shared-memory folder.
        device: cpu, cuda or auto; the check replaces auto by the result.
        num_gpus: number of GPUs that this node needs.
    """

    site: SiteConfig
    folders: tuple[Path, Path]
    device: str
    num_gpus: int
    env: Mapping[str, str]
    _faults: list[Unfit] = field(default_factory=list)
    _at: str = ""
    _is_over: bool = False
    _child: "subprocess.Popen[bytes] | None" = None

    def run(self) -> Unfit | None:
        """Runs the check; returns the fault of this node, or None."""
        limit_s = float(self.site.node_check.limit_s)
        thread = threading.Thread(target=self._look, name="node-check", daemon=True)
        thread.start()
        thread.join(limit_s)
        faults = list(self._faults)
        if thread.is_alive():
            faults.append(Unfit(f"the check of {self._at} was not done within {limit_s:g} s"))
            self._give_up(thread)
        if not faults:
            return None
        is_setting = all(each.exit_code == EXIT_USER_MISTAKE for each in faults)
        why = printable("; ".join(each.why for each in faults))
        return Unfit(why, EXIT_USER_MISTAKE if is_setting else EXIT_FAILED)

    def _give_up(self, thread: threading.Thread) -> None:
        """Stops the check and kills the process group of the site's own check."""
        self._is_over = True
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            thread.join(KILLED_S)

    def _look(self) -> None:
        looks: tuple[tuple[str, Callable[[], Iterator[Unfit]]], ...] = (
            ("its folders", self._folders),
            ("its memory", self._memory),
            ("its network", self._network),
            ("its GPUs", self._gpus),
            ("node_check.command", self._command),
        )
        for self._at, look in looks:
            if self._is_over:
                return
            try:
                self._faults.extend(look())
            except (YattError, OSError) as error:
                self._faults.append(Unfit(f"{self._at}: {error}", getattr(error, "exit_code", EXIT_FAILED)))
            except Exception as error:  # noqa: BLE001 - a bug in the check, not a fault of the node
                sys.stderr.write(f"yatt: the check of {self._at} failed: {words_of(error)}\n")

    def _memory(self) -> Iterator[Unfit]:
        granted = self.env.get("SLURM_MEM_PER_NODE", "")
        if not granted.isdigit():
            return
        until_s = clock.monotonic_s() + FREE_S
        while (free := _free_mib()) < MEMORY_LEFT * int(granted):
            if clock.monotonic_s() >= until_s:
                yield Unfit(f"only {free} MiB of memory are free; the job was granted {granted} MiB")
                return
            time.sleep(LOOK_S)

    def _folders(self) -> Iterator[Unfit]:
        scratch.remove_folders_of_the_dead(
            self.folders
        )  # first remove what a killed step left; that is not a fault of the node
        for folder in dict.fromkeys(self.folders):
            try:
                _write_in(folder)
            except _SETTING as error:
                yield Unfit(f"{folder} cannot be written to ({error.strerror})", EXIT_USER_MISTAKE)
            except OSError as error:
                yield Unfit(f"{folder} cannot be written to ({error.strerror})")
        wanted, disk = self.site.node_check.free_gb, self.folders[0]
        if wanted and (free := shutil.disk_usage(disk).free >> 30) < wanted:
            yield Unfit(f"{disk} has {free} GiB free; node_check.free_gb requires {wanted}")

    def _network(self) -> Iterator[Unfit]:
        address = own_address(self.site, self.env)
        with listening_place(address) as server:
            try:
                socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_S).close()
            except OSError as error:
                yield Unfit(f"it cannot reach itself at {address} ({error})")

    def _gpus(self) -> Iterator[Unfit]:
        self.device = device_of(self.device)
        if self.device != "cuda":
            return
        given = self.env.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(self.num_gpus)] if given is None else given.split(",")
        try:
            nvml = Nvml([name.strip() for name in names if name.strip()][: self.num_gpus])
        except ConfigError as error:
            is_missing = isinstance(error.__cause__, ImportError)
            yield Unfit(str(error), EXIT_USER_MISTAKE if is_missing else EXIT_FAILED)
            return
        until_s = clock.monotonic_s() + FREE_S
        while (faults := nvml.faults()) and clock.monotonic_s() < until_s:
            time.sleep(LOOK_S)
        nvml.close()
        yield from map(Unfit, faults)

    def _command(self) -> Iterator[Unfit]:
        command = self.site.node_check.command
        if not command:
            return
        output = os.memfd_create("yatt-check")  # the run folder and the local disk may be broken
        try:
            # Marked, so that it gets no signals meant for the controller, and all of its processes are ended.
            env = {**self.env, bound.MARK: "node-check"}
            self._child = spawn_to(list(command), env=env, output=output)
            code = self._child.wait()
            said = os.pread(output, SAID_BYTES, max(0, os.fstat(output).st_size - SAID_BYTES))
        finally:
            os.close(output)
        if code:
            lines = said.decode(errors="replace").splitlines()
            sys.stderr.write("".join(f"yatt: node_check.command: {printable(line)}\n" for line in lines))
            last = lines[-1][:SHOWN_BYTES] if lines else "it printed nothing"
            ended = EXIT_USER_MISTAKE if code == bound.NOT_STARTED else EXIT_FAILED
            yield Unfit(f"{command[0]}, {describe_exit(code)}: {last}", ended)


def _free_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:"))


def _write_in(folder: Path) -> None:
    """Writes, reads and removes a file.

    Raises:
        OSError: one of these fails.
    """
    path = folder / f"yatt-check-{os.getpid()}-{threading.get_ident()}"
    data = os.urandom(WRITTEN_BYTES)
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != data:
            raise OSError(0, "the data read differs from the data written")
    finally:
        path.unlink(missing_ok=True)
