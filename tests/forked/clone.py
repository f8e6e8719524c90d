"""A fork whose child is a child of this process's parent: CLONE_PARENT of Linux."""

import ctypes
import os
import platform
import signal

CLONE_PARENT, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID = 0x8000, 0x1000000, 0x200000
CALLS = {"x86_64": 56, "aarch64": 220}
_THREAD_BYTES = 1024
"""Within so many bytes glibc's description of a thread has the thread's id."""


def fork_sibling() -> int:
    """As `os.fork`, but the child is this process's sibling. This process has one thread.

    Raises:
        OSError: the kernel refuses, or another kind of processor.
    """
    machine = platform.machine()
    if machine not in CALLS:
        raise OSError(f"unknown processor {machine}")
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter's lock
    place = _place_of_thread_id()
    flags = CLONE_PARENT | (CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID if place else 0) | signal.SIGCHLD
    words = [ctypes.c_long(0)] * 5
    words[0] = ctypes.c_long(flags)
    words[3 if machine == "x86_64" else 4] = ctypes.c_long(place)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(CALLS[machine]), *words))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return pid


def _place_of_thread_id() -> int:
    """Address where glibc keeps this thread's id, which it reads to signal itself; 0 if it is not found."""
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    begin = libc.pthread_self()
    numbers = (ctypes.c_int32 * (_THREAD_BYTES // 4)).from_address(begin)
    found = [index for index, number in enumerate(numbers) if number == libc.gettid()]
    return int(begin) + 4 * found[0] if len(found) == 1 else 0
