"""Reads which layers of a decoder attend to a window of the last positions, as transformers reads it.

The keys are the same in all families, their meaning is not: so each family names one of the rules below. A
rule maps the content of config.json, with the family's defaults, to each layer's window: the number of
positions that a token attends to, itself included; 0: all.
"""

from collections.abc import Callable, Container
from typing import Any

from yatt.errors import ConfigError
from yatt.models.config_types import Values, config_count, config_size, flag_of, refused_config

WindowRule = Callable[[Values, int], list[int]]
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, FIRST_LATE_LAYER = 4096, 28
"""Qwen's values in transformers where the keys are missing."""


def no_windows(values: Values, num_layers: int) -> list[int]:
    """Of a family that has none.

    Raises:
        ConfigError: config.json says that there are some.
    """
    if values.get("use_sliding_window") not in (None, False):
        raise _unsupported(values, "use_sliding_window", "false")
    if values.get("use_sliding_window") is None and values.get("sliding_window") is not None:
        raise _unsupported(values, "sliding_window", "null")
    if other := [kind for kind in _listed_kinds(values, num_layers) if kind != FULL]:
        raise _unknown_kind(other[0], f"'{FULL}' in every layer")
    return [0] * num_layers


def listed_windows(values: Values, num_layers: int) -> list[int]:
    """Of Mistral: `sliding_window` is that of all layers, or of those of `layer_types`. With the list,
    transformers takes the classes of Ministral for it."""
    return _by_layer(values, num_layers, _window_size(values), range(num_layers))


def same_windows(values: Values, num_layers: int) -> list[int]:
    """Of Mixtral: `sliding_window` is that of all layers."""
    return _of_all_layers(values, num_layers, _window_size(values))


def flagged_windows(values: Values, num_layers: int) -> list[int]:
    """Of Qwen3-MoE: `sliding_window` is that of all layers, if `use_sliding_window` is true."""
    return _of_all_layers(values, num_layers, _flagged_size(values))


def late_windows(values: Values, num_layers: int) -> list[int]:
    """Of Qwen2 and Qwen3: layers from `max_window_layers` on have one, or those of `layer_types`."""
    first = config_count({"max_window_layers": FIRST_LATE_LAYER, **values}, "max_window_layers")
    return _by_layer(values, num_layers, _flagged_size(values), range(first, num_layers))


def alternate_windows(values: Values, num_layers: int) -> list[int]:
    """Of Qwen2-MoE: every other layer before `max_window_layers` has one, or those of `layer_types`."""
    end = config_count({"max_window_layers": FIRST_LATE_LAYER, **values}, "max_window_layers")
    return _by_layer(values, num_layers, _flagged_size(values), range(0, end, 2))


def most_windows(values: Values, num_layers: int) -> list[int]:
    """Of OLMo-3: all layers but every fourth have one, or those of `layer_types`.

    Raises:
        ConfigError: there is no size.
    """
    narrow = [index for index in range(num_layers) if (index + 1) % 4]
    return _by_layer(values, num_layers, config_size(values, "sliding_window"), narrow)


def _by_layer(values: Values, num_layers: int, size: int, narrow: Container[int]) -> list[int]:
    """Of the layers that `layer_types` lists, or without it of the layers `narrow`."""
    kinds = _listed_kinds(values, num_layers)
    if other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise _unknown_kind(other[0], f"'{FULL}' or '{SLIDING}'")
    if SLIDING in kinds and not size:
        raise refused_config(
            f"says layer_types with '{SLIDING}', but no window; write sliding_window, and "
            "use_sliding_window: true where the family has it."
        )
    has_window = [kind == SLIDING for kind in kinds] or [index in narrow for index in range(num_layers)]
    return [size if has_one else 0 for has_one in has_window]


def _of_all_layers(values: Values, num_layers: int, size: int) -> list[int]:
    """Refuses a list that transformers does not read in this family, and vLLM does: they would differ."""
    wanted = SLIDING if size else FULL
    if other := [kind for kind in _listed_kinds(values, num_layers) if kind != wanted]:
        raise _unknown_kind(other[0], f"'{wanted}' in every layer, as sliding_window says")
    return [size] * num_layers


def _window_size(values: Values) -> int:
    return 0 if values.get("sliding_window") is None else config_size(values, "sliding_window")


def _flagged_size(values: Values) -> int:
    """Qwen's files have a size beside a flag that says that it is not used."""
    if values.get("use_sliding_window") is None or not flag_of(values, "use_sliding_window"):
        return 0
    return _window_size({"sliding_window": DEFAULT_WINDOW, **values})


def _listed_kinds(values: Values, num_layers: int) -> list[Any]:
    listed = values.get("layer_types") or []
    if not isinstance(listed, list | tuple):
        raise refused_config(f"says layer_types={listed!r}; it needs a list of names.")
    if listed and len(listed) != num_layers:
        raise refused_config(
            f"says layer_types of {len(listed)} layers, and num_hidden_layers={num_layers}; one "
            "of them is wrong."
        )
    return list(listed)


def _unsupported(values: Values, key: str, wanted: str) -> ConfigError:
    return refused_config(
        f"says {key}={values[key]!r}, which the trainer cannot do for {values['model_type']}; "
        f"it needs {wanted}."
    )


def _unknown_kind(kind: object, wanted: str) -> ConfigError:
    return refused_config(f"says layer_types with {kind!r}, which the trainer cannot do; it needs {wanted}.")
