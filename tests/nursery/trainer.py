"""What a nursery of trainer worlds imports: megatron-core, and the programs' other libraries."""


def preload(_kind: str, _device: str, _threads: int) -> None:

    from yatt.trainer import cpu_shim

    cpu_shim.install()
    import yatt.trainer.worker
    import yatt.uploader.upload  # noqa: F401
