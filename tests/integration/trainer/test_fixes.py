"""What is patched in megatron-core is still needed, and is patched nowhere else."""

import json
import subprocess
import sys

import pytest

from tests.integration.trainer.conftest import child_environment

CUDA = """
import json, torch
before = {}
names = ["current_device", "synchronize", "get_rng_state", "manual_seed", "current_stream", "stream"]
for name in names:
    try:
        getattr(torch.cuda, name)(*{"manual_seed": [0], "stream": [None]}.get(name, []))
        before[name] = "works"
    except Exception as error:
        before[name] = type(error).__name__
from yatt.trainer.mcore import cpu_shim
assert not cpu_shim.is_installed()
cpu_shim.install_shim()
cpu_shim.install_shim()
print(json.dumps({"before": before, "available": torch.cuda.is_available(), "type": torch.zeros(1).type(),
    "installed": cpu_shim.is_installed(), "device": str(torch.cuda.current_device())}))
"""

PRODUCTS = """
import json
import torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from yatt.trainer.mcore import cpu_shim
cpu_shim.install_shim()
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
mpu.initialize_model_parallel()
config = TransformerConfig(num_layers=1, hidden_size=96, num_attention_heads=1, use_cpu_initialization=True)
layer = ColumnParallelLinear(
    96, 130, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
)
given = torch.randn(50, 2, 96, requires_grad=True)
sent = torch.randn(50, 2, 130)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    layer(given)[0].backward(sent)
names = [event.name for event in profile.events()]
flat, back = given.detach().double().flatten(0, 1), sent.double().flatten(0, 1)
wanted = (back @ layer.weight.double()).view(50, 2, 96), back.t() @ flat
errors = [(a - b).abs().max().item() for a, b in zip((given.grad, layer.weight.grad), wanted)]
print(json.dumps({"onednn": names.count("mkldnn::_linear_pointwise"), "torchs": names.count("aten::mm"),
    "error": max(errors)}))
"""


def run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_shim_tells_only_megatron_that_cpu_is_cuda():
    seen = run(CUDA)
    assert seen["before"]["current_device"] != "works"
    assert (seen["available"], seen["installed"]) == (False, True)
    assert (seen["device"], seen["type"]) == ("cpu", "torch.FloatTensor")


@pytest.mark.slow
def test_megatrons_linear_layers_multiply_by_onednn_forwards_and_backwards():
    seen = run(PRODUCTS)
    assert (seen["onednn"], seen["torchs"]) == (3, 0)
    assert seen["error"] < 1e-4
