"""What a nursery imports for trainer ranks; see `yatt.adapters.processes.nursery`."""


def preload(_kind: str, device: str, _threads: int) -> None:
    """Imports what a trainer rank imports before its first order.

    Args:
        device: cpu or cuda; on CUDA nothing here asks the driver for devices.
    """
    if device == "cpu":
        from yatt.trainer.mcore import cpu_shim

        cpu_shim.install_shim()
    import yatt.trainer.device
    import yatt.trainer.worker  # noqa: F401
