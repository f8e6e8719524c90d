"""How experts lie in memory."""

from yatt.trainer.grouped_experts import GroupedExperts
from yatt.trainer.grouped_product import together as put_together
from yatt.trainer.model import Policy


def together(policy: Policy) -> list[bool]:
    """Of each layer with experts and each of their two layers: whether all matrices are one view."""
    modules = [m for model in policy.models for m in model.modules() if isinstance(m, GroupedExperts)]
    kinds = [
        [getattr(expert, name).weight for expert in module.local_experts]
        for module in modules
        for name in ("linear_fc1", "linear_fc2")
    ]
    return [put_together(weights).data_ptr() == weights[0].data_ptr() for weights in kinds]
