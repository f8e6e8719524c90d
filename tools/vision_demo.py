"""`make vision-demo`: makes two small vision-language models, and trains one of them to count squares by the
verdicts of the other, which sees the pictures too. A rollout engine and the media process are killed on the
way. At the end the trained model is asked about pictures that are blacked out: it has to look.

    .venv/bin/python tools/vision_demo.py
"""

import json
import os
import shutil
import subprocess
import sys
import time

from quickstart import ROOT, YATT, call, lines, run_with_kills, started_again, verdict

FOLDER = ROOT / "runs" / "vision"
RUN, CONFIG = FOLDER / "run", "configs/quickstart-vision.yaml"
KILLS = {"rollout": 8, "media": 14}
ACCURACY = "val-core/default/rule/mean@1"
AT_MOST_BEFORE, AT_LEAST_AFTER, AT_MOST_BLIND = 0.6, 0.9, 0.3


def main() -> int:
    """Runs the whole demonstration; returns 0 if all checks pass."""
    os.chdir(ROOT)
    call([sys.executable, "tools/squares.py", "runs/vision/data"])
    for model in ("policy", "judge"):
        print(f"making the {model} (kept for the next time)", flush=True)
        call([YATT, "sft", f"configs/quickstart-vision-{model}.yaml"])
    for folder in (RUN, FOLDER / "run.data"):
        shutil.rmtree(folder, ignore_errors=True)
    began_s = time.monotonic()
    killed = run_with_kills(CONFIG, RUN, KILLS)
    seconds = time.monotonic() - began_s
    call([YATT, "report", str(RUN)])
    return _judge(killed, seconds)


def _judge(killed: list[str], seconds: float) -> int:
    rows = lines(RUN / "metrics.jsonl")
    measured = [row[ACCURACY] for row in rows if ACCURACY in row]
    blind = accuracy_of_blind()
    checks = {
        f"accuracy before at most {AT_MOST_BEFORE}: {measured[0]:.3f}": measured[0] <= AT_MOST_BEFORE,
        f"accuracy after at least {AT_LEAST_AFTER}: {measured[-1]:.3f}": measured[-1] >= AT_LEAST_AFTER,
        f"with blacked-out pictures at most {AT_MOST_BLIND}: {blind:.3f}": blind <= AT_MOST_BLIND,
        f"{' and '.join(killed)} were killed, started again, and the run went on": (
            len(killed) == len(KILLS) and all(started_again(RUN, kind) for kind in KILLS)
        ),
        f"{rows[-1]['training/global_step']} iterations in {seconds:.0f} s": True,
    }
    code = verdict(checks)
    print(f"report: {RUN / 'report.html'}")
    return code


def accuracy_of_blind() -> float:
    """The trained model's accuracy where each picture is black."""
    argv = [YATT, "eval", str(RUN), "runs/vision/data/val_blind.jsonl", "--n", "1", "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return float(json.loads(done.stdout)["overall"]["rewards"]["rule"]["mean"])


if __name__ == "__main__":
    sys.exit(main())
