"""State saved under one layout and read under another is the same to the bit: main copies, moments, steps.

The default is a sample with the two layouts that megatron-core 0.16.1's own form got wrong, and others drawn
by YATT_SEED. `YATT_RESUME_MATRIX=all` saves every model in every layout and reads each in every other.
"""

import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from tests.bench import checkpoint as bench, scale
from tests.integration.trainer.conftest import Job, make_model, run_world
from tests.seeds import seed_of
from yatt.models.model import read_model

pytestmark = pytest.mark.slow
IS_WHOLE = os.environ.get("YATT_RESUME_MATRIX") == "all"
SEED = seed_of("YATT_SEED")
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 5000}
"""Parameters of these models do not fill such buckets evenly."""

LAYOUTS = {
    1: {"one": {}, "one-buckets": BUCKETS},
    2: {
        "tp2": {TP: 2, "sequence_parallel": True},
        "pp2": {PP: 2},
        "vpp2": {PP: 2, VPP: 2},
        "dp2-buckets": {**BUCKETS, "overlap_param_gather": True},
        "cp2": {CP: 2},
    },
    3: {"dp3": {}, "dp3-buckets": BUCKETS},
    4: {
        "tp2pp2": {TP: 2, PP: 2},
        "dp2tp2-buckets": {TP: 2, **BUCKETS},
        "dp2vpp2": {PP: 2, VPP: 2, **BUCKETS},
    },
    6: {"dp3pp2": {PP: 2}, "dp3pp2-buckets": {PP: 2, **BUCKETS}, "dp3tp2": {TP: 2}},
}
MODELS = {
    "tied-128": {"is_tied": True, "hidden_size": 128},
    "tied-96": {"is_tied": True, "hidden_size": 96},
    "untied-63": {"is_tied": False, "hidden_size": 96, "vocab_size": 63},
}
"""Hidden sizes; 63 entries of vocabulary are padded under tensor parallelism."""
DTYPES = {"tied-128": "float32", "tied-96": "bfloat16", "untied-63": "float32"}
SAMPLED_SAVES = ((6, "dp3pp2", "tied-128"), (2, "pp2", "tied-96"))
Save = tuple[int, str, str]
"""World size, layout and model."""


def name_of(save: Save) -> str:
    return f"{save[1]}-{save[2]}"


def layout_of(world_size: int, layout: str, model: str) -> dict:
    return {**LAYOUTS[world_size][layout], "dtype": DTYPES[model]}


class Matrix:
    """Runs worlds of ranks that save and read; keeps what each rank 0 wrote of its state."""

    def __init__(self, folder):
        self.folder = folder
        self.models = {
            name: str(make_model(folder / name, "qwen2", **sizes)) for name, sizes in MODELS.items()
        }
        self.saved: dict[Save, Job] = {}
        self.read: list[tuple[Save, str, Job]] = []

    def run(self, world_size: int, saves: list[Save], reads: list[tuple[Save, str]]) -> None:
        jobs = [self._job(world_size, save[1], save[2], save, is_saving=True) for save in saves]
        jobs += [self._job(world_size, layout, save[2], save, is_saving=False) for save, layout in reads]
        folder = self.folder / f"world-{world_size}-{len(self.saved)}-{len(self.read)}"
        done = run_world(folder, world_size, jobs, timeout_s=900.0)
        self.saved |= {save: done[name_of(save)] for save in saves}
        self.read += [(save, layout, done[f"{name_of(save)}-in-{layout}"]) for save, layout in reads]

    def _job(self, world_size: int, layout: str, model: str, save: Save, *, is_saving: bool) -> dict:
        common = {
            "model": self.models[model],
            "layout": layout_of(world_size, layout, model),
            "store": str(self.folder / f"checkpoints-{name_of(save)}"),
            "algorithm": {},
        }
        if is_saving:
            actions = [["train", 1], ["save", 1], ["state", "state"], ["publish", "w"]]
            return {"name": name_of(save), "actions": actions, **common}
        actions = [["state", "state"], ["publish", "w"]]
        restore = "manifests/00000001.000001.json"
        return {"name": f"{name_of(save)}-in-{layout}", "actions": actions, "restore": restore, **common}


