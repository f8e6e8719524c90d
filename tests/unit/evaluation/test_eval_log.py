"""A failed evaluation shows the log of the engine that failed."""

import os
from pathlib import Path

from yatt.evaluation.evaluate import with_log
from yatt.paths import RunPaths


def test_a_newer_log_of_no_engine_is_not_shown(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    logs = paths.log(0, "any").parent
    logs.mkdir(parents=True)
    names = ("reward-p0.1", "node0", "media-n0.1", "nursery-vllm-n0.1", "rollout-n0s0.2", "rollout-n0s0.1")
    for age_s, name in enumerate(names):
        (logs / f"{name}.log").write_text(f"of {name}\n")
        os.utime(logs / f"{name}.log", (1000 - age_s, 1000 - age_s))
    assert with_log(paths, "it failed").splitlines() == [
        "it failed", "The newest log of an engine ends:", "of rollout-n0s0.2",
    ]  # fmt: skip
