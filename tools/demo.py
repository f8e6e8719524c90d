"""`make demo`: makes the two small models, trains with the GenRM's verdict as the only reward, kills one
rollout engine on the way, and checks that the run went on and that the policy really got better.

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
    """Run the whole demonstration; 0 if everything it promises held."""
    make_models()
    shutil.rmtree(RUN, ignore_errors=True)
    began_s = time.monotonic()
    killed = _train()
    seconds = time.monotonic() - began_s
    call([YATT, "report", str(RUN)])
    return _judge(killed, seconds)


def _train() -> str:
    """Run the quickstart and kill its rollout engine once; gives which one."""
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
    """Name and pid of the rollout engine, once the run is far enough and sampling."""
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
