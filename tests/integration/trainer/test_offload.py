"""Optimizer steps in parts change no bit, and a state that lives on the host comes part by part."""

import functools

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.test_families import EP
from tests.integration.trainer.test_layouts import assert_bit_equal

pytestmark = pytest.mark.slow
AWAY, PART_BYTES = {"offload_optimizer": True}, 9000
LEARN = [["measured", 1], ["nap", 0], ["save", 1], ["publish", "after1"]]
GO_ON = [["train", 2], ["state", "state"], ["save", 2], ["publish", "final"]]
RESTORE = {
    "restore": "manifests/00000001.000001.json",
    "actions": [["train", 2], ["state", "state"], ["publish", "final"]],
}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "small-buckets": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "momentum": {}, "stateless": {},
}  # fmt: skip
SPREAD = {
    "tp2": {"tensor_model_parallel_size": 2, "dtype": "bfloat16"}, "pp2": {"pipeline_model_parallel_size": 2},
    "experts": {EP: 2, "dtype": "bfloat16"},
}  # fmt: skip
"""On two ranks; with experts megatron-core has two optimizers."""

OPTIMIZERS = {
    "momentum": {"optimizer": {"kind": "sgd", "sgd_momentum": 0.9}},
    "stateless": {"optimizer": {"kind": "sgd", "sgd_momentum": 0.0}},
}
BYTES = {
    "float32": (12, 8),
    "bfloat16": (8, 12),
    "overlapped": (12, 8),
    "momentum": (12, 4),
    "stateless": (12, 0),
}
"""Of a parameter: itself, its gradient and its reference; the optimizer's state, over all ranks."""

PADDING = 64 * 60
"""Bytes between the tensors of a part, at most."""


@pytest.fixture(scope="module", params=[1, 2])
def world(request, shallow, tmp_path_factory):
    """Pairs of jobs by kind: megatron-core's own steps, and parts of a state that is away. First what they
    learn, then those that resume from the other's save."""
    root, ranks = tmp_path_factory.mktemp(f"world-{request.param}"), request.param
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    experts = make_model(root / "experts", "qwen3_moe", is_tied=False, **sizes)
    add = functools.partial(pair_of, shallow | {"experts": experts}, root / "store")
    kinds = KINDS if ranks == 1 else KINDS | SPREAD
    learned = run_world(root / "learned", ranks, [job for kind in kinds for job in add(kind)])
    again = [job for kind in resumed(ranks) for job in add(kind, is_resumed=True)]
    return pairs(learned, kinds), pairs(run_world(root / "resumed", ranks, again), resumed(ranks))


def pairs(jobs, kinds):
    return {kind: (jobs[f"{kind}-whole"], jobs[f"{kind}-parts"]) for kind in kinds}


def resumed(ranks):
    return ("float32", "experts" if ranks == 2 else "bfloat16")


def pair_of(models, store, kind, *, is_resumed=False):
    """Jobs with megatron-core's own steps, and with parts; each resumes from the other's save."""
    layout = (KINDS | SPREAD)[kind]
    common = {"model": str(models["experts" if kind == "experts" else "qwen3"]), **OPTIMIZERS.get(kind, {})}
    common |= RESTORE if is_resumed else {"actions": [*LEARN, *GO_ON]}
    steps = {
        "whole": {"layout": layout, "has_whole_steps": True},
        "parts": {"layout": {**layout, **AWAY}, "part_bytes": PART_BYTES},
    }
    others = dict(zip(steps, reversed(steps), strict=True)) if is_resumed else {name: name for name in steps}
    return [
        {"name": f"{kind}-{name}", "store": f"{store}-{kind}-{others[name]}", **common, **own}
        for name, own in steps.items()
    ]


def test_parts_change_no_bit(world):
    """A whole run of the trainer for each kind, whose time the module's other tests share."""
    for whole, parts in world[0].values():
        assert_bit_equal(parts.tensors("state"), whole.tensors("state"))
        for name in ("after1", "final"):
            assert_bit_equal(parts.weights(name), whole.weights(name))
        for mine, others in zip(parts.notes, whole.notes, strict=True):
            assert (mine["metrics"], mine["left_bytes"]) == (others["metrics"], [0])
            assert mine["saved_bytes"] == others["saved_bytes"]


def test_a_part_is_on_the_device_and_not_the_whole_state(world):
    """A whole run of the trainer for each kind, whose time the module's other tests share."""
    for kind, (whole, parts) in world[0].items():
        for others, mine in zip(whole.notes, parts.notes, strict=True):
            sizes, held = set(others["device_bytes"]["micro_batch"]), mine["device_bytes"]
            (rest,) = set(held["micro_batch"])
            assert len(sizes) == 1 and set(held["part"]) == {rest}, "no memory of the state's own"
            assert max(held["place"]) <= PART_BYTES + PADDING, "larger tensors come in slices"
            assert len(held["place"]) > 3 * len(others["device_bytes"]["part"])
            if kind in BYTES:
                kept, own = BYTES[kind]
                own /= len(whole.notes)
                assert 1 - rest / sizes.pop() == pytest.approx(own / (kept + own), abs=0.02)


def test_what_one_saved_the_other_resumes_bit_for_bit(world):
    for kind, both in world[1].items():
        for again in both:
            undisturbed, _ = world[0][kind]
            assert_bit_equal(again.tensors("state"), undisturbed.tensors("state"))
            assert_bit_equal(again.weights("final"), undisturbed.weights("final"))
