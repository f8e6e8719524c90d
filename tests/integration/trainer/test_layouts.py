"""Real trainer ranks over gloo: every layout learns the same, saves the same, resumes the same."""

import pytest
import torch

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.program import PROBE_LENGTHS, VOCAB
from tests.tiny_models import reference_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
TWO = {
    "tp2": {TP: 2, "sequence_parallel": True},
    "pp2": {PP: 2},
    "vpp2": {PP: 2, VPP: 2},
    "dp2": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "cp2": {CP: 2},
}
SAVED = ("tp2", "pp2", "dp2")
LEARN = [["publish", "start"], ["train", 1], ["publish", "after1"], ["train", 2], ["publish", "final"]]
GRADIENT = [["only_gradient", "first"]]
GO_ON = [["publish", "after1"], ["train", 2], ["publish", "final"]]


def saving(folder, name):
    """A job's part: learn, take the first gradient down, and save after the first iteration."""
    actions = [["probe", "start"], ["gradient", "first"], ["save", 1], *LEARN[2:]]
    return {"actions": actions, "store": str(folder / f"checkpoints-{name}")}


def resuming(folder, name):
    """A job's part: go on from what another job saved."""
    store = str(folder / f"checkpoints-{name}")
    return {"actions": GO_ON, "store": store, "restore": "manifests/00000001.000001.json"}


@pytest.fixture(scope="session")
def alone(models, tmp_path_factory):
    """One rank: what everything else is compared with."""
    folder = tmp_path_factory.mktemp("alone")
    qwen3 = str(models["qwen3"])
    nap = [["nap", 0], ["train", 1], ["nap", 0], ["train", 2], ["publish", "final"]]
    jobs = [
        {"name": "napping", "model": qwen3, "actions": nap},
        {"name": "one", "model": qwen3, **saving(folder, "one")},
        {"name": "resumed", "model": qwen3, **resuming(folder, "one")},
        {"name": "recompute", "model": qwen3, "layout": {"recompute": "full"}, "actions": LEARN},
        {"name": "onednn", "model": qwen3, "min_rows": 4, "actions": LEARN},
        {"name": "parcels", "model": qwen3, "parcels": True, "actions": LEARN},
        {
            "name": "export",
            "model": qwen3,
            "actions": [["train", 1], ["export", "hf"], ["publish", "after1"]],
        },
        {
            "name": "bf16",
            "model": qwen3,
            "layout": {"dtype": "bfloat16"},
            "actions": [["publish", "start"], ["nap", 0], ["train", 1]],
        },
        {
            "name": "kl-in-reward",
            "model": qwen3,
            "algorithm": {"kl_in": "reward", "kl_coef": 0.1, "adv_estimator": "reinforce_plus_plus"},
            "actions": LEARN,
        },
    ]
    return folder, run_world(folder, 1, jobs)


@pytest.fixture(scope="session")
def pair(models, alone, tmp_path_factory):
    """Two ranks, in every layout they can have."""
    folder = tmp_path_factory.mktemp("pair")
    qwen3 = str(models["qwen3"])
    jobs = [
        {"name": name, "model": qwen3, "layout": layout, **saving(folder, name)}
        for name, layout in TWO.items()
    ]
    for name in SAVED:
        common = {"model": qwen3, "layout": TWO[name]}
        jobs.append({"name": f"{name}-resumed", **resuming(folder, name), **common})
        jobs.append({"name": f"{name}-from-one", **resuming(alone[0], "one"), **common})
    algorithm = {"kl_in": "reward", "kl_coef": 0.1, "adv_estimator": "reinforce_plus_plus"}
    jobs.append(
        {"name": "kl-in-reward", "model": qwen3, "layout": {CP: 2}, "algorithm": algorithm, "actions": LEARN}
    )
    for name in ("tp2", "dp2"):
        job = {"model": qwen3, "layout": TWO[name], "parcels": True, "actions": LEARN}
        jobs.append({"name": f"{name}-parcels", **job})
        common = {"model": qwen3, "layout": TWO[name], "min_rows": 4}
        jobs.append({"name": f"{name}-onednn", "actions": LEARN, **common})
    return folder, run_world(folder, 2, jobs)


