"""What differs between the versions of vLLM that yatt allows, or depends on how the engine is built."""

import pytest
import torch

from tests.contract.test_engine import options_for
from tests.packages import needs
from tests.tiny_models import make_qwen3, publish_tensors
from tests.unit.weights.test_registered_memory import Cuda
from yatt.engine.build import build_engine
from yatt.engine.vllm import attention_arguments
from yatt.engine.weights.published import read_publication
from yatt.weights import published
from yatt.weights.registered_memory import MemoryRegistrar

pytestmark = needs("vllm")
GIB = 1 << 30


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """vLLM's settings of its scheduler, as an engine for sampling gets them."""
    model = make_qwen3(tmp_path_factory.mktemp("model"), tied=True)
    engine = build_engine("vllm", options_for(model, deterministic=False, max_num_seqs=64))
    engine.start()
    yield engine._llm.vllm_config.scheduler_config
    engine.close()


def test_a_step_computes_as_many_prompt_tokens_as_in_offline_use(scheduler):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    budgets, _ = EngineArgs.get_batch_defaults(1)
    assert scheduler.max_num_batched_tokens == budgets[UsageContext.LLM_CLASS]
    assert scheduler.max_num_batched_tokens > scheduler.DEFAULT_MAX_NUM_BATCHED_TOKENS


def test_on_an_h100_that_is_16384_tokens(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "get_device_total_memory", lambda *_: 79 * GIB)
    monkeypatch.setattr(platform, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    budgets, _ = EngineArgs.get_batch_defaults(1)
    assert budgets[UsageContext.LLM_CLASS] == 16384
    assert UsageContext.ENGINE_CONTEXT not in budgets, "2,048: the default of LLMEngine.from_engine_args"


def test_only_an_attention_backend_that_this_vllm_has_is_asked_for():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    asked = attention_arguments(options_for("model")).values()
    assert set(asked) == {"CPU_MLA"} & AttentionBackendEnum.__members__.keys()
    assert attention_arguments(options_for("model", device="cuda")) == {}


def test_the_transfer_engine_has_all_that_this_vllm_calls_abstract():
    from yatt.engine.weights.transfer import HostCopyTransferEngine

    assert HostCopyTransferEngine.__abstractmethods__ == frozenset()


@pytest.mark.parametrize(("device", "num_registered"), [("cpu", 0), ("cuda", 1)])
def test_an_update_on_a_gpu_reads_registered_memory(tmp_path, monkeypatch, device, num_registered):
    from yatt.engine.weights.transfer import HostCopyTransferEngine, HostCopyUpdateInfo

    class Model:
        """Takes what it is given, as a model on a GPU does, and notes what is registered meanwhile."""

        def load_weights(self, weights):
            self.loaded = {name: tensor.clone() for name, tensor in weights}
            self.num_registered = len(cuda.registered)

    cuda, tensors = Cuda(), {"matrix": torch.arange(12.0).view(3, 4)}
    monkeypatch.setattr(published, "_MAPPINGS", published._Mappings(MemoryRegistrar(cuda)))
    publication = read_publication(publish_tensors(tmp_path / "v", tensors, 4), 4)
    engine = object.__new__(HostCopyTransferEngine)  # vLLM's own constructor wants a whole engine
    engine.device, engine.model = torch.device(device), Model()
    stems = [str(stem) for stem in publication.stems]
    update = HostCopyUpdateInfo(stems=stems, attempt=1, policy_version=4, sums=publication.sums)
    engine.receive_weights(update)
    engine.check_read()
    assert torch.equal(engine.model.loaded["matrix"], tensors["matrix"])
    assert engine.model.num_registered == num_registered
