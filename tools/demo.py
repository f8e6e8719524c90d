"""`make demo`: makes both small models and trains with the GenRM's verdict as the only reward. It kills one
rollout engine during the run, and checks that the run continued and that the policy improved.

    .venv/bin/python tools/demo.py
"""

import shutil
import sys
import time

from quickstart import CONFIG, RUNS, YATT, call, lines, make_models, run_with_kills, started_again, verdict

RUN = RUNS / "run"
ENGINE, KILL_AT_ITERATION = "rollout", 40
ACCURACY = "val-core/arithmetic/rule/mean@1"
AT_MOST_BEFORE, AT_LEAST_AFTER = 0.5, 0.8


def main() -> int:
    """Runs the whole demonstration; returns 0 if all checks pass."""
    make_models()
    shutil.rmtree(RUN, ignore_errors=True)
    began_s = time.monotonic()
    killed = run_with_kills(CONFIG, RUN, {ENGINE: KILL_AT_ITERATION})
    seconds = time.monotonic() - began_s
    call([YATT, "report", str(RUN)])
    return _judge(killed, seconds)


def _judge(killed: list[str], seconds: float) -> int:
    rows = lines(RUN / "metrics.jsonl")
    measured = [row[ACCURACY] for row in rows if ACCURACY in row]
    name = killed[0] if killed else "no engine"
    checks = {
        f"accuracy before at most {AT_MOST_BEFORE}: {measured[0]:.3f}": measured[0] <= AT_MOST_BEFORE,
        f"accuracy after at least {AT_LEAST_AFTER}: {measured[-1]:.3f}": measured[-1] >= AT_LEAST_AFTER,
        f"{name} was killed, started again, and the run went on": bool(killed) and started_again(RUN, ENGINE),
        f"{rows[-1]['training/global_step']} iterations in {seconds:.0f} s": True,
    }
    code = verdict(checks)
    print(f"report: {RUN / 'report.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
