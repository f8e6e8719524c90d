"""What /proc shows as the command line and environment of this process, changed to other words.

The kernel reads them from memory of the process. `PR_SET_MM_MAP` names another place; it needs no privilege
(Linux 3.18, with CONFIG_CHECKPOINT_RESTORE, which the kernels of all distributions have).
"""

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_MM, PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
_shown: list[mmap.mmap] = []


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of <linux/prctl.h>."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def show_words(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Lets /proc/PID/cmdline and /proc/PID/environ of this process show these words.

    Raises:
        OSError: the kernel refuses.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(words), begin + len(words) + len(variables)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    code_start, code_end, stack, data_start, data_end, brk = _own_places()
    wanted = _MemoryMap(
        code_start, code_end, data_start, data_end, brk, libc.sbrk(0), stack, begin, middle, middle, end,
        0, 0, _NO_FILE,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(wanted))
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), size, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _shown[:] = [memory]  # as long as the process lives


def _own_places() -> tuple[int, ...]:
    """Returns startcode, endcode, startstack, start_data, end_data and start_brk; see proc_pid_stat(5)."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return tuple(int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47))
