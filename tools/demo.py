"""`make demo`: makes both small models and trains with the GenRM's verdict as the only reward. It kills one
rollout engine during the run, and checks that the run continued and that the policy improved.

    .venv/bin/python tools/demo.py
"""

import os
import shutil
import signal
import subprocess
import sys
import time

from quickstart import CONFIG, RUNS, YATT, call, lines, make_models, verdict

RUN = RUNS / "run"
KILL_AT_ITERATION = 40
ACCURACY = "val-core/arithmetic/rule/mean@1"
AT_MOST_BEFORE, AT_LEAST_AFTER = 0.5, 0.8


def main() -> int:
    """Runs the whole demonstration; returns 0 if all checks pass."""
    make_models()
    shutil.rmtree(RUN, ignore_errors=True)
    began_s = time.monotonic()
    killed = _train()
    seconds = time.monotonic() - began_s
    call([YATT, "report", str(RUN)])
    return _judge(killed, seconds)


def _train() -> str:
    """Runs the quickstart and kills its rollout engine once; returns the engine's name."""
    run = subprocess.Popen([YATT, "run", CONFIG])
    killed = ""
    try:
        while run.poll() is None:
            time.sleep(0.2)
            if not killed and (engine := _engine_to_kill()):
                killed, pid = engine
                print(f"--- killing {killed} (pid {pid}) with SIGKILL ---", flush=True)
                os.kill(pid, signal.SIGKILL)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.wait(timeout=60)
    if run.returncode:
        sys.exit(run.returncode)
    return killed


def _engine_to_kill() -> tuple[str, int] | None:
    """Name and pid of the rollout engine, once the run has reached the iteration and is in its rollout."""
    engine, sampling = None, False
    for event in lines(RUN / "events.jsonl"):
        if event["kind"] == "worker.start" and event["worker"].startswith("rollout"):
            engine = (event["worker"], event["pid"])
        if event["kind"] == "phase.begin":
            sampling = event["phase"] == "rollout" and event["iteration"] >= KILL_AT_ITERATION
    return engine if sampling else None


def _judge(killed: str, seconds: float) -> int:
    rows = lines(RUN / "metrics.jsonl")
    measured = [row[ACCURACY] for row in rows if ACCURACY in row]
    restarts = [e for e in lines(RUN / "events.jsonl") if e["kind"] == "worker.start"]
    restarted = any(e["worker"].startswith("rollout") and not e["worker"].endswith(".1") for e in restarts)
    checks = {
        f"accuracy before at most {AT_MOST_BEFORE}: {measured[0]:.3f}": measured[0] <= AT_MOST_BEFORE,
        f"accuracy after at least {AT_LEAST_AFTER}: {measured[-1]:.3f}": measured[-1] >= AT_LEAST_AFTER,
        f"{killed or 'no engine'} was killed, started again, and the run went on": bool(killed) and restarted,
        f"{rows[-1]['training/global_step']} iterations in {seconds:.0f} s": True,
    }
    code = verdict(checks)
    print(f"report: {RUN / 'report.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
