"""Which errors of a store's driver may pass."""

import errno
import socket

import pytest

from yatt.checkpoint.store_errors import may_pass


class ClientConnectionError(OSError):
    """As aiohttp's, which carries the number of a failed look-up of a name, below 0."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ClientConnectionError(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_what_may_pass_is_known_by_its_number_or_its_name(error: OSError, passes: bool) -> None:
    assert may_pass(error) is passes
