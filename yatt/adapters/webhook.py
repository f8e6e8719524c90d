"""A message to whoever waits for a run: one HTTP POST of JSON, which costs the run nothing if it fails."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any

LIMIT_S = 10.0


def post(url: str, content: dict[str, Any], limit_s: float = LIMIT_S) -> str:
    """Send the content; gives what went wrong, empty if nothing did.

    Args:
        url: of http or https.
        limit_s: for all of it; looking up the host's name has no limit of its own.
    """
    told = ["no answer"]
    thread = threading.Thread(target=_send, args=(url, content, limit_s, told), name="webhook", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[-1]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A page to log in at is no place for a message."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def _send(url: str, content: dict[str, Any], limit_s: float, told: list[str]) -> None:
    try:
        body, kind = json.dumps(content).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body, headers=kind, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=limit_s):
            told.append("")
    except TimeoutError:
        pass
    except urllib.error.HTTPError as error:
        told.append(f"HTTP {error.code}")
        error.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
        # Other errors than of the line may quote the URL, which may hold a secret.
        told.append(str(getattr(error, "reason", "")) or type(error).__name__)
