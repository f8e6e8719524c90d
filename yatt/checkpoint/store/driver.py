"""Opens the fsspec driver of an object store: no credentials in its options, explicit limits of its waits.

S3: a request is given up after `stall_s` without progress, while it connects, sends or receives, and is tried
three times (botocore's mode "standard": pauses with jitter; AWS_MAX_ATTEMPTS changes the number). s3fs does
not retry beside that: `yatt.checkpoint.store.patient` does, with a message and as progress. The total time of
a request has no limit.

Other drivers keep their own limits.
"""

import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from yatt.credentials import CURE, has_secret, redacted_text, secret_option
from yatt.errors import ConfigError

STALL_S = 60.0
CONNECT_S = 10.0
UNSENT_BYTES = 256 << 10
CONNECTIONS = 40
"""Most connections per process: four files at once, each with several parts in flight."""


def open_driver(url: str, options: Mapping[str, Any], stall_s: float = STALL_S) -> tuple[Any, str]:
    """Returns the filesystem of a URL, and the URL's path in it.

    Args:
        options: for the driver; they go before ours.
        stall_s: S3: seconds without progress after which a request is given up.

    Raises:
        ConfigError: the driver is not installed; the URL or the options cannot be used, or have credentials.
    """
    _refuse_credentials(url, options)
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(url, **_with_limits(url, options, stall_s))
    except ImportError as error:
        raise ConfigError(f"checkpoint.url {url}: {error}. pip install 'yatt[objects]'.") from error
    except (ValueError, TypeError, KeyError) as error:  # TypeError: an unknown option
        raise ConfigError(f"checkpoint.url {url}: {redacted_text(str(error))}.") from error
    if _is_s3(url):
        filesystem.retries = 1
    return filesystem, str(root)


def _refuse_credentials(url: str, options: Mapping[str, Any]) -> None:
    if has_secret(url):
        raise ConfigError(
            f"{redacted_text(url)}: the URL contains a password or a signature; remove it. {CURE}"
        )
    if name := secret_option(options):
        raise ConfigError(f"{url}: the option {name} is or contains a credential; remove it. {CURE}")


def _is_s3(url: str) -> bool:
    return url.partition("://")[0] in ("s3", "s3a")


def _with_limits(url: str, options: Mapping[str, Any], stall_s: float) -> dict[str, Any]:
    if not _is_s3(url):
        return dict(options)
    limits: dict[str, Any] = {
        "connect_timeout": min(CONNECT_S, stall_s),
        "read_timeout": stall_s,
        "retries": {"mode": "standard"},
        "max_pool_connections": CONNECTIONS,
        "connector_args": {"socket_factory": partial(_socket, stall_s)},
    }
    return {**options, "config_kwargs": {**limits, **options.get("config_kwargs", {})}}


def _socket(stall_s: float, address: tuple[Any, ...]) -> socket.socket:
    """Returns a socket that fails if the peer takes no data for `stall_s`; `read_timeout` is for answers.

    `read_timeout` begins when the kernel has the whole request, so the kernel may hold only a little that is
    not sent: else a slow link would be taken for a stalled one.

    Source: tcp(7), TCP_USER_TIMEOUT; on Linux it also ends a zero window that is acknowledged.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return made
