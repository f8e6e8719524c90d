"""Values of config.json that have to be numbers or flags; types of keys that engines check strictly. Pure.

transformers 5 refuses a config.json or tokenizer_config.json whose value has another type, when an engine is
built; null is refused too for most keys. So the launcher refuses it by name.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from yatt.errors import ConfigError

Values = Mapping[str, Any]
MODEL_KEY = "model.path"
"""The key of the run file whose folder is read."""

LARGEST = 1e30
MOST_OF_OTHERS = (1 << 31) - 1
MOST_OF_KEY = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules"), 2000)
MOST_OF_KEY |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4096)
"""Largest sizes that are read: more would only cost memory and time before the model is refused."""

SIZES = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    }
)  # fmt: skip
OPTIONAL_SIZES = frozenset({"num_key_value_heads", "head_dim"})
FLAGS = frozenset({"use_cache", "tie_word_embeddings", "attention_bias", "use_sliding_window", "mlp_bias"})
OPTIONAL_FLAGS = frozenset({"output_hidden_states", "return_dict"})
NUMBERS = frozenset({"initializer_range", "rms_norm_eps"})
OPTIONAL_IDS = frozenset({"bos_token_id", "pad_token_id"})
DTYPES = frozenset(
    {"auto", "float32", "float16", "bfloat16", "float64", "half", "float", "float8_e4m3fn", "float8_e5m2",
     "torch.float32", "torch.float16", "torch.bfloat16"}
)  # fmt: skip
TYPE_KEY = "model_type"
MOST = 1 << 31


def type_fault(values: Mapping[str, Any], *, needs_type: bool = False) -> str:
    """What is wrong with the first value of a config.json that has a wrong type; empty: nothing is."""
    if needs_type and TYPE_KEY not in values:
        return f"has no {TYPE_KEY}; save the model with save_pretrained"
    text = values.get("text_config")
    if isinstance(text, Mapping) and (fault := type_fault(text)):
        return fault
    return _first_fault(values, _RULES)


def tokenizer_fault(values: Mapping[str, Any]) -> str:
    """The same for a tokenizer_config.json."""
    return _first_fault(values, _TOKENIZER_RULES)


def _first_fault(values: Mapping[str, Any], rules: "Rules") -> str:
    for key, value in values.items():
        is_right, wanted = rules.get(key, (_anything, ""))
        if not is_right(value):
            shown = repr(value)
            return f"says {key}={shown if len(shown) < 80 else shown[:80] + '...'}; it needs {wanted}"
    return ""


def _anything(_: object) -> bool:
    return True


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < MOST


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_number(value: object) -> bool:
    return type(value) is float and 0 <= value < 1e30


def _is_id(value: object) -> bool:
    return type(value) is int and -1 <= value < MOST


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_dtype(value: object) -> bool:
    return value in DTYPES if isinstance(value, str) else isinstance(value, dict)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", value) is not None


def _or_null(rule: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or rule(value)


def _is_length(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(str(value)) < 1e31


def _is_token(value: object) -> bool:
    if isinstance(value, dict):
        return value.get("__type") == "AddedToken" and isinstance(value.get("content"), str)
    return value is None or isinstance(value, str)


def _is_rope(value: object) -> bool:
    return isinstance(value, dict) and all(
        (_is_length(inner) if key in _ROPE_NUMBERS else isinstance(inner, str) or key not in _ROPE_NAMES)
        for key, inner in value.items()
    )


_ROPE_NUMBERS = frozenset({"rope_theta", "factor", "original_max_position_embeddings"})
_ROPE_NAMES = frozenset({"rope_type", "type"})


Rules = Mapping[str, tuple[Callable[[object], bool], str]]
_RULES: Rules = {
    **dict.fromkeys(SIZES, (_is_size, "a whole number of 1 or more")),
    **dict.fromkeys(OPTIONAL_SIZES, (_or_null(_is_size), "a whole number of 1 or more, or null")),
    **dict.fromkeys(FLAGS, (_is_flag, "true or false")),
    **dict.fromkeys(OPTIONAL_FLAGS, (_or_null(_is_flag), "true, false or null")),
    **dict.fromkeys(NUMBERS, (_is_number, "a number of 0 or more, with a point")),
    **dict.fromkeys(OPTIONAL_IDS, (_or_null(_is_id), "a token id or null")),
    **dict.fromkeys(("dtype", "torch_dtype"), (_or_null(_is_dtype), "the name of a dtype, such as bfloat16")),
    TYPE_KEY: (_is_name, "a name"),
    "hidden_act": (_is_name, "a name"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (_or_null(_is_rope), "an object with numbers")),
    "architectures": (_or_null(_is_words), "a list of names"),
    "layer_types": (_or_null(_is_words), "a list of names"),
}
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_TOKENIZER_RULES: Rules = {
    **dict.fromkeys(TOKENS, (_is_token, "a token's text, {content: text} or null")),
    "model_max_length": (_or_null(_is_length), "a number above 0"),
    "tokenizer_class": (_or_null(lambda value: isinstance(value, str)), "a name"),
}


def refused_model(says: str) -> ConfigError:
    """Returns a mistake of the policy's model; `read_model` knows its folder."""
    return ConfigError(says, key=MODEL_KEY)


def refused_config(says: str) -> ConfigError:
    """Returns the mistake of a config.json that `says` something; `read_model` knows its folder."""
    return ConfigError(says, key=MODEL_KEY, file="config.json", has_colon=False)


def config_size(values: Values, key: str) -> int:
    """Returns a whole number of config.json.

    Raises:
        ConfigError: it is none, below 1, or more than any model has.
    """
    value, most = values[key], MOST_OF_KEY.get(key, MOST_OF_OTHERS)
    if type(value) is not int or not 1 <= value <= most:
        said = str(value) if type(value) is not int or value < 1 else "a number that is too large"
        said = repr(value) if isinstance(value, str) else said
        raise refused_config(f"says {key}={said}; it needs a whole number of 1 or more, at most {most}.")
    return value


def flag_of(values: Values, key: str) -> bool:
    """Returns a truth value of config.json.

    Raises:
        ConfigError: it is none.
    """
    if type(values[key]) is not bool:
        raise refused_config(f"says {key}={values[key]!r}; it needs true or false.")
    return bool(values[key])


def positive_of(values: Values, key: str) -> float:
    """Returns a number of config.json.

    Raises:
        ConfigError: it is none, or not above 0.
    """
    if (found := number_of(values, key)) == 0:
        raise refused_config(f"says {key}={values[key]!r}; it needs a number above 0.")
    return found


def config_count(values: Values, key: str) -> int:
    """Returns a whole number of config.json that may be 0.

    Raises:
        ConfigError: it is none, or below 0.
    """
    return 0 if type(values[key]) is int and values[key] == 0 else config_size(values, key)


def number_of(values: Values, key: str) -> float:
    """Returns a number of config.json.

    Raises:
        ConfigError: it is none, or below 0.
    """
    value: Any = values.get(key)
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        raise refused_config(f"says {key}={value!r}; it needs a number of 0 or more.")
    return float(value)
