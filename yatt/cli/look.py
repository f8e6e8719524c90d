"""Looking at a run from its folder: status, watch, logs."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from yatt.adapters.slurm import Slurm
from yatt.config.load import load_resolved
from yatt.errors import ConfigError
from yatt.launch.jobs import JobView, job_view
from yatt.obs.console import Console, duration
from yatt.obs.view import RunView
from yatt.paths import RunPaths

REFRESH_S = 0.5


def open_view(run: Path) -> RunView:
    """The view of a run folder.

    Raises:
        ConfigError: it is none.
    """
    paths = RunPaths(run)
    if not paths.config.exists():
        raise ConfigError(f"{run} is not a run folder: it has no config.yaml. Give the folder of run.dir.")
    return RunView(paths, load_resolved(paths.config).trainer.total_iterations)


def status(run: Path, *, as_json: bool) -> int:
    """Print what a run is doing."""
    view = open_view(run)
    view.refresh()
    summary = view.summary()
    job = job_view(view.paths, Slurm())
    if as_json:
        print(json.dumps({**summary, "job": asdict(job)}))
        return 0
    print(f"{summary['run']}: {summary['state']}, attempt {summary['epoch']}")
    _print_job(job)
    print(f"  phase       {summary['phase']}, iteration {summary['iteration']}/{summary['total_iterations']}")
    if summary["reward"] is not None:
        print(f"  reward      {summary['reward']:.4f}")
        print(f"  throughput  {summary['throughput']:.0f} tokens/s a GPU, step {summary['step_s']:.1f} s")
    if summary["eta_s"] is not None and not view.is_finished:
        print(f"  left        {duration(summary['eta_s'])}")
    print(f"  checkpoint  {summary['committed'] or 'none yet'}")
    for slab, holder in summary["holders"].items():
        print(f"  slab {slab:6} {holder}")
    for worker, state in summary["workers"].items():
        print(f"  {worker:24} {state}")
    return 0


def _print_job(job: JobView) -> None:
    if job.job_id:
        print(f"  job         {job.job_id}: {job.state}, {job.restarts} restarts")
    for number, component in enumerate(job.components):
        print(f"  component {number} {component}")
    if job.why:
        print(f"  why         {job.why}")


def watch(run: Path) -> int:
    """Follow a run until it ends, or the person does."""
    view = open_view(run)
    console = Console(view)
    try:
        while True:
            console.update()
            if view.is_finished or view.ended:
                return 0
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0
    finally:
        console.close()


def logs(run: Path, *, role: str, follow: bool, lines: int) -> int:
    """Print the logs of the latest attempt."""
    folder = RunPaths(run).latest / "logs"
    if not folder.is_dir():
        raise ConfigError(f"{run} has no logs yet: it is no run folder, or nothing was started.")
    offsets: dict[Path, int] = {}
    try:
        while True:
            for path in sorted(folder.glob(f"{role}*.log")):
                _print_new(path, offsets, lines)
            if not follow:
                return 0
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return 0


def _print_new(path: Path, offsets: dict[Path, int], lines: int) -> None:
    text = path.read_bytes()
    known = offsets.get(path)
    new = text[known or 0 :].decode(errors="replace").splitlines()
    for line in new if known is not None else new[-lines:]:
        sys.stdout.write(f"{path.stem}: {line}\n")
    sys.stdout.flush()
    offsets[path] = len(text)
