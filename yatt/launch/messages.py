"""Messages to the people of a run, when there is something to do or to see: `logging.webhook_url`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from yatt.config.schema import RunConfig
from yatt.paths import RunPaths

State = Literal["finished", "failed", "no progress"]


@dataclass(frozen=True, slots=True)
class Messages:
    """Those of one run.

    Attributes:
        say: prints one line for people, if a message could not be sent.
    """

    config: RunConfig
    paths: RunPaths
    say: Callable[[str], None]

    def send(self, state: State, text: str) -> None:
        """One message; `text` is a field of its own, as chat services want it. Takes 10 s at most."""
        url = self.config.logging.webhook_url
        if not url:
            return
        from yatt.adapters.webhook import post  # takes a while to import

        root = str(self.paths.root)
        content = {"text": f"yatt: {root}: {text}", "run": root, "id": self.config.run.id, "state": state}
        if wrong := post(url, content):
            self.say(f"logging.webhook_url: the message '{state}' was not sent ({wrong})")
