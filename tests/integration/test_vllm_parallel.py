"""An engine over two tensor-parallel worker processes: takes weights like one of one, and leaves nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version

from tests.contract.test_engine import (
    PROMPT,
    ids_of,
    largest_difference,
    options_for,
    run,
    sample,
    transformers_logprobs,
)
from tests.packages import needs, version_of
from tests.runs import wait_for
from tests.tiny_models import make_qwen3, publish
from yatt.adapters.machine.memory import ProcessGroups
from yatt.adapters.node_local import shared_memory
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare_environment
from yatt.records import message as m

pytestmark = needs("vllm")


@pytest.mark.slow
def test_two_tensor_parallel_workers_serve_updated_weights(tmp_path):
    prepare_environment(device="cpu", threads=1)
    models = [make_qwen3(tmp_path / name, tied=True, seed=seed) for seed, name in enumerate("ab")]
    engine = build_engine("vllm", options_for(models[0], tp_size=2))
    engine.start()
    completed = run(engine, sample("one", ignore_eos=True))["one"]
    ids = PROMPT + ids_of(completed)
    engine.load_weights(1, publish(tmp_path / "v1", model=models[1], policy_version=1, cuts=3))
    scored = engine.score([ids])[0]
    engine.close()
    before = transformers_logprobs(models[0], ids)[len(PROMPT) - 1 :]
    assert largest_difference(m.unpack_floats(completed.logprobs), before) < 1e-4
    assert largest_difference(scored, transformers_logprobs(models[1], ids)) < 1e-4


HOLDS = """
import sys, time
from tests.contract.test_engine import options_for
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare_environment

if __name__ == "__main__":
    prepare_environment(device="cpu", threads=1)
    engine = build_engine("vllm", options_for(sys.argv[1], tp_size=2))
    engine.start()
    print("it is up", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_killed_engine_processes_leave_no_shared_memory(tmp_path):
    (tmp_path / "holds.py").write_text(HOLDS)
    model = make_qwen3(tmp_path / "model", tied=True, seed=0)
    with (tmp_path / "log").open("w+") as log:
        engine = subprocess.Popen(
            [sys.executable, tmp_path / "holds.py", model], stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for(lambda: "it is up" in (tmp_path / "log").read_text(), timeout_s=200, what="the engine")
            group = ProcessGroups().members([engine.pid], time.monotonic())
            files = shared_memory.used_by(group)
        finally:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
    kinds = {re.match(r"psm|sem\.mp-|vllm", name)[0] for name in files}
    # vLLM's build for other CPUs has none, nor has version 0.26 of this build.
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    has_own_memory = has_avx512 and version_of("vllm") >= Version("0.27")
    assert kinds == {"psm", "sem.mp-", *(("vllm",) if has_own_memory else ())}
    assert shared_memory.remove_unused(files, limit_s=10.0) == set()
    assert not files & shared_memory.shared_memory_files()
