"""Model folders in FP8 with a scale for each block of 128 x 128 elements, as DeepSeek-V3 is released.

They are dequantised when they are read; a trained policy is never quantised.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2, and the model card's `weight_dequant`.
"""

import json
from collections.abc import Mapping
from typing import Any

from yatt.errors import ConfigError
from yatt.models.config_types import refused_config

BLOCK = 128
SCALE = "_scale_inv"
"""Suffix of the tensor with a weight's scales, float32 [rows / 128, columns / 128], rounded up."""

FP8 = "F8_E4M3"
"""The dtype in a safetensors header."""

KEY = "quantization_config"
_ALLOWED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
_SAME = {"float8_e4m3fn": "e4m3"}
"""Another word for the format, in MiniMax-M2's files."""


def is_quantised(values: Mapping[str, Any]) -> bool:
    """Whether a folder with this config.json is in FP8 with block scales.

    Raises:
        ConfigError: it is quantised otherwise.
    """
    found = values.get(KEY)
    if found is None:
        return False
    if not isinstance(found, Mapping):
        raise _unsupported(found)
    meant = {key: _SAME.get(str(value), value) if key == "fmt" else value for key, value in found.items()}
    if any(meant.get(key, wanted) != wanted for key, wanted in _ALLOWED.items()):
        raise _unsupported(found)
    if "quant_method" not in found or "weight_block_size" not in found:
        raise _unsupported(found)
    return True


def _unsupported(found: object) -> ConfigError:
    return refused_config(
        f"says {KEY}={found!r}, which the trainer cannot read; it needs {_ALLOWED}, or the model in bfloat16."
    )


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_faults(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> list[str]:
    """What is wrong with the scales of a folder's tensors in FP8."""
    faults = []
    for name in sorted(name for name, dtype in dtypes.items() if dtype == FP8):
        wanted, got = scale_shape(shapes[name]), shapes.get(name + SCALE)
        if len(wanted) == 3:
            faults.append(
                f"has {name} in FP8, and experts in one tensor are not read so; take the bfloat16 release"
            )
        elif len(wanted) != 2 or got != wanted:
            faults.append(f"has {name} in FP8 without its scales {name}{SCALE} of shape {wanted}")
    return faults


def without_scales(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The tensors but for the scales of those in FP8."""
    scales = {name + SCALE for name, dtype in dtypes.items() if dtype == FP8}
    return {name: shape for name, shape in shapes.items() if name not in scales}


EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules")
"""Keys of config.json for the number of layers that predict further tokens."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the dtype of the weights; the second is older, and read by all versions."""


PLAIN_CLASS, SCORED_CLASS = "ForCausalLM", "ForSequenceClassification"
"""Ends of the names of transformers' classes, with an output layer and with a value head."""


def exported_config(data: bytes, dtype: str, *, has_score: bool = False) -> bytes:
    """config.json of a trained policy, from its first model's: not quantised, without layers that predict
    further tokens, with the dtype of the weights. Unchanged if that was so already.

    Args:
        dtype: as `bfloat16`.
        has_score: as that of a reward model with one label, by the classes of transformers.
    """
    values = json.loads(data)
    kept = {key: value for key, value in values.items() if key != KEY}
    for key in [key for key in DTYPE_KEYS if key in kept] or DTYPE_KEYS[1:]:
        kept[key] = dtype
    for key in EXTRA_LAYERS:
        if kept.get(key):
            kept[key] = 0
    if has_score:
        names = [str(name) for name in kept.get("architectures") or ()]
        kept["architectures"] = [name.replace(PLAIN_CLASS, SCORED_CLASS) for name in names]
        kept["num_labels"], kept["id2label"], kept["label2id"] = 1, {"0": "score"}, {"score": 0}
    return data if kept == values else json.dumps(kept, indent=2).encode()
