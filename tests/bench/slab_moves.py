"""Real processes whose slabs move, beside their simulation: is the order of splits the same, and the time?

Three controllers with scripted engines: six slabs for engines. Lengths are those of the seeds, verdicts have
one length, and speeds are what the runs measured; so the simulation has nothing to adjust.
"""

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.oversampling import BATCH, N, balance_of, lengths
from tests.moving_slabs import JUDGE, double_holders, moving_run
from tests.runs import rows, yatt
from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.split import RoleSpeed
from yatt.core.samples.prompts import sample_seed
from yatt.engine.script import _mixed
from yatt.forecast.time.groups import Workload
from yatt.forecast.time.iterations import SimulatedIteration, partial_iterations
from yatt.forecast.time.sampling import SimulatedSetting

NUM_SLABS, ITERATIONS, WARM_UP = 6, 8, 3
VERDICT, ROOMS = 60, {ROLLOUT: 16, JUDGE: 4}
ARMS = (("fixed", 1), ("fixed", 3), ("fixed", 5), ("dynamic", 1), ("dynamic", 5))
NUM_FIXED = 3
Load = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One run: seconds of its batches, as measured and as simulated, and what its moves took."""

    name: str
    measured_s: float
    simulated_s: float
    splits: tuple[int, ...]
    simulated_splits: tuple[int, ...]
    overheads_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s

    def row(self) -> list[str]:
        splits = [", ".join(map(str, each)) for each in (self.splits, self.simulated_splits)]
        times = f"{self.measured_s:.2f} s", f"{self.simulated_s:.2f} s", f"{self.ratio:.2f}"
        return [self.name, *times, str(len(self.overheads_s)), *splits]


class Lengths:
    """The completions of a run, by its seeds."""

    def __init__(self) -> None:
        self._table, self._next = lengths(), itertools.count()

    def draw(self, _: object, __: int) -> BatchSample:
        number, index = divmod(next(self._next), N)
        keys, drawn = sorted(self._table), _mixed(0, sample_seed(0, number, index))
        return BatchSample(float(self._table[keys[drawn % len(keys)]]), {JUDGE: VERDICT + 1.0})


def simulated(loads: Sequence[Load], genrm_gpu_sets: int, *, is_dynamic: bool) -> list[SimulatedIteration]:
    """The same iterations, with the speeds that the run measured."""
    roles = {}
    for role, room in ROOMS.items():
        measured = [load["roles"][role] for load in loads]
        step_s = statistics.median(each["step_s"] for each in measured)
        sequence_s = statistics.median(each["sequence_s"] for each in measured)
        roles[role] = RoleSpeed(speed=EngineSpeed(step_s, sequence_s), room=room)
    setting = SimulatedSetting(roles=roles, switch_s=0.02, is_dynamic=is_dynamic, decide_s=1.0)
    work = Workload(draw=Lengths().draw, num_groups=BATCH, group_size=N)
    split = {ROLLOUT: NUM_SLABS - genrm_gpu_sets, JUDGE: genrm_gpu_sets}
    return partial_iterations(setting, split, work, ITERATIONS, 0)


def measure(folder: Path, split: str, genrm_gpu_sets: int) -> Arm:
    """Runs one arm."""
    script: dict[str, Any] = {"answers": [[5] * VERDICT], "seconds_per_step": 0.02}
    run = moving_run(
        folder, "disaggregated", ITERATIONS, genrm_gpu_sets=genrm_gpu_sets, split=split, **script
    )  # fmt: skip
    run.settings["genrms"][0]["max_num_seqs"] = ROOMS[JUDGE]
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    events = rows(run.run_dir / "events.jsonl")
    assert double_holders(events) == []
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    loads = [event for event in events if event["kind"] == "batch.load"]
    expected = simulated(loads, genrm_gpu_sets, is_dynamic=split == "dynamic")
    moved = [event for event in events if event["kind"] == "slab.moved" and event["has_moved"]]
    return Arm(
        f"{split}, {genrm_gpu_sets}",
        statistics.mean(load["seconds"] for load in loads[WARM_UP:]),
        statistics.mean(each.seconds - each.switch_s for each in expected[WARM_UP:]),
        tuple(event["after"][JUDGE] for event in events if event["kind"] == "split.choose"),
        tuple(each.split[JUDGE] for each in expected[1:]),
        tuple(event["seconds"] - event["workers_s"] for event in moved),
    )  # fmt: skip


def targets_of(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """What must hold."""
    overheads_ms = [1000 * each for arm in arms for each in arm.overheads_s]
    fixed = arms[:NUM_FIXED]
    order = sorted(fixed, key=lambda arm: arm.measured_s)
    is_same = order == sorted(fixed, key=lambda arm: arm.simulated_s)
    worst = max((arm.ratio for arm in arms), key=lambda ratio: abs(ratio - 1))
    slowest = max(overheads_ms)
    return [
        {"what": "seconds of a batch, measured / simulated, the arm that is farthest off",
         "target": "0.9 to 1.1", "value": f"{worst:.2f}", "met": 0.9 <= worst <= 1.1},
        {"what": "order of the fixed splits, measured against simulated", "target": "the same",
         "value": "the same" if is_same else "another", "met": is_same},
        {"what": "arbiter and wire of a move, the slowest", "target": "<= 50 ms",
         "value": f"{slowest:.0f} ms of {len(overheads_ms)} moves", "met": slowest <= 50},
    ]  # fmt: skip


def run() -> dict[str, Any]:
    """Runs every arm and its simulation."""
    arms = []
    for split, genrm_gpu_sets in ARMS:
        with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
            arms.append(measure(Path(folder), split, genrm_gpu_sets))
        print(arms[-1], flush=True)
    best_s = min(arm.measured_s for arm in arms[:NUM_FIXED])
    slower = max(arm.measured_s for arm in arms[NUM_FIXED:]) / best_s - 1
    return {
        "title": "Slabs that move, beside their simulation",
        "how": f"Three controllers with scripted engines, {NUM_SLABS} slabs, {BATCH * N} completions a batch "
        f"with log-normal lengths, {VERDICT + 1} tokens a verdict; mean of the last {ITERATIONS - WARM_UP} "
        f"of {ITERATIONS} batches. Simulated by the code of `yatt simulate`, with the speeds that the run "
        f"measured. From either start the dynamic split is at most {slower:+.0%} slower than the best of the "
        "three fixed ones.",
        "head": ["split, GenRM slabs at first", "batch, measured", "simulated", "ratio", "moves",
                 "GenRM slabs of the next batches", "the same, simulated"],
        "rows": [arm.row() for arm in arms],
        "targets": targets_of(arms),
    }  # fmt: skip
