"""Recognises credentials in options, URLs and messages: they are refused in files, and never shown.

A config is saved in the run folder, printed by `--dry-run` and sent to trackers, so a credential may not be
in it. Drivers of object stores read credentials from the environment or from their own files.
"""

import re
from collections.abc import Mapping
from typing import Any

SECRET_WORDS = frozenset(
    {
        "key",
        "secret",
        "secrets",
        "token",
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "credential",
        "credentials",
        "sas",
        "auth",
        "authorization",
        "signature",
        "sig",
    }
)
PLACES = frozenset(
    {"file", "filename", "path", "dir", "folder", "env", "id", "arn", "provider", "name", "sock"}
)
"""Last words of names whose value says where a credential is, or which one it is."""

PLAIN_VALUES = frozenset({"", "anon", "cloud", "google_default", "cache", "browser"})
"""Values that select a method. gcsfs has them for its option `token`."""

CURE = (
    "Credentials come from the environment or from the driver's own files, because the config is saved in "
    "the run folder and printed. For S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write "
    "`profile: NAME` for a profile in ~/.aws/credentials; for others see the driver's environment variables."
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_USER_INFO = re.compile(r"(?<=://)(?!arn:)[^/@:?#\s]+:(?!\d+(?:/|\s|$))(?:[^/?#\s]*@|[^@\s]*@)")
_PARAMETER = re.compile(r"(?<=[?&;])([^=&?#;\s'\"<>]+)=([^&#;\s'\"<>]+)")
_ASSIGNED = re.compile(
    r"(?i)\b(account_?key|shared_?access_?(?:key|signature)|aws_secret_access_key|aws_session_token|"
    r"x-amz-security-token)(['\"]?\s*[=:]\s*['\"]?)([^\s;,'\"&<>]+)"
)
HIDDEN = "***"


def is_secret_name(name: str) -> bool:
    """Whether an option or environment variable of this name contains a credential."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or (words[-1] in PLACES and "access" not in words):
        return False
    return bool(SECRET_WORDS & set(words)) or words[-2:] == ["connection", "string"]


def secret_option(options: Mapping[str, Any]) -> str:
    """Returns the name of the first option that contains a credential, dotted if nested; empty if none."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            if nested := secret_option(value):
                return f"{name}.{nested}"
        elif isinstance(value, list | tuple):
            for index, each in enumerate(value):
                if nested := secret_option(each if isinstance(each, Mapping) else {str(index): each}):
                    return f"{name}.{nested}"
        if not isinstance(value, Mapping) and _is_credential(str(name), value):
            return str(name)
    return ""


def _is_credential(name: str, value: object) -> bool:
    if isinstance(value, str) and has_secret(value):
        return True
    return is_secret_name(name) and not isinstance(value, bool) and value not in tuple(PLAIN_VALUES)


def has_secret(text: str) -> bool:
    """Whether a URL contains user and password, or a signature in its query."""
    return redacted_text(text) != text


def redacted_text(text: str) -> str:
    """Returns a URL or message with the passwords, signatures and account keys in it replaced."""
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _PARAMETER.sub(_parameter, text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


def _parameter(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if is_secret_name(found[1]) else found[0]
