"""CPU replacements for the CUDA calls that megatron-core makes unconditionally.

megatron-core uses CUDA in three ways, and each has a small replacement:

1. ``device=torch.cuda.current_device()``, RNG and stream calls: those torch.cuda functions are
   replaced by CPU functions;
2. literals (``device="cuda"``, ``.cuda()``, ``pin_memory=True``): a TorchFunctionMode rewrites them,
   only for callers inside ``megatron``;
3. optimizers that compare ``p.type()`` with ``"torch.cuda.FloatTensor"``: the same mode returns that name.

The mode also gives megatron's linear layers the faster matrix product of `cpu_matmul`. Their own autograd
function computes the gradients, so the product needs none.

``torch.cuda.is_available()`` stays False. A process's entry point installs the shim, only without CUDA.
Upstream: Megatron-LM pull request 6270 is about conversion on CPU; no request is about training, so
the shim stays for the supported versions (0.16 to 0.19).
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from yatt.trainer.mcore.cpu_matmul import fast_matmul

CPU = torch.device("cpu")
MATMULS = (torch.matmul, torch.Tensor.matmul)
CHANGED = frozenset((*MATMULS, torch.Tensor.cuda, torch.Tensor.type))
"""What means something else on CPU; other functions, only with keywords."""


class CudaLiteralsInMegatron(TorchFunctionMode):
    """Rewrites CUDA literals of callers in `megatron` to CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`; for callers in megatron, CUDA is replaced by CPU."""
        if not kwargs and func not in CHANGED:  # nearly all: each attribute of a tensor is a call
            return func(*args)
        kwargs = kwargs or {}
        if not _calling_module().startswith("megatron."):
            return func(*args, **kwargs)
        if func in MATMULS and not kwargs and not torch.is_grad_enabled():
            return fast_matmul(*args)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _calling_module() -> str:
    """The module whose code made the call that the mode sees, also within `with torch.device(...)`."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == "torch.utils._device" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class InertStream:
    """A stream without effect, because CPU execution is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def record_event(self, *_: Any) -> "InertEvent":
        """Returns an event that has happened."""
        return InertEvent()

    def wait_event(self, _: Any) -> None:
        """Does nothing."""


class InertEvent:
    """An event of such a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Does nothing."""

    def wait(self, *_: Any) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Disables torch.compile while megatron-core is imported. megatron-core compiles small fused functions
    then, which imports the compiler: over a second of each rank's start, for functions unused on CPU."""
    compiler = torch.compile

    def as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else as_it_is

    torch.compile = as_it_is
    try:
        yield
    finally:
        torch.compile = compiler


def _uncompile_optimizers() -> None:
    """Unwraps methods that torch excludes from compiled code. Their first call would import the compiler,
    which takes a second of each rank's CPU time."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    kinds: tuple[Any, ...] = (torch.optim.Adam, torch.optim.SGD)  # AdamW has Adam's step
    for kind in kinds:
        kind.step = torch.no_grad()(inspect.unwrap(kind.step))


def _current_device() -> torch.device:
    return CPU


def is_installed() -> bool:
    """Whether this process runs megatron-core on CPU through this shim."""
    installed: object = torch.cuda.current_device
    return installed is _current_device


def install_shim() -> None:
    """Installs the shim in this process. Call it in the main thread, before megatron objects are built."""
    assert not torch.cuda.is_available(), "the shim is for machines without CUDA"
    if is_installed():
        return
    generator, stream = torch.default_generator, InertStream()
    meanings: dict[str, Any] = {
        "current_device": _current_device,
        "synchronize": lambda *_, **__: None,
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "current_stream": lambda *_, **__: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": InertStream,
        "Event": InertEvent,
    }
    for name, meaning in meanings.items():
        setattr(torch.cuda, name, meaning)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state

    with _uncompiled():
        import megatron.core.tensor_parallel.random as mcore_random

    def set_rng_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:  # noqa: ARG001
        generator.set_state(state)

    mcore_random._set_cuda_rng_state = set_rng_state
    _uncompile_optimizers()
    _keep_mode_in_backward()
    _count_tokens_on_cpu()
    _exchange_uneven_parts()
    mode: Any = CudaLiteralsInMegatron()
    mode.__enter__()


def _keep_mode_in_backward() -> None:
    """Enables the mode in the backward pass of the linear layers; torch disables modes during backward."""
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication as Linear

    backward = Linear.backward

    def backward_in_mode(ctx: Any, *grads: torch.Tensor) -> Any:
        mode: Any = CudaLiteralsInMegatron()
        with mode:
            return backward(ctx, *grads)

    Linear.backward = staticmethod(backward_in_mode)


def _count_tokens_on_cpu() -> None:
    """Lets experts' token counts stay where they are: megatron-core copies them from CUDA, on a stream."""
    from megatron.core.transformer.moe import token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


def _exchange_uneven_parts() -> None:
    """Lets ranks that share experts' matrices gather and scatter different numbers of tokens; gloo's own
    collectives need equal ones."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(
        part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([each[:size] for each, size in zip(parts, output_split_sizes, strict=True)])

    def scatter_parts(
        whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, None, use_global_buffer)
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts
