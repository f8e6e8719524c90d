"""Chooses a trainer rank's device and applies process-wide settings. Only entry points call this."""

import torch

from yatt.config.schema import RunConfig
from yatt.errors import ConfigError


def prepare_process(config: RunConfig, local_rank: int) -> torch.device:
    """Chooses the device, sets threads and determinism, and prepares megatron-core for the device.

    Raises:
        ConfigError: launch.device is cuda, but there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if config.launch.device == "cuda" and not has_cuda:
        raise ConfigError("launch.device is cuda, but torch sees no CUDA device; write auto or cpu.")
    torch.set_num_threads(config.launch.threads_per_worker)
    if has_cuda:
        torch.use_deterministic_algorithms(config.run.deterministic, warn_only=True)
        # If the controller makes only this worker's own GPUs visible, this rank's GPU is the first.
        device = torch.device("cuda", local_rank if local_rank < torch.cuda.device_count() else 0)
        torch.cuda.set_device(device)
    else:
        from yatt.trainer.mcore import cpu_shim

        # Unlike `use_deterministic_algorithms`, this does not import the compiler, which is not used on CPU.
        torch.set_deterministic_debug_mode("warn" if config.run.deterministic else "default")
        cpu_shim.install_shim()
        device = torch.device("cpu")
    return device