def sample(matrix: Matrix) -> None:
    draw = random.Random(SEED)

    def layouts(world_size: int, saves: list[Save]) -> list[tuple[Save, str]]:
        return [(save, draw.choice(list(LAYOUTS[world_size]))) for save in saves]

    first, second = SAMPLED_SAVES
    extra = (2, draw.choice(list(LAYOUTS[2])), "untied-63")
    matrix.run(first[0], [first], [])
    matrix.run(2, [second, extra], layouts(2, [first]))
    matrix.run(3, [], layouts(3, [first, second, extra]))


def everything(matrix: Matrix) -> None:
    for world_size, layouts in LAYOUTS.items():
        matrix.run(world_size, [(world_size, layout, model) for layout in layouts for model in MODELS], [])
    for world_size, layouts in LAYOUTS.items():
        matrix.run(world_size, [], [(save, layout) for save in matrix.saved for layout in layouts])


@pytest.fixture(scope="session")
def matrix(tmp_path_factory):
    made = Matrix(tmp_path_factory.mktemp("matrix"))
    everything(made) if IS_WHOLE else sample(made)
    return made


@pytest.mark.timeout(7200 if IS_WHOLE else 240)
def test_any_layout_reads_the_state_that_any_other_saved(matrix):
    """One test: with tests dealt out to several processes each would make the matrix anew."""
    check_every_bit(matrix)
    check_every_rank_writes(matrix)
    check_progress_is_told(matrix)
    check_the_arithmetic_of_scale(matrix)
    check_megatron_warns_of_nothing(matrix)


def check_every_bit(matrix):
    assert len(matrix.read) >= 4
    for save, layout, job in matrix.read:
        where = f"{name_of(save)} read in {layout}, YATT_SEED={SEED}"
        expected, got = matrix.saved[save].tensors("state"), job.tensors("state")
        assert any(tensor.abs().max() > 0 for name, tensor in expected.items() if "exp_avg_sq" in name)
        assert {name.partition(".")[0] for name in got} >= {"main", "exp_avg", "exp_avg_sq", "step"}
        assert got.keys() == expected.keys(), where
        assert [name for name in got if not torch.equal(got[name], expected[name])] == [], where
        weights, published = matrix.saved[save].weights("w"), job.weights("w")
        assert [name for name in weights if not torch.equal(weights[name], published[name])] == [], where


def check_every_rank_writes(matrix):
    for save, job in matrix.saved.items():
        sizes = [note["saved_bytes"] for note in job.notes]
        assert min(sizes) > 0, name_of(save)
        if "pp" not in save[1]:
            assert max(sizes) < 1.3 * min(sizes), (name_of(save), sizes)


def check_the_arithmetic_of_scale(matrix):
    """What docs/scale.md counts is what real ranks save."""
    for (world_size, layout, name), job in matrix.saved.items():
        facts, model = LAYOUTS[world_size][layout], read_model(matrix.models[name])
        tp, pp = facts.get(TP, 1), facts.get(PP, 1)
        bytes_of, expected = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        for rank, note in enumerate(job.notes):
            part = (rank % tp, rank * pp // world_size)
            bytes_of[part] = bytes_of.get(part, 0) + note["saved_bytes"]
        kinds = 14 if DTYPES[name] == "bfloat16" else 12
        for part in bytes_of:
            counted = scale.saved_bytes(model, scale.Layout(tp=tp, pp=pp), *part)
            expected[part] = counted * kinds // 14
        if VPP in facts:  # a rank has layers of several places
            assert sum(bytes_of.values()) == sum(expected.values())
        else:
            assert bytes_of == expected, layout


def check_megatron_warns_of_nothing(matrix):
    for folder in matrix.folder.glob("world-*"):
        for log in folder.glob("log-*"):
            assert "data corruption" not in log.read_text()


def check_progress_is_told(matrix):
    for save, job in matrix.saved.items():
        assert all(note["ticks_of"]["build"] > 20 for note in job.notes), name_of(save)
        assert all(note["ticks_of"]["save"] >= 5 for note in job.notes), name_of(save)
    for save, layout, job in matrix.read:
        assert all(note["ticks_of"]["restore"] >= 20 for note in job.notes), (name_of(save), layout)


def test_a_save_needs_little_more_memory_than_the_host_copy(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        ranks = bench.measure(tmp_path, Path(memory), bench.ONLY_MEMORY)
    for rank in ranks:
        assert rank["range_bytes"] > 300e6
        assert rank["host_bytes"] <= 1.1 * rank["state_bytes"], "one copy of everything that is kept"
        assert rank["save_peak_bytes"] <= bench.MOST_EXTRA_BYTES // 4, "blocks, no file"
