"""Kinds of keys, and the differences between two configs."""

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest

from tests.obs_runs import make_run
from yatt.config.changing import Change, change_kind, changed_keys, is_allowed, sampling_keys
from yatt.config.load import load_resolved, samples_hash
from yatt.config.schema import RolloutSection, RunConfig


def keys(cls, prefix=""):
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        inner = next((arg for arg in get_args(hint) if is_dataclass(arg)), None)
        if is_dataclass(hint):
            yield from keys(hint, f"{key}.")
        elif inner is not None:
            yield from keys(inner, f"{key}.0.")
        else:
            yield key


@pytest.fixture
def config(tmp_path):
    return load_resolved(make_run(tmp_path).config)


def test_most_keys_are_mathematical_unless_their_section_says_otherwise():
    kinds = Counter(map(change_kind, keys(RunConfig)))
    assert kinds.keys() == {"mathematical", "operational", "layout"} and kinds["mathematical"] > 100
    assert {change_kind(key) for key in keys(RunConfig) if key.startswith(("logging.", "sync."))} == {
        "operational"
    }


def test_sizes_of_engines_do_not_decide_what_is_sampled(config):
    found = {f.name for f in fields(RolloutSection)} - sampling_keys(RolloutSection)
    assert found == {
        "max_num_seqs", "kv_cache_bytes", "gpu_memory_utilization", "enforce_eager", "request_timeout_s",
        "max_retries",
    }  # fmt: skip
    for is_deterministic in (False, True):
        before = replace(config, run=replace(config.run, deterministic=is_deterministic))
        smaller = replace(before, rollout=replace(before.rollout, max_num_seqs=3))
        other = replace(before, rollout=replace(before.rollout, max_response_tokens=3))
        assert (samples_hash(before) == samples_hash(smaller)) is not is_deterministic
        assert samples_hash(before) != samples_hash(other)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("optimizer.lr", "mathematical"),
        ("run.seed", "mathematical"),
        ("checkpoint.url", "mathematical"),
        ("rollout.n", "mathematical"),
        ("rewards.0.weight", "mathematical"),
        ("genrms.1.template", "mathematical"),
        ("genrms.1.retries", "mathematical"),
        ("a_key_of_next_year", "mathematical"),
        ("checkpoint.save_every", "operational"),
        ("lease.ttl_s", "operational"),
        ("critic.swap", "operational"),  # it changes no bit
        ("lease", "mathematical"),  # what is said of a section holds for each of its keys
        ("checkpoint.storage_options", "operational"),
        ("data.weights", "mathematical"),
        ("genrms.1.api.retries", "operational"),
        ("rewards.0.timeout_s", "operational"),
        ("genrms.0.tp_size", "layout"),
        ("trainer.expert_tensor_parallel_size", "layout"),
        ("trainer.train_batch_size", "mathematical"),
    ],
)
def test_the_kind_of_a_key(key, kind):
    assert change_kind(key) == kind


def test_a_change_of_an_item_names_its_index_and_another_number_of_items_the_list(config):
    late = replace(config.rewards[0], timeout_s=7.0)
    assert changed_keys(config, replace(config, rewards=(late,))) == [
        Change("rewards.0.timeout_s", config.rewards[0].timeout_s, 7.0)
    ]
    (more,) = changed_keys(config, replace(config, rewards=(late, late)))
    assert more.key == "rewards" and not is_allowed(more, deterministic=False)


def test_layouts_change_only_without_deterministic_mode():
    change = Change("trainer.tensor_model_parallel_size", 1, 2)
    assert is_allowed(change, deterministic=False) and not is_allowed(change, deterministic=True)
    assert is_allowed(Change("lease.ttl_s", 1.0, 2.0), deterministic=True)


def test_no_credential_is_shown():
    for key in ("checkpoint.storage_options", "logging.webhook_url"):
        assert "hunter2" not in Change(key, {"secret": "hunter2"}, {"secret": "hunter3"}).in_words()
