"""Sends a notification: one HTTP POST of JSON. A failure has no effect on the run."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any

LIMIT_S = 10.0


def post_message(url: str, content: dict[str, Any], limit_s: float = LIMIT_S) -> str:
    """Sends the content; returns the error, or '' on success.

    Args:
        url: an http or https URL.
        limit_s: time limit of the whole call, also if the lookup of the host name hangs.
    """
    told = ["no answer"]
    thread = threading.Thread(target=_send, args=(url, content, limit_s, told), name="webhook", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[-1]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which may lead to a login page."""

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
    except Exception as error:  # noqa: BLE001 - any error is only reported
        # Errors other than network errors may quote the URL, which may contain a secret.
        told.append(str(getattr(error, "reason", "")) or type(error).__name__)
