"""Which weights an engine holds wrongly: norms in the engine against norms of the publication.

For the message after a failed sync probe. Engines fuse some weights (q, k and v into one); their
squared norms add up, so the fused one can still be compared.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from yatt.engine.published import Publication

TOLERANCE = 1e-3
MAX_NAMED = 8
_FUSED = {
    ".q_proj.": ".qkv_proj.",
    ".k_proj.": ".qkv_proj.",
    ".v_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.",
    ".up_proj.": ".gate_up_proj.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs: a sentence a weight, worst first; and how many published weights could be compared."""

    worst: tuple[str, ...]
    num_compared: int


def compare_norms(held: Mapping[str, float], published: Mapping[str, float]) -> Comparison:
    """Compare by name, published weights fused where the engine fuses them."""
    squares: defaultdict[str, float] = defaultdict(float)
    num_compared = 0
    for name, norm in published.items():
        place = next((other for other in (name, fused_name(name)) if other in held), None)
        if place is not None:
            squares[place] += norm * norm
            num_compared += 1
    expected = {name: math.sqrt(square) for name, square in squares.items()}
    differences = {
        name: abs(held[name] - norm) / max(norm, held[name], 1e-12) for name, norm in expected.items()
    }
    wrong = sorted((name for name, off in differences.items() if off > TOLERANCE), key=differences.get)  # type: ignore[arg-type]  # every name has a difference
    return Comparison(
        worst=tuple(
            f"{name}: norm {held[name]:.6g} in the engine, {expected[name]:.6g} published"
            for name in wrong[::-1][:MAX_NAMED]
        ),
        num_compared=num_compared,
    )


def fused_name(name: str) -> str:
    """The name of the fused weight that a checkpoint's weight becomes part of."""
    for part, fused in _FUSED.items():
        if part in name:
            return name.replace(part, fused)
    return name


def published_norms(publication: Publication) -> dict[str, float]:
    """Norm of every published weight."""
    if not publication.files:
        return {}
    import torch
    from safetensors.torch import load_file

    return {
        name: float(torch.linalg.vector_norm(tensor.float()))
        for file in publication.files
        for name, tensor in load_file(file).items()
    }
