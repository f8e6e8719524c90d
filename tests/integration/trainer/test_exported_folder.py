"""`yatt ckpt export` gives what the trainer itself exports, from what real ranks saved."""

import pytest
import torch

from tests.integration.trainer.conftest import run_world
from tests.saved_weights import tensors_in
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.verifying import verify_checkpoint
from yatt.checkpoint.convert.export import export_as_hf
from yatt.checkpoint.store.store import FolderStore
from yatt.models.folder import ModelFolder
from yatt.models.model import read_model

pytestmark = pytest.mark.slow
NAME = "manifests/00000001.000001.json"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
JOBS = {
    "llama-tp2-bf16": ("llama", {TP: 2, "dtype": "bfloat16"}),
    "qwen2-pp2-tied": ("qwen2", {PP: 2}),
    "qwen3-dp2-bf16": ("qwen3", {"dtype": "bfloat16"}),
}


def test_an_export_of_a_saved_checkpoint_equals_the_trainers_own(models, tmp_path):
    jobs = [
        {
            "name": name, "model": str(models[kind]), "layout": layout, "store": str(tmp_path / f"of-{name}"),
            "actions": [["train", 1], ["save", 1], ["export", "hf"]],
        }
        for name, (kind, layout) in JOBS.items()
    ]  # fmt: skip
    done = run_world(tmp_path / "world", 2, jobs)
    for name, (kind, _) in JOBS.items():
        checkpoints = Checkpoints(FolderStore(tmp_path / f"of-{name}"), 0)
        folder = ModelFolder(path=models[kind], model=read_model(str(models[kind])))
        export_as_hf(checkpoints, NAME, folder, tmp_path / name, lambda _: None)
        got, wanted = tensors_in(tmp_path / name), tensors_in(done[name].folder / "hf")
        assert got.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert (got[key].dtype, torch.equal(got[key], tensor)) == (tensor.dtype, True), (name, key)
        assert verify_checkpoint(checkpoints, NAME, lambda _: None).damages == ()
        start = tensors_in(models[kind])
        assert any(not torch.equal(got[key].float(), start[key]) for key in start), "it was trained"
