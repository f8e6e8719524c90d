"""Host memory that is registered with CUDA (page-locked), so that copies between it and a GPU are fast.

CUDA registers addresses, not mappings: an address that stays registered after its memory is unmapped makes
the next registration there fail. So a registration ends before its memory is unmapped. CUDA also keeps the
error of a failed call and reports it at the next kernel, so a failed call's error is taken back here.

Without registration copies are right, but slow: typically 3 to 10 GB/s instead of 40 to 50 (not measured).
"""

import contextlib
import logging
import weakref
from typing import Protocol

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)

WRITABLE_FLAGS = 0
"""cudaHostRegisterDefault."""
READ_ONLY_FLAGS = 8
"""cudaHostRegisterReadOnly: the only way to register memory that is mapped without write access."""


CURE = (
    "Raise the limit of locked memory (`ulimit -l`, LimitMEMLOCK of slurmd, `--ulimit memlock=-1` of a "
    "container)."
)
CURES = {801: "This driver or GPU cannot do it; there is no cure."}
"""By CUDA's error code; 801 is cudaErrorNotSupported."""


class HostMemoryCalls(Protocol):
    """CUDA's calls for host memory. Their results are CUDA's error codes; 0 is success."""

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        """cudaHostRegister."""

    def unregister(self, address: int) -> int:
        """cudaHostUnregister."""

    def clear_error(self) -> None:
        """Takes the error of a failed call, which CUDA would report at the next kernel."""


class CudaHostMemory:
    """The calls of the CUDA runtime that torch uses."""

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        """See HostMemoryCalls.register."""
        return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        """See HostMemoryCalls.unregister."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def clear_error(self) -> None:
        """See HostMemoryCalls.clear_error. torch does not export cudaGetLastError, and a second copy of the
        library would have an error of its own; but torch's check of a kernel's launch calls it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


class MemoryRegistrar:
    """Registers host memory with CUDA, each memory until its owner ends.

    Args:
        calls: CUDA's calls; tests have stand-ins.
    """

    def __init__(self, calls: HostMemoryCalls | None = None) -> None:
        self._calls = calls or CudaHostMemory()
        self._has_warned = False

    def register(self, memory: Tensor, owner: object, *, read_only: bool) -> bool:
        """Registers memory until `owner` is freed; without success, logs one warning, and copies are slow.

        Args:
            memory: contiguous, on the host.
            owner: an object, the only one of this memory, that keeps it mapped. It is weakly referenced.
            read_only: the GPU only reads it. Memory that is mapped without write access needs it.

        Returns:
            Whether it is registered.
        """
        if not memory.numel():
            return False
        address, size_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
        flags = READ_ONLY_FLAGS if read_only else WRITABLE_FLAGS
        if code := self._calls.register(address, size_bytes, flags):
            self._calls.clear_error()
            self._warn(code, size_bytes)
            return False
        # A finalizer runs before its object's attributes are freed. A process that ends needs none: its
        # registrations end with its CUDA context, which may be gone before Python's exit handlers run.
        weakref.finalize(owner, _unregister, self._calls, address).atexit = False
        return True

    def _warn(self, code: int, size_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%d MiB of host memory could not be registered with CUDA (cudaHostRegister: error %d): "
                "copies between it and the GPU are slow. %s",
                size_bytes >> 20,
                code,
                CURES.get(code, CURE),
            )


def _unregister(calls: HostMemoryCalls, address: int) -> None:
    if code := calls.unregister(address):
        calls.clear_error()
        _LOG.warning("host memory stays registered with CUDA (cudaHostUnregister: error %d)", code)
