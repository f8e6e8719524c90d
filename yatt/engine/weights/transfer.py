"""vLLM's side of weight transfer: its worker processes read published weights from the trainers' host copies.

vLLM's own `WeightTransferEngine` interface (worker class and four RPCs) has been stable since 0.25, but its
trainer-side classes change every release; we use only the former. Each worker maps the host copies and passes
the tensors to the model's own `load_weights`, which slices them for its tensor-parallel rank and reads only
these slices. So the trainer's layout and the engine's are independent.

This module imports vLLM at its top: only vLLM's worker processes load it, as `worker_extension_cls` (in
process, that is our own process, after vLLM is imported).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from yatt.adapters.node_local.host_segment import Stamp
from yatt.engine.cpu_repairs import prepack_experts_on_reload, repack_tied_heads, rotate_queries_natively
from yatt.engine.protocol import UNLOADED, Comparison
from yatt.engine.weights.compare import NameInEngine, check_published, compare_weights, with_progress
from yatt.weights.published import PublishedWeights

BACKEND = "yatt_shm"


@register_model_loader(UNLOADED)
class UnloadedWeights(DummyModelLoader):  # type: ignore[misc]  # as above
    """Loads nothing. vLLM's own `dummy` writes random numbers also over buffers that no file has, such as
    those by which it normalises pixels."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fills the weights, and keeps the buffers."""
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])


@dataclass
class HostCopyInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not typed here
    """Empty: no initialization is needed before the first update."""


@dataclass
class HostCopyUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Paths of the host copies, their stamp, the number of the node in an engine that spans several, and
    checksums of what it has of some tensors by name."""

    stems: list[str]
    attempt: int
    policy_version: int
    sums: dict[str, int]
    part: int | None = None


_Base: Any = WeightTransferEngine[HostCopyInitInfo, HostCopyUpdateInfo]


class HostCopyTransferEngine(_Base):  # type: ignore[misc]  # as above
    """Loads weights under their Hugging Face names."""

    _published: PublishedWeights | None = None
    _sums: dict[str, int]

    init_info_cls = HostCopyInitInfo
    update_info_cls = HostCopyUpdateInfo

    def init_transfer_engine(self, init_info: HostCopyInitInfo) -> None:
        """Does nothing, because there is no connection."""

    def start_weight_update(self) -> None:
        """Prepares a reload layer by layer, so that each layer is processed as at the first load."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives the weights as the base class does, without its synchronize(), which raises on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostCopyUpdateInfo) -> None:
        """Loads every published tensor into the model."""
        stamp = Stamp(update_info.attempt, update_info.policy_version)
        stems, is_for_gpu = [Path(stem) for stem in update_info.stems], self.device.type == "cuda"
        self._published = PublishedWeights(stems, stamp, part=update_info.part, is_for_gpu=is_for_gpu)
        self._sums = update_info.sums
        with torch.no_grad():
            self.model.load_weights(with_progress(self._published))

    def finish_weight_update(self) -> None:
        """Repacks weights for the engine's kernels."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def check_read(self) -> None:
        """Checks what the finished update has read, and forgets the host copies.

        Raises:
            WorkerFailed: it was not all of the published version.
        """
        published, self._published = self._published, None
        assert published is not None, "an update has read it"
        check_published(published, self._sums)

    def shutdown(self) -> None:
        """Does nothing, because nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26, which cannot build an engine without it; later versions have not got it."""
        raise NotImplementedError("the trainer's ranks write their host copies; nothing is sent")


class WorkerExtension:
    """Methods that are added to vLLM's workers, for `collective_rpc` by name."""

    model_runner: Any
    weight_transfer_engine: Any

    def yatt_check_read(self) -> None:
        """See HostCopyTransferEngine.check_read. vLLM leaves an update unfinished if its own steps raise."""
        self.weight_transfer_engine.check_read()

    def yatt_compare_weights(self, checksums: dict[str, str]) -> Comparison:
        """See Engine.compare_weights; compares what this tensor-parallel rank has whole."""
        model = self.model_runner.get_model()
        left_out = _sliced_vocabularies(model)
        held = ((name, tensor) for name, tensor in model.named_parameters() if name not in left_out)
        return compare_weights(held, checksums, _name_in(model))


def _name_in(model: torch.nn.Module) -> NameInEngine:
    """Returns vLLM's own mapping of names: the model's, then that of the innermost module that has one."""
    mappers = {
        name and f"{name}.": module.hf_to_vllm_mapper
        for name, module in model.named_modules()
        if getattr(module, "hf_to_vllm_mapper", None) is not None
    }
    whole, inner = mappers.pop("", None), sorted(mappers, key=len, reverse=True)

    def name_of(name: str) -> str | None:
        place: str | None = name if whole is None else whole.map_name(name)
        prefix = next((each for each in inner if place and place.startswith(each)), None)
        if place is None or prefix is None:
            return place
        rest = mappers[prefix].map_name(place.removeprefix(prefix))
        return None if rest is None else prefix + rest

    return name_of


def _sliced_vocabularies(model: torch.nn.Module) -> set[str]:
    """Names of embeddings and heads of which this rank has a slice. Their shapes do not show it: vLLM pads
    vocabularies to 64 rows, so a slice may have as many rows as a small one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    modules = model.named_modules()
    return {
        f"{name}.weight"
        for name, module in modules
        if isinstance(module, VocabParallelEmbedding) and module.tp_size > 1
    }


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostCopyTransferEngine)
    prepack_experts_on_reload()
    rotate_queries_natively()


# This runs at import, against our rule: the import of the worker extension is vLLM's only hook in every
# worker process before the model is built.
_register()
