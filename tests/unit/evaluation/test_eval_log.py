"""A failed evaluation shows the log of the engine that failed."""

import os
from pathlib import Path
from types import SimpleNamespace

from yatt.evaluation.host import Host
from yatt.paths import RunPaths


def test_a_newer_log_of_no_engine_is_not_shown(tmp_path: Path) -> None:
    host = object.__new__(Host)
    host._node = SimpleNamespace(paths=RunPaths(tmp_path))  # type: ignore[assignment]
    logs = host._node.paths.log(1, "any").parent
    logs.mkdir(parents=True)
    for age_s, name in enumerate(("reward-p0.1", "nursery-vllm-n0.1", "rollout-n0s0.2", "rollout-n0s0.1")):
        (logs / f"{name}.log").write_text(f"of {name}\n")
        os.utime(logs / f"{name}.log", (1000 - age_s, 1000 - age_s))
    assert host._with_log("it failed").splitlines() == [
        "it failed", "The newest log of an engine ends:", "of rollout-n0s0.2",
    ]  # fmt: skip
