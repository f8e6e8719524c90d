"""Numbers, durations and phases in a few characters or words."""

import math

_PHASES = {
    "join": "starting",
    "build": "starting",
    "score": "scoring",
    "train": "training",
    "publish": "weight update",
    "sync": "weight update",
    "save": "saving",
    "commit": "saving",
    "validate": "validation",
    "export": "exporting",
}


def phase_in_words(phase: str) -> str:
    """Returns what people are told of a phase; several phases of the protocol may be one thing to them."""
    return _PHASES.get(phase, phase)


def short_number(value: float) -> str:
    """Returns a number in a few characters, for axes."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.4g}"


def fine_duration(seconds: float) -> str:
    """Returns the same as `duration_in_words`, with two digits below ten seconds."""
    return duration_in_words(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def duration_in_words(seconds: float) -> str:
    """Returns seconds as 1h02m, 3m05s or 7s; a value that is not finite is unchanged."""
    if not math.isfinite(seconds):
        return str(seconds)
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def evaluated_in_words(genrms: str) -> str:
    """What is done of prompts in an evaluation: scored by these GenRMs; empty: sampled."""
    return f"judged by {genrms}" if genrms else "sampled"
