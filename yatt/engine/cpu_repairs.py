"""Three repairs of vLLM on CPU, without which weights or positions are silently wrong.

1. A *tied* `lm_head` keeps its old oneDNN-packed copy, because layerwise reload rebuilds a layer only
   if a checkpoint tensor was loaded into it, and none is: log-probs off by about 0.9, no error.
2. Fused MoE expert weights are copied back without the prepacking of the first load: same sum, wrong
   layout, off by about 0.4, no error.
3. The rotary kernel turns queries of shape [tokens, heads, size] wrongly if there are fewer keys than
   heads: latent attention. Off by about 0.2, no error.

All were observed in vLLM 0.32.0, and 0.33.0 has the same code; upstream's list of such bugs is
vllm-project/vllm issue 48312. `tests/integration/test_vllm_repairs.py` fails when a repair is no longer
needed; then it is removed. On GPU the repairs do nothing. vLLM's worker processes import this module.
"""

from typing import Any

QUERY_DIMS = 3
"""Tokens, heads, size of a head; other models pass tokens and all heads together."""


def prepack_experts_on_reload() -> None:
    """Repair 2: patches the MoE method once in this process, before the engine is built.

    A pass over the experts after the reload would be wrong: it would pack twice if an update contains
    no experts.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Method,
    )
    from vllm.platforms import current_platform

    setup = getattr(Method, "_setup_kernel", None)
    if not current_platform.is_cpu() or setup is None or hasattr(setup, "repaired_by_yatt"):
        return

    def setup_and_prepack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_prepack.repaired_by_yatt = True  # type: ignore[attr-defined]  # mark of the patch
    Method._setup_kernel = setup_and_prepack


def rotate_queries_natively() -> None:
    """Repair 3: patches the rotary layer once in this process to use torch for queries of that shape."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    rotate = RotaryEmbedding.forward_cpu
    if not current_platform.is_cpu() or hasattr(rotate, "repaired_by_yatt"):
        return

    def rotate_or_natively(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        whole = self.forward_native if query.dim() == QUERY_DIMS else rotate.__get__(self)
        return whole(positions, query, key)

    rotate_or_natively.repaired_by_yatt = True  # type: ignore[attr-defined]  # mark of the patch
    RotaryEmbedding.forward_cpu = rotate_or_natively


def repack_tied_heads(model: Any) -> None:
    """Repair 1: rebuilds packed copies of embeddings. Idempotent; called after each finished update."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in list(model.modules()):
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
