"""Classifies errors of stores: a missing name, a temporary failure, or a permanent one.

A folder raises OSError. Drivers of object stores raise their own types, which are recognised by name, so that
no driver is imported here, and HTTP errors, which are recognised by their error code, else by their status.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from yatt.adapters.files.patience import PASSING
from yatt.credentials import redacted_text
from yatt.errors import CheckpointError, StoreUnreachable, YattError

NETWORK = PASSING | {errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETRESET}
STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that mean: retry later."""

LATER_STATUSES = frozenset({429, 503})
LATER_CODES = frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
    }
)
"""Answers of a store under load, which it may give for some names and not for others."""

NO_UPLOAD = "NoSuchUpload"
"""S3 has dropped an upload, or a lost reply hid its completion; the file is written again."""

CODES = LATER_CODES | {
    NO_UPLOAD,
    "InternalError",
    "RequestTimeout",
    "ConditionalRequestConflict",
    "OperationAborted",
    "IncompleteBody",
}
"""Error codes of S3 that mean: retry. Some have a status that is otherwise permanent (400, 409, even 200)."""

NAMES = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ServerTimeoutError",
        "FSTimeoutError",
        "ProtocolError",
        "Timeout",
        "ChunkedEncodingError",
        "ContentDecodingError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TransportError",
    }
)
"""Connection errors of Python, botocore, aiohttp, fsspec, urllib3, requests, azure and google."""


@contextlib.contextmanager
def errors_of_store(place: object, *, for_writing: bool = False) -> Iterator[None]:
    """Distinguishes a missing name from an unreachable store.

    Args:
        for_writing: no name has to exist: whatever is missing is the store's failure.

    Raises:
        CheckpointError: the name does not exist.
        StoreUnreachable: any other failure, and whether it may be temporary.
    """
    try:
        yield
    except YattError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        if not for_writing:
            raise CheckpointError(f"{place}: {error.strerror or 'is not there'}") from error
        raise StoreUnreachable(_told(place, error), is_passing=may_pass(error)) from error
    except Exception as error:  # drivers have their own error types
        raise StoreUnreachable(_told(place, error), is_passing=may_pass(error)) from error


def _told(place: object, error: Exception) -> str:
    """Returns the message, with the store's error code: drivers leave it out."""
    text, code = str(error) or repr(error), next(filter(None, map(_code, _chain(error))), "")
    return redacted_text(f"{place}: {text} ({code})" if code and code not in text else f"{place}: {text}")


def may_pass(error: BaseException) -> bool:
    """Whether the failure may be temporary. An HTTP answer is more reliable than the driver's exception, and
    its error code more than its status."""
    chain = _chain(error)
    for each in chain:
        if _code(each) in CODES:
            return True
        if (status := _status(each)) is not None:
            return status in STATUSES
    return any(_is_passing(each) for each in chain)


def is_told_to_wait(error: BaseException) -> bool:
    """Whether the store responds with "retry later". This tells nothing about the requested file."""
    return any(_status(each) in LATER_STATUSES or _code(each) in LATER_CODES for each in _chain(error))


def code_of(error: BaseException) -> str:
    """Returns the store's error code, else the name of the driver's innermost exception."""
    chain = _chain(error)
    return next((code for each in chain if (code := _code(each))), type(chain[-1]).__name__)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error, its cause, and so on."""
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
    """Returns the HTTP status of an error: botocore's response, aiohttp's `status`, gcsfs's `code`.

    aiohttp's parser gives an answer that broke off the code 400; the server did not send it.
    """
    if any(kind.__name__ == "HttpProcessingError" for kind in type(error).__mro__):
        return None
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return _as_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    places = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((found for place in places if (found := _as_status(place)) is not None), None)


def _as_status(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdigit() and 400 <= int(text) < 600 else None
