"""Errors of stores, named once: is something not there, may the same call work again soon, or is it for good?

A folder raises OSError. Drivers of object stores raise types of their own, which are told by name, so that no
driver is imported here, and HTTP answers, which are told by their error code, else by their status.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from yatt.adapters.patience import PASSING
from yatt.errors import CheckpointError, StoreUnreachable, YattError

NETWORK = PASSING | {errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETRESET}
STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP answers that mean: later."""

LATER_STATUSES = frozenset({429, 503})
LATER_CODES = frozenset(
    {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests",
     "RequestLimitExceeded", "BandwidthLimitExceeded"}
)  # fmt: skip
"""Answers of a store under load, which it may give for some names and not for others."""

NO_UPLOAD = "NoSuchUpload"
"""S3 has given up an upload, or a lost reply hid that it is complete; the file is written anew."""

CODES = LATER_CODES | {
    NO_UPLOAD, "InternalError", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted",
    "IncompleteBody",
}  # fmt: skip
"""Error codes of S3 that mean: again. Some come with a status that else is for good (400, 409, even 200)."""

NAMES = frozenset(
    {
        "ConnectionError", "TimeoutError", "HTTPClientError", "IncompleteReadError", "ResponseStreamingError",
        "ClientConnectionError", "ClientPayloadError", "ServerTimeoutError", "FSTimeoutError",
        "ProtocolError", "Timeout", "ChunkedEncodingError", "ContentDecodingError",
        "ServiceRequestError", "ServiceResponseError", "TransportError",
    }
)  # fmt: skip
"""Errors of a connection: of Python, botocore, aiohttp, fsspec, urllib3, requests, azure and google."""


@contextlib.contextmanager
def reaching(place: object, *, for_writing: bool = False) -> Iterator[None]:
    """Tells what is not there from what cannot be reached.

    Args:
        for_writing: nothing has to be there: whatever is missing is the store's failure.

    Raises:
        CheckpointError: there is nothing of this name.
        StoreUnreachable: any other failure; it says whether it may pass.
    """
    try:
        yield
    except YattError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        if not for_writing:
            raise CheckpointError(f"{place}: {error.strerror or 'is not there'}") from error
        raise StoreUnreachable(f"{place}: {error}", is_passing=may_pass(error)) from error
    except Exception as error:  # drivers raise types of their own
        raise StoreUnreachable(f"{place}: {error or repr(error)}", is_passing=may_pass(error)) from error


def may_pass(error: BaseException) -> bool:
    """Whether the same call may work again soon. An HTTP answer tells more than what a driver made of it, and
    its error code more than its status."""
    chain = _chain(error)
    for each in chain:
        if _code(each) in CODES:
            return True
        if (status := _status(each)) is not None:
            return status in STATUSES
    return any(_is_passing(each) for each in chain)


def is_told_to_wait(error: BaseException) -> bool:
    """Whether the store is there and has said: later. That says nothing about the file asked for."""
    return any(_status(each) in LATER_STATUSES or _code(each) in LATER_CODES for each in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what it came from, and so on."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return error.errno in NETWORK
    return any(kind.__name__ in NAMES for kind in type(error).__mro__)


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    found = response.get("Error", {}) if isinstance(response, dict) else {}
    return str(found.get("Code", ""))


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error carries: botocore's response, aiohttp's `status`, gcsfs's `code`."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return _as_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    places = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((found for place in places if (found := _as_status(place)) is not None), None)


def _as_status(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdigit() and 400 <= int(text) < 600 else None
