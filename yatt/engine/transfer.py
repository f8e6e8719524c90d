"""vLLM's side of weight transfer: its worker processes read a publication from node-local memory.

vLLM's own `WeightTransferEngine` interface (worker class and four RPCs) has been stable since 0.25, but its
trainer-side classes change every release; we use only the former. Each worker maps the safetensors files and
passes the tensors to the model's own `load_weights`, which slices them for its tensor-parallel rank. So the
trainer's layout and the engine's are independent.

This module imports vLLM at its top: only vLLM's worker processes load it, as `worker_extension_cls` (in
process, that is our own process, after vLLM is imported).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from yatt.engine.compare import compare_weights, verified
from yatt.engine.cpu_repairs import prepack_experts_on_reload, repack_tied_heads
from yatt.engine.protocol import Comparison

BACKEND = "yatt_shm"


@dataclass
class FolderInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not typed here
    """Empty: no initialization is needed before the first update."""


@dataclass
class FolderUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Paths of the publication's safetensors files, and a checksum by tensor name."""

    files: list[str]
    checksums: dict[str, str]


_Base: Any = WeightTransferEngine[FolderInitInfo, FolderUpdateInfo]


class FolderWeightTransferEngine(_Base):  # type: ignore[misc]  # as above
    """Loads weights from files under their Hugging Face names."""

    init_info_cls = FolderInitInfo
    update_info_cls = FolderUpdateInfo

    def init_transfer_engine(self, init_info: FolderInitInfo) -> None:
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

    def receive_weights(self, update_info: FolderUpdateInfo) -> None:
        """Loads every tensor of the files into the model, after a comparison with its checksum."""
        with torch.no_grad():
            tensors = verified(published_tensors(update_info.files), update_info.checksums)
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Repacks weights for the engine's kernels."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Does nothing, because nothing is held between updates."""


def published_tensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor, mapped from the files; a tensor keeps its file mapped while it exists."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - safetensors' reader is not a dict
                yield name, reader.get_tensor(name)


class WorkerExtension:
    """Methods that are added to vLLM's workers, for `collective_rpc` by name."""

    model_runner: Any

    def yatt_compare_weights(self, checksums: dict[str, str]) -> Comparison:
        """See Engine.compare_weights; compares this tensor-parallel rank's part."""
        return compare_weights(self.model_runner.get_model().named_parameters(), checksums)


def _register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeightTransferEngine)
    prepack_experts_on_reload()


# This runs at import, against our rule: the import of the worker extension is vLLM's only hook in every
# worker process before the model is built.
_register()
