"""Names that megatron-core uses without defining them where Transformer Engine is missing."""

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from yatt.trainer.spec import DuplicatedLinear


def define_missing_names() -> None:
    """Defines them as the code that uses them expects. The router asks for a product of Transformer Engine in
    every forward pass: absent (a NameError in 0.15 and 0.16). Latent attention asks whether a layer is whole
    on each rank by the class of Transformer Engine: ours stands in (a TypeError in 0.16: it is no class)."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = DuplicatedLinear
