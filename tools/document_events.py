"""Writes `docs/events.md` from the classes of `yatt.records.events`. Run it after changing one:

python tools/document_events.py
"""

import inspect
from pathlib import Path

import msgspec

from yatt.records.events.event import Event
from yatt.records.events.log import KINDS, SUBJECTS

FILE = Path(__file__).parents[1] / "docs" / "events.md"
HEAD = """# Events

`RUN/events.jsonl` (and `events.000001.jsonl` and so on) has one JSON object per line. Each has
`kind`, `wall` (ISO-8601), `t` (nanoseconds of the node's monotonic clock), `attempt`, `node` and
`role`; the fields below depend on the kind. Nothing in a run depends on them.
`yatt.open_run(RUN).events()` yields them, without damaged lines. Fields in parentheses may be
missing in logs of other versions. This page is made from the code.
"""


def page() -> str:
    """Returns the page."""
    text = HEAD
    for subject in SUBJECTS:
        title = (inspect.getdoc(subject) or "").partition("\n")[0].removeprefix("Events of ").rstrip(".")
        text += f"\n## {title[0].upper()}{title[1:]}\n\n| kind | fields | what happened |\n|---|---|---|\n"
        for kind, event in KINDS.items():
            if event.__module__ == subject.__name__:
                text += f"| `{kind}` | {_fields(event)} | {_text(event)} |\n"
    return text


def _fields(event: type[Event]) -> str:
    return ", ".join(
        f"`{field.name}`" if field.required else f"(`{field.name}`)"
        for field in msgspec.structs.fields(event)
    )


def _text(event: type[Event]) -> str:
    says, _, fields = (inspect.getdoc(event) or "").partition("Attributes:")
    return " ".join(f"{says.strip()} {fields.strip()}".split()).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page())
