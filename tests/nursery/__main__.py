"""A worker that says what it is, then does what its last argument says: exit, sleep or fail."""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path


def parent_death_signal() -> int:
    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    return number.value


def main() -> None:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list", "Umask", "Threads")
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # of the listing itself
            continue
    told = {
        "is_own_session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "parent": os.getppid(),
        "state": {name: status[name].strip() for name in names},
        "nice": int(fields[16]),
        "limits": [resource.getrlimit(each) for each in range(16)],
        "parent_death": parent_death_signal(),
        "streams": [
            (each.encoding, each.errors, each.line_buffering, each.write_through, each.fileno())
            for each in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "descriptors": descriptors,
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode().split("\0"),
        "environ": sorted(Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")),
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": sys.modules["__main__"].__spec__.name if sys.modules["__main__"].__spec__ else None,
        "name": __name__,
        "exe": os.readlink("/proc/self/exe"),
        "comm": Path("/proc/self/comm").read_text(),
        "cwd": os.getcwd(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "is_main_thread": threading.current_thread() is threading.main_thread(),
    }
    drawn = [random.random()]
    if numpy_random := sys.modules.get("numpy.random"):
        drawn.append(float(numpy_random.random()))
    if torch := sys.modules.get("torch"):
        drawn.append(float(torch.rand(1, dtype=torch.float64)))
    sys.stdout.write(json.dumps({"told": told, "drawn": drawn}) + "\n")
    sys.stdout.flush()
    if sys.argv[-1] == "sleep":
        for _ in range(6000):  # a signal just before a sleep would be seen after it
            time.sleep(0.1)
    if sys.argv[-1] == "fail":
        raise ValueError("as it was told to")
    sys.exit(int(sys.argv[-1]))


if __name__ == "__main__":
    main()
