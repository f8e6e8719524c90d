"""Tests a checkpoint store before a run starts: conditional create, read, write, list and delete, under a
name of its own. Nothing of a run is read or changed.

A commit is one conditional create (`Checkpoints.commit`). A store that ignores the condition would let two
attempts commit the same iteration, so it is refused.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.store_errors import code_of
from yatt.errors import CheckpointError, ConfigError, StoreUnreachable

KEYS = (
    "Check the credentials: the driver's environment variables, or `profile` in checkpoint.storage_options."
)
CURES = {
    "NoSuchBucket": "Create the bucket, or name another one.",
    "InvalidAccessKeyId": KEYS,
    "SignatureDoesNotMatch": KEYS,
    "ExpiredToken": f"The credentials have expired. {KEYS}",
    "InvalidToken": KEYS,
    "NoCredentialsError": KEYS,
    "ProfileNotFound": KEYS,
    "AuthorizationHeaderMalformed": "Check the region: AWS_DEFAULT_REGION, or the profile.",
    "PermanentRedirect": "Check the region: AWS_DEFAULT_REGION, or the profile.",
    "NotImplemented": "The store must support conditional writes (If-None-Match); use another one.",
}
RIGHTS = (
    "Give this account the rights to read, write, list and delete there (s3:GetObject, s3:PutObject, "
    "s3:ListBucket, s3:DeleteObject, s3:AbortMultipartUpload)."
)
OTHER = "Check the address, checkpoint.storage_options and your credentials."


def check_access(store: Store, url: str) -> None:
    """Tests what a run does with its store; leaves nothing behind.

    Raises:
        ConfigError: an operation is refused, or the store does not refuse a second creation of a name.
        StoreUnreachable: the failure may be temporary.
    """
    name = f"yatt-check-{secrets.token_hex(8)}"
    try:
        _try("create", url, partial(store.create, name, b"first"))
        if _try("create", url, partial(store.create, name, b"second")):
            raise ConfigError(
                f"{url}: a second conditional create of the same name succeeded. Commits of two attempts "
                "could overwrite each other; use a store that supports If-None-Match.",
                key="checkpoint.url",
            )
        _try("read", url, partial(store.read, name))
        _try("write", url, partial(store.write, name, b"third"))
        _try("list", url, partial(store.names, ""))
    except BaseException:
        with contextlib.suppress(StoreUnreachable, CheckpointError, OSError):
            store.delete(name)
        raise
    _try("delete", url, partial(store.delete, name))
    if _try("read", url, partial(store.size, name)) is not None:
        raise ConfigError(f"{url}: {name} is still there after it was deleted. {OTHER}", key="checkpoint.url")


def _try(operation: str, url: str, work: Callable[[], object]) -> object:
    """Returns the result of one operation.

    Raises:
        ConfigError: it is refused.
        StoreUnreachable: the failure may be temporary.
    """
    try:
        return work()
    except (StoreUnreachable, CheckpointError, OSError) as error:
        if isinstance(error, StoreUnreachable) and error.is_passing:
            raise
        why = f"{operation} is refused ({error}). {cure_of(error)}"
        raise ConfigError(f"{url}: {why}", key="checkpoint.url") from error


def check_parent(root: Path) -> None:
    """Checks that the folder of a store that does not exist yet could be made; changes nothing.

    Raises:
        ConfigError: it could not.
    """
    parent = next(folder for folder in root.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        says = f"{root} cannot be made: {parent} is no folder that you may write to."
        raise ConfigError(says, key="checkpoint.url", missing=str(root))


def cure_of(error: Exception) -> str:
    """Returns the sentence that tells the user what to change."""
    code = code_of(error)
    if code in ("AccessDenied", "AllAccessDisabled", "403", "Forbidden", "PermissionError"):
        return RIGHTS
    return CURES.get(code, OTHER)
