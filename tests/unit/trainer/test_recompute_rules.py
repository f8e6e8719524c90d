"""What can be computed again depends on the model; what has no effect is refused."""

from dataclasses import replace

import pytest

from tests.unit.trainer.test_layout_rules import LAYER, MIXED, SHAPE
from yatt.config.load import load_run_config
from yatt.config.sections.training import TrainerSection
from yatt.errors import ConfigError
from yatt.models.shape import Experts, LatentAttention
from yatt.trainer.mcore.layout import check_layout
from yatt.trainer.mcore.recompute import recompute_settings

LATENT = LatentAttention(num_heads=6, q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)
EXPERTS = Experts(num_experts=4, top_k=2, size=20, normalizes=True)
PLAIN = replace(SHAPE, layers=(replace(LAYER, feed_forward=EXPERTS),) * 6)


def section(**keys):
    return TrainerSection(total_iterations=1, train_batch_size=1, mini_batch_size=1, **keys)


def selective(*modules):
    return section(recompute="selective", recompute_modules=modules)


@pytest.mark.parametrize(
    ("shape", "module"),
    [
        (SHAPE, "moe"), (SHAPE, "shared_experts"), (SHAPE, "mla_up_proj"), (PLAIN, "mlp"),
        (PLAIN, "shared_experts"),
    ],
)  # fmt: skip
def test_a_module_that_the_model_does_not_have_is_refused(shape, module):
    with pytest.raises(ConfigError, match=f"the model has no {module}; write some of core_attn"):
        check_layout(shape, selective(module), 1)


def test_modules_that_the_model_has_are_allowed():
    check_layout(MIXED, selective("core_attn", "mlp", "moe"), 1)
    check_layout(MIXED, selective("shared_experts"), 1)
    check_layout(replace(SHAPE, layers=(replace(LAYER, attention=LATENT),) * 6), selective("mla_up_proj"), 1)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"recompute": "selective"}, "recompute_modules is empty"),
        ({"recompute_modules": ("mlp",)}, "no effect with recompute: none"),
        ({"recompute": "full", "recompute_modules": ("mlp",)}, "no effect with recompute: full"),
        ({"recompute_layers": 2}, "no effect with recompute: none"),
        ({"recompute": "selective", "recompute_modules": ("mlp", "mlp")}, "a module twice"),
        ({"recompute": "selective", "recompute_modules": ("moe", "shared_experts")}, "moe contains shared"),
    ],
)
def test_keys_without_an_effect_are_refused(keys, says):
    with pytest.raises(ValueError, match=says):
        section(**keys)


def test_a_number_of_layers_selects_the_first_ones():
    assert recompute_settings(section()) == {}
    whole, some = (recompute_settings(section(recompute="full", recompute_layers=n)) for n in (0, 3))
    assert (whole["recompute_method"], whole["recompute_num_layers"]) == ("uniform", 1)
    assert (some["recompute_method"], some["recompute_num_layers"]) == ("block", 3)


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_switch_of_older_versions_is_refused_with_the_words_to_write(tmp_path, value):
    (tmp_path / "run.yaml").write_text(f"trainer:\n  recompute: {value}\n")
    says = f"run.yaml:2: trainer.recompute: {value.capitalize()} is not one of 'none', 'selective', 'full'"
    with pytest.raises(ConfigError, match=says):
        load_run_config([tmp_path / "run.yaml"], [])
