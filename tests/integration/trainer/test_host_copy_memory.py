"""The segments of a host copy are registered with CUDA as long as they are mapped."""

import gc
from pathlib import Path
from typing import Any

import torch

from tests.packages import trainer_module
from tests.unit.weights.test_registered_memory import Cuda
from yatt.adapters.node_local.host_segment import STATE, WEIGHTS
from yatt.weights.registered_memory import MemoryRegistrar


def host_copy_in(folder: Path) -> Any:
    folder.mkdir()
    host = trainer_module("state.host_copy")
    areas = {WEIGHTS: [torch.ones(1 << 18)], STATE: [torch.zeros(1 << 18), torch.zeros(3)]}
    copy = host.HostCopy(folder / "rank-00000", attempt=1)
    copy.add(host.KeptTensors(areas=areas, private=[torch.ones(5)]))
    return copy


def test_each_segment_of_each_host_copy_is_registered_and_given_back_once(tmp_path, caplog):
    cuda = Cuda()
    for index in range(6):
        host = host_copy_in(tmp_path / f"{index}")
        host.register_segments(MemoryRegistrar(cuda), (WEIGHTS, STATE))
        assert len(cuda.registered) == 2
        host.changed(index)
        host.offload()
        host.onload()
        del host
        gc.collect()
        assert cuda.registered == {}
    calls = [call[:2] for call in cuda.calls]
    for registered in (call for call in calls if call[0] == "register"):
        assert calls.count(registered) == calls.count(("unregister", registered[1]))
    assert len(calls) == 6 * 2 * 2
    assert caplog.records == []


def test_segments_that_cannot_be_registered_leave_no_error_of_cuda_and_are_used(tmp_path, caplog):
    cuda = Cuda(limit_bytes=0)
    host = host_copy_in(tmp_path / "host")
    host.register_segments(MemoryRegistrar(cuda), (WEIGHTS, STATE))
    assert cuda.error == 0
    assert ["copies between it and the GPU are slow" in record.message for record in caplog.records] == [True]
    host.changed(1)
    host.offload()
    assert host.device_bytes == 0


def test_torch_has_the_call_that_frees_the_workspaces_of_cublas():
    # A build for CPU lacks it, but its description of torch._C is the same.
    description = Path(torch.__file__).parent / "_C" / "__init__.pyi"
    assert f"def {trainer_module('state.host_copy').CLEAR_WORKSPACES}() -> None" in description.read_text()
