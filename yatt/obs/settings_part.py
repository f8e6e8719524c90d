"""The parts of a report about what a run was: its config, the software and the machine; and flat groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from yatt.adapters.ledger import Attempt
from yatt.config.load import without_secrets
from yatt.config.origin import annotated, origins_of_run
from yatt.config.schema import RunConfig
from yatt.core.alarms import FLAT_GROUPS
from yatt.obs.metrics import STEP, amount
from yatt.obs.parts import shown

MAX_CONFIG = 60_000
FLAT_ITERATIONS = 10
MANY_FLAT = 0.5
"""Share of flat groups from which the report explains them as a problem."""


def settings_part(config: RunConfig, attempts: Sequence[Attempt]) -> str:
    """Returns the keys that differ from their defaults, and software and hardware of the newest attempt."""
    config = without_secrets(config)
    text = annotated(config, origins_of_run(config), only_written=True)
    lines = "\n".join(line.partition("  # ")[0].rstrip() for line in text.splitlines())[:MAX_CONFIG]
    keys = (
        f"<details open><summary>Keys that are not defaults</summary><pre>{shown_all(lines)}</pre></details>"
    )
    about = next((a.started["surroundings"] for a in reversed(attempts) if "surroundings" in a.started), None)
    return f'<div class="card">{keys}{_machine(about) if isinstance(about, dict) else ""}</div>'


def shown_all(text: str) -> str:
    """Returns text as HTML, in pieces that are not truncated."""
    return "".join(shown(text[at : at + 2000]) for at in range(0, len(text), 2000))


def _machine(about: Mapping[str, Any]) -> str:
    versions = about.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    gpus = about.get("gpus")
    cards = [f"{count} x {name}" for name, count in gpus.items()] if isinstance(gpus, dict) else []
    machine = [
        ("processor", about.get("processor", "")), ("cores", about.get("cores", "")),
        ("memory (GiB)", about.get("memory_gib", "")), ("GPUs", ", ".join(cards) or "none"),
    ]  # fmt: skip
    rows = "".join(
        f"<tr><td>{shown(name)}</td><td>{shown(value)}</td></tr>" for name, value in (*named, *machine)
    )
    return f"<h3>Software and machine of the launcher, newest attempt</h3><table>{rows}</table>"


def flat_part(rows: Sequence[Mapping[str, Any]]) -> str:
    """Explains groups whose rewards are all equal, if the newest iterations have some; else empty."""
    newest = [amount(dict(row), FLAT_GROUPS) for row in rows if row[STEP]][-FLAT_ITERATIONS:]
    share = sum(newest) / max(1, len(newest))
    if not share:
        return ""
    warn = " warn" if share >= MANY_FLAT else ""
    return (
        f'<p class="say{warn}">{100 * share:.0f}% of the prompt groups of the newest {len(newest)} iterations'
        " are flat: all their completions have the same reward, so their advantages are zero and they teach "
        "nothing. All rewards high: the prompts are too easy. All low: too hard, or the reward cannot tell "
        "answers apart. "
        "<code>algorithm.filter_groups: true</code> replaces flat groups; other prompts or a larger "
        "<code>rollout.n</code> help too.</p>"
    )
