"""Which errors of a store's driver may pass."""

import errno
import socket

import pytest

from yatt.checkpoint.store.store_errors import may_pass


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


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("code", "status", "passes"),
    [
        ("RequestTimeout", 400, True), ("ConditionalRequestConflict", 409, True),
        ("OperationAborted", 409, True), ("SlowDown", 503, True), ("SlowDown", 400, True),
        ("InternalError", 500, True), ("InternalError", 200, True), ("ServiceUnavailable", 503, True),
        ("NoSuchUpload", 404, True), ("Unheard", 503, True),
        ("ExpiredToken", 400, False), ("RequestTimeTooSkewed", 403, False), ("AccessDenied", 403, False),
        ("PreconditionFailed", 412, False), ("Unheard", 400, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_translated", [False, True])
def test_an_answer_of_s3_is_known_by_its_code_and_then_by_its_status(
    code: str, status: int, passes: bool, is_translated: bool
) -> None:
    error: Exception = ClientError(code, status)
    if is_translated:
        told = OSError(errno.EINVAL, "as s3fs says it") if passes else OSError(errno.EIO, "as s3fs says it")
        told.__cause__ = error
        error = told
    assert may_pass(error) is passes


def test_an_answer_that_broke_off_may_pass_though_its_parser_says_400() -> None:
    from aiohttp import ClientPayloadError
    from aiohttp.http_exceptions import ContentLengthError

    error = ClientPayloadError("Response payload is not completed")
    error.__cause__ = ContentLengthError("received 100 of 200 bytes")
    assert may_pass(error)
