"""Names that megatron-core uses without defining them where Transformer Engine is missing."""

from megatron.core.transformer.moe import moe_utils


def define_missing_names() -> None:
    """Defines them as absent, as the code that uses them expects: the router asks for a product of
    Transformer Engine in every forward pass (a NameError in 0.15 and 0.16)."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