@pytest.fixture(scope="session")
def alone_again(models, pair, tmp_path_factory):
    """One rank, from the checkpoints of two."""
    folder = tmp_path_factory.mktemp("again")
    jobs = [{"name": name, "model": str(models["qwen3"]), **resuming(pair[0], name)} for name in SAVED]
    return run_world(folder, 1, jobs)


def hf_logprobs(folder):
    """Of the probe's tokens but the first of each sequence."""
    model = reference_model(folder).float().eval()
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in PROBE_LENGTHS:
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        with torch.no_grad():
            logprobs = model(ids[None]).logits.float().log_softmax(-1)[0, :-1]
        rows.append(logprobs.gather(1, ids[1:, None]).squeeze(1))
    return rows


def farthest(got, expected):
    """The largest difference of log-probs."""
    return max((row - torch.tensor(mine)).abs().max().item() for mine, row in zip(got, expected, strict=True))


def largest_difference(left, right):
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


def assert_bit_equal(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(scope="module")
def known_logprobs(models):
    return hf_logprobs(models["qwen3"])


@pytest.mark.parametrize("name", TWO)
def test_published_weights_are_the_folders_bit_for_bit(pair, models, known_logprobs, name):
    from safetensors.torch import load_file

    job = pair[1][name]
    assert_bit_equal(job.weights("start"), load_file(models["qwen3"] / "model.safetensors"))
    assert farthest(job.notes[0]["probe"]["logprobs"], known_logprobs) < 1e-5
    assert all(note["probe"] == job.notes[0]["probe"] for note in job.notes)


@pytest.mark.parametrize("name", TWO)
def test_every_layout_learns_what_one_rank_learns(alone, pair, name):
    one, two = alone[1]["one"], pair[1][name]
    assert largest_difference(one.weights("start"), one.weights("final")) > 1e-3
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5
    for iteration in (0, 1):
        expected = one.notes[0]["metrics"][iteration]
        for notes in two.notes:
            assert notes["metrics"][iteration] == pytest.approx(expected, abs=2e-5, rel=2e-5)
        assert two.notes[0]["metrics"] == two.notes[1]["metrics"]


def test_products_by_onednn_learn_what_torchs_products_learn(alone, pair):
    one = alone[1]["one"]
    for job in (alone[1]["onednn"], pair[1]["tp2-onednn"], pair[1]["dp2-onednn"]):
        assert largest_difference(job.weights("final"), one.weights("final")) < 1e-5
        for iteration in (0, 1):
            expected = one.notes[0]["metrics"][iteration]
            assert job.notes[0]["metrics"][iteration] == pytest.approx(expected, abs=2e-5, rel=2e-5)


def test_kl_in_the_reward_is_the_same_in_another_layout(alone, pair):
    one, two = alone[1]["kl-in-reward"], pair[1]["kl-in-reward"]
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5
    plain = alone[1]["one"].notes[0]["metrics"][1]["critic/advantages/mean"]
    assert one.notes[0]["metrics"][1]["critic/advantages/mean"] != pytest.approx(plain)


@pytest.fixture(scope="session")
def four(models, tmp_path_factory):
    """Four ranks: tensor parallelism with data parallelism, and with pipeline stages."""
    layouts = {"dp2tp2": {TP: 2}, "tp2pp2": {TP: 2, PP: 2, "sequence_parallel": True}}
    actions = [["gradient", "first"], ["train", 2], ["publish", "final"]]
    jobs = [
        {"name": name, "model": str(models["qwen3"]), "layout": layout, "actions": actions}
        for name, layout in layouts.items()
    ]
    return run_world(tmp_path_factory.mktemp("four"), 4, jobs)


@pytest.mark.parametrize("name", ["dp2tp2", "tp2pp2"])
def test_four_ranks_learn_what_one_rank_learns(alone, four, name):
    one, job = alone[1]["one"], four[name]
    assert largest_difference(job.weights("final"), one.weights("final")) < 1e-5
    for iteration in (0, 1):
        expected = one.notes[0]["metrics"][iteration]["actor/grad_norm"]
        assert job.notes[3]["metrics"][iteration]["actor/grad_norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [*TWO, "dp2tp2", "tp2pp2"])
def test_every_layout_has_the_gradient_of_one_rank_tensor_by_tensor(alone, pair, four, name):
    expected = alone[1]["one"].tensors("first")
    got = (four if name in four else pair[1])[name].tensors("first")
    assert got.keys() == expected.keys()
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    for tensor_name, tensor in expected.items():
        difference = (got[tensor_name] - tensor).abs().max().item()
        assert difference < 1e-5 * max(tensor.abs().max().item(), 1e-2), tensor_name


def test_off_the_device_no_byte_is_left_and_learning_goes_on_bit_for_bit(alone):
    napping = alone[1]["napping"]
    assert napping.notes[0]["left_bytes"] == [0, 0]
    assert napping.notes[0]["held_bytes"] > 1_000_000
    assert napping.notes[0]["live_bytes"] < 64 << 10
    assert_bit_equal(napping.weights("final"), alone[1]["one"].weights("final"))
    assert alone[1]["bf16"].notes[0]["left_bytes"] == [0]


def test_bfloat16_trains_and_publishes_bfloat16(alone):
    job = alone[1]["bf16"]
    assert {tensor.dtype for tensor in job.weights("start").values()} == {torch.bfloat16}
    expected = alone[1]["one"].notes[0]["metrics"][0]["actor/grad_norm"]
    assert job.notes[0]["metrics"][0]["actor/grad_norm"] == pytest.approx(expected, rel=0.05)


def test_a_resumed_run_ends_bit_equal_to_an_undisturbed_one(alone, pair):
    cases = [(alone[1]["resumed"], alone[1]["one"])]
    cases += [(pair[1][f"{name}-resumed"], pair[1][name]) for name in SAVED]
    for resumed, undisturbed in cases:
        assert_bit_equal(resumed.weights("after1"), undisturbed.weights("after1"))
        assert_bit_equal(resumed.weights("final"), undisturbed.weights("final"))
        assert resumed.notes[0]["metrics"][0] == undisturbed.notes[0]["metrics"][1]


@pytest.mark.parametrize("name", SAVED)
def test_one_rank_goes_on_from_two_and_two_from_one(alone, pair, alone_again, name):
    assert_bit_equal(alone_again[name].weights("after1"), pair[1][name].weights("after1"))
    assert largest_difference(alone_again[name].weights("final"), pair[1][name].weights("final")) < 1e-6
    one, moved = alone[1]["one"], pair[1][f"{name}-from-one"]
    assert_bit_equal(moved.weights("after1"), one.weights("after1"))
    assert largest_difference(moved.weights("final"), one.weights("final")) < 1e-6


def test_an_exported_folder_is_read_by_transformers(alone):
    from transformers import AutoModelForCausalLM

    job = alone[1]["export"]
    weights = job.weights("after1")
    model = AutoModelForCausalLM.from_pretrained(job.folder / "hf")
    assert_bit_equal({name: model.state_dict()[name] for name in weights}, weights)


def test_recomputing_activations_changes_no_bit(alone):
    assert_bit_equal(alone[1]["recompute"].weights("final"), alone[1]["one"].weights("final"))


def test_samples_that_come_ahead_of_the_order_are_trained_on_the_same(alone, pair):
    for job, whole in [(alone[1]["parcels"], alone[1]["one"])] + [
        (pair[1][f"{name}-parcels"], pair[1][name]) for name in ("tp2", "dp2")
    ]:
        assert_bit_equal(job.weights("final"), whole.weights("final"))
        assert job.notes[0]["metrics"] == whole.notes[0]["metrics"]


def test_progress_is_told_once_a_micro_batch(alone):
    assert alone[1]["napping"].notes[0]["ticks"] > 20
