"""Notifications sent to `logging.webhook_url`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from yatt.config.schema import RunConfig
from yatt.core.reasons import without_examples
from yatt.paths import RunPaths

State = Literal["finished", "failed", "no progress"]


@dataclass(frozen=True, slots=True)
class Messages:
    """Sends the notifications of one run.

    Attributes:
        say: prints one line for the user, if a message could not be sent.
    """

    config: RunConfig
    paths: RunPaths
    say: Callable[[str], None]

    def send(self, state: State, text: str) -> None:
        """Sends one message. `text` is a separate field, which chat services require. Takes at most 10 s."""
        url = self.config.logging.webhook_url
        if not url:
            return
        from yatt.adapters.webhook import post  # takes a while to import

        root, text = str(self.paths.root), without_examples(text)  # prompts stay here
        content = {"text": f"yatt: {root}: {text}", "run": root, "id": self.config.run.id, "state": state}
        if wrong := post(url, content):
            self.say(f"logging.webhook_url: the message '{state}' was not sent ({wrong})")
