"""A shared filesystem with bad weather: what Python does in the run folder stands still, or fails, while
told so.

Python imports this module in every process that has its folder in PYTHONPATH. `YATT_SOAK_RUN` names the run
folder, `YATT_SOAK_WEATHER` a file elsewhere: while that holds ``stall`` every call waits, while it holds
``error`` every call fails, with one error of several or that of `YATT_SOAK_ERROR`; with ``error WORD`` only
on paths that have the word. A file beside it, with `.met` at the end of its name, has a line a failure: which
process met it, and where.
"""

import builtins
import errno
import functools
import io
import os
import random
import time

RUN, WEATHER = os.environ.get("YATT_SOAK_RUN", ""), os.environ.get("YATT_SOAK_WEATHER", "")
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ESHUTDOWN)
if "YATT_SOAK_ERROR" in os.environ:
    ERRORS = (int(os.environ["YATT_SOAK_ERROR"]),)
CALLS = (
    "open", "write", "replace", "rename", "link", "unlink", "remove", "listdir", "scandir", "stat", "lstat",
    "mkdir", "fsync", "utime", "rmdir",
)  # fmt: skip
_open_file, _files = io.open, {}


def endure(place):
    """Wait or fail if `place`, a path or a descriptor, is in the run folder."""
    path = _files.get(place) if isinstance(place, int) else place
    try:
        name = os.fsdecode(path)
    except TypeError:
        return
    if not name.startswith(RUN):
        return
    while True:
        try:
            with _open_file(WEATHER) as file:
                weather, _, word = file.read().partition(" ")
        except FileNotFoundError:
            return
        if word not in name:
            return
        if weather != "stall":
            break
        time.sleep(0.05)
    if weather == "error":
        number = random.choice(ERRORS)
        with _open_file(WEATHER + ".met", "a") as met:
            met.write(f"{os.getpid()} {name}\n")
        raise OSError(number, os.strerror(number), name)


def exposed(call, *, gives_descriptor=False):
    @functools.wraps(call)
    def wrapper(place, *arguments, **more):
        endure(place)
        found = call(place, *arguments, **more)
        if gives_descriptor:
            _files[found] = os.fsdecode(place)
        return found

    return wrapper


if RUN and WEATHER:
    for each in CALLS:
        setattr(os, each, exposed(getattr(os, each), gives_descriptor=each == "open"))
    io.open = builtins.open = exposed(_open_file)
