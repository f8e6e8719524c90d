"""A holder that stands still loses its lease, whatever it does when it wakes; nobody else is harmed."""

import signal
from pathlib import Path

import pytest

from tests.runs import RunFile, kill, rows, start, wait_for
from tests.tiny_models import make_scripted_model

pytestmark = pytest.mark.faults


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    judge = make_scripted_model(tmp_path / "judge", mean_tokens=3)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    section = {"name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
               "verdict": {"pattern": "([a-m])", "scores": {}}, "max_model_tokens": 64,
               "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
    return RunFile(
        tmp_path,
        {
            "genrms": [section],
            "placement": {"mode": "partial", "genrm_gpu_sets": 1},
            "trainer": {"total_iterations": 12},
            "lease": {"renew_s": 0.5, "ttl_s": 10.0, "release_s": 60.0, "term_s": 4.0},
        },
    )


def events(run: RunFile, kind: str) -> list[dict]:
    return [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == kind]


def test_a_paused_holder_loses_its_lease_and_the_run_goes_on(run: RunFile) -> None:
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="the first checkpoint")
        engine = next(e for e in events(run, "worker.start") if e["worker"].startswith("rollout"))
        assert kill(engine["pid"], signal.SIGSTOP)
        expired = wait_for(lambda: events(run, "lease.expire"), timeout_s=60, what="the lease to expire")
        kill(engine["pid"], signal.SIGCONT)  # it wakes as the holder of a token that counts no more
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert [e["holder"] for e in expired] == ["rollout"]
    assert "was not heard of for 10 s" in expired[0]["cause"]
    after = [
        e["token"] for e in events(run, "lease.grant")
        if e["slab"] == expired[0]["slab"] and e["t"] > expired[0]["t"]
    ]  # fmt: skip
    assert after, "the slab was granted again"
    assert min(after) > expired[0]["token"], "with a higher token"
    assert {e["attempt"] for e in events(run, "attempt.start")} == {1}, "the attempt went on"
    others = [e["worker"] for e in events(run, "worker.start") if not e["worker"].endswith(".1")]
    assert others == ["rollout-n0s0.2"], "nobody else was started again"


def test_tokens_of_a_slab_only_rise(run: RunFile) -> None:
    run.settings["trainer"] = {"total_iterations": 2}
    process = start("run", str(run.write()))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for slab in ("n0s0", "n1s0"):
        grants = [e for e in events(run, "lease.grant") if e["slab"] == slab]
        tokens = [e["token"] for e in grants]
        assert tokens == sorted(set(tokens))
        assert {e["holder"] for e in grants} == (
            {"trainer", "rollout"} if slab == "n0s0" else {"trainer", "genrm:judge"}
        )
