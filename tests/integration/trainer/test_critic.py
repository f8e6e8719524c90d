"""A critic in every layout: values, returns and gradients against transformers and definitions."""

import itertools
import shutil
import statistics

import pytest
import torch

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.test_families import EP, TINY
from tests.integration.trainer.test_layouts import CP, PP, TP, VPP, assert_bit_equal, largest_difference
from tests.integration.trainer.valued import SCORE, add_score, folder_values, paper_critic
from tests.saved_weights import tensors_in
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import CRITIC_KEYS
from yatt.checkpoint.commit.verifying import verify_checkpoint
from yatt.checkpoint.convert.export import FolderForm, export_as_hf, weight_bytes
from yatt.checkpoint.store.store import FolderStore
from yatt.errors import ConfigError
from yatt.models.folder import ModelFolder
from yatt.models.model import read_model, with_value_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
GAMMA, LAM, MASKED = 0.97, 0.9, (3, 10)
GAE = {"adv_estimator": "gae", "gamma": GAMMA, "lam": LAM, "correction": {"rule": "none"}}
CRITIC = {"epochs": 2, "value_clip": 0.05, "optimizer": {"lr": 2e-3}}
TWO = {
    "tp2": {TP: 2}, "tp2sp": {TP: 2, "sequence_parallel": True}, "pp2": {PP: 2},
    "cp2": {CP: 2}, "dp2": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}  # fmt: skip
BF16_AWAY = {"dtype": "bfloat16", "offload_optimizer": True}
LEARN = [
    ["values", 1], ["critic_gradient", "first"], ["save", 1], ["train", 2], ["critic_state", "final"],
    ["publish", "final"],
]  # fmt: skip
GO_ON = [["train", 2], ["critic_state", "final"], ["publish", "final"]]
PLAIN = [["train", 1], ["publish", "after1"], ["save", 1], *GO_ON]
FIRST = [["values", 1], ["critic_gradient", "first"]]
SWAP = CRITIC | {"swap": True}
SWAPPED = [["nap", 0], ["train", 1], ["save", 1], ["nap", 0], ["measured", 2], *GO_ON[1:]]
"""A repeated order to train, as the one that `measured` gives, has the same answer."""

SAVED = "manifests/00000001.000001.json"


def job(folder, model, name, layout, actions=LEARN, **more):
    common = {"algorithm": GAE, "critic": CRITIC, "turns": 2, "masked": MASKED, "layout": layout}
    store = str(folder / f"store-{more.pop('store', name)}")
    return {"name": name, "model": str(model), "actions": actions, "store": store, **common, **more}


@pytest.fixture(scope="module", params=["qwen3"])
def dense(tmp_path_factory, request):
    """A model folder with a value head, and what one and two ranks did with it as policy and critic."""
    folder = tmp_path_factory.mktemp("critic")
    model = make_model(folder / "model", request.param, is_tied=False, num_hidden_layers=2)
    add_score(model)
    alone = [  # the first one shows that nothing is left in its process
        job(folder, model, "napping", {}, [["nap", 0], ["train", 1], ["nap", 0], *GO_ON]),
        job(folder, model, "one", {}),
        job(folder, model, "resumed", {}, GO_ON, store="one", restore=SAVED),
        job(folder, model, "away", {"offload_optimizer": True}),
        job(folder, model, "away-resumed", {"offload_optimizer": True}, GO_ON, store="away", restore=SAVED),
        job(
            folder,
            model,
            "bf16",
            {"dtype": "bfloat16"},
            [["train", 1], ["publish", "after1"], ["save", 1], *GO_ON],
        ),
        job(folder, model, "bf16-resumed", {"dtype": "bfloat16"}, GO_ON, store="bf16", restore=SAVED),
        job(folder, model, "swap", {}, SWAPPED, critic=SWAP),
        job(folder, model, "beside", {}, GO_ON, store="swap", restore=SAVED),
        job(folder, model, "swap-bf16", BF16_AWAY, SWAPPED, critic=SWAP),
        job(folder, model, "swap-bf16-resumed", BF16_AWAY, GO_ON, store="bf16", restore=SAVED, critic=SWAP),
        job(folder, model, "both", {}, [["measured", 1]]),
        job(folder, model, "waiting", {}, critic={**CRITIC, "warmup_iterations": 1}),
        job(folder, model, "still", {}, [["train", 1]], critic={"optimizer": {"lr": 0.0}}),
        job(folder, model, "blank", {}, [["values", 1]], critic={**CRITIC, "path": str(blank(folder))}),
        job(folder, model, "group", {}, [["train", 1], ["save", 1]], algorithm={"kl_in": "none"}, critic={}),
        job(folder, model, "none-saved", {}, [], store="group", restore=SAVED, is_refused=True),
        job(folder, model, "from-group", {}, FIRST, store="group", restore=SAVED, weights_only=True),
        job(
            folder,
            model,
            "other-kind",
            {},
            [],
            store="one",
            restore=SAVED,
            is_refused=True,
            critic={"optimizer": {"kind": "sgd"}},
        ),
        job(folder, model, "other-head", {}, [["train", 1]], trap="critic-reward-at-another-token"),
    ]
    jobs = run_world(folder / "alone", 1, alone)
    pair = [job(folder, model, name, layout) for name, layout in TWO.items()]
    deep = make_model(folder / "deep", "qwen3", is_tied=False, num_hidden_layers=4)
    add_score(deep)
    pair.append(job(folder, deep, "vpp2", {PP: 2, VPP: 2}, FIRST))
    pair.append(job(folder, model, "dp2-swap", TWO["dp2"], SWAPPED, critic=SWAP))
    pair.append(job(folder, model, "saved", TWO["tp2"], [["train", 1], ["save", 1], ["values", 2]]))
    pair.append(job(folder, model, "dp2-from-one", TWO["dp2"], GO_ON, store="one", restore=SAVED))
    pair += [
        job(folder, model, "summed", TWO["tp2"], FIRST, trap="critic-head-summed-over-ranks"),
        job(folder, model, "summed-sp", TWO["tp2sp"], FIRST, trap="critic-head-summed-over-ranks"),
        job(folder, model, "whitened", TWO["dp2"], [["train", 1]], trap="critic-whitened-by-one-rank"),
    ]
    return model, jobs | run_world(folder / "pair", 2, pair)


def blank(folder):
    """A smaller model, with tied embeddings and without a value head."""
    return make_model(folder / "blank", "qwen2", is_tied=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def paper(dense):
    return paper_critic(dense[0], gamma=GAMMA, lam=LAM, masked=MASKED)


def farthest_gradient(got, wanted):
    """The largest difference, relative to its tensor's largest element."""
    assert got.keys() == wanted.keys()
    return max(
        ((got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)).item()
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("name", ["one", *TWO])
def test_values_and_gradients_are_transformers_in_every_layout(dense, paper, name):
    """Samples have an observation between two turns; two are masked. Ranks alone, and no whole run: three
    worlds for all tests of this module."""
    found = dense[1][name]
    wanted = [*itertools.chain(*paper.values)]
    for notes in found.notes:
        assert max(abs(a - b) for a, b in zip(notes["values"], wanted, strict=True)) < 1e-5
    assert farthest_gradient(found.tensors("first"), paper.gradient) < 1e-5
    assert all(tensor.abs().max() > 1e-6 for tensor in paper.gradient.values())


def test_metrics_are_their_definitions(dense, paper):
    found = dense[1]["one"].notes[0]["metrics"][0]
    kept = [number for number in range(len(paper.values)) if number not in MASKED]
    values, returns = ([*itertools.chain(*(each[n] for n in kept))] for each in (paper.values, paper.returns))
    left = statistics.variance(a - b for a, b in zip(returns, values, strict=True))
    assert found["critic/vf_explained_var"] == pytest.approx(1 - left / (statistics.variance(returns) + 1e-5))
    for name, each in (("values", values), ("returns", returns)):
        assert found[f"critic/{name}/mean"] == pytest.approx(statistics.mean(each), abs=1e-6)
        assert found[f"critic/{name}/max"] == pytest.approx(max(each), abs=1e-6)
        assert found[f"critic/{name}/min"] == pytest.approx(min(each), abs=1e-6)
    gains = [*itertools.chain(*(paper.advantages[n] for n in kept))]
    mean, deviation = statistics.mean(gains), statistics.stdev(gains)
    largest = max(itertools.chain(*paper.advantages))
    assert found["critic/advantages/max"] == pytest.approx((largest - mean) / deviation, rel=1e-5)


def test_the_loss_of_a_critic_that_does_not_change_is_half_of_the_squared_error(dense, paper):
    """Of each mini-batch a mean over the tokens that are trained on; those weigh as all tokens of it."""
    total, count, half = 0.0, 0, len(paper.values) // 2
    for first in (0, half):
        numbers = range(first, first + half)
        size = sum(len(paper.values[number]) for number in numbers)
        pairs = [zip(paper.values[n], paper.returns[n], strict=True) for n in numbers if n not in MASKED]
        total += size * statistics.mean((a - b) ** 2 / 2 for a, b in itertools.chain(*pairs))
        count += size
    found = dense[1]["still"].notes[0]["metrics"][0]
    assert found["critic/vf_loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["critic/vf_clipfrac"] == 0.0 == found["critic/lr"]
    assert found["critic/vpred_mean"] == pytest.approx(found["critic/values/mean"], rel=1e-5)


@pytest.mark.parametrize("name", TWO)
def test_every_layout_trains_policy_and_critic_as_one_rank_does(dense, name):
    one, two = dense[1]["one"], dense[1][name]
    assert largest_difference(two.tensors("final"), one.tensors("final")) < 1e-5
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5
    for iteration in (0, 1):
        expected = one.notes[0]["metrics"][iteration]
        assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} < expected.keys()
        for notes in two.notes:
            assert notes["metrics"][iteration] == pytest.approx(expected, abs=2e-5, rel=2e-5)
    assert one.notes[0]["metrics"][1]["critic/vf_clipfrac"] > 0, "the clip is at work"


@pytest.mark.parametrize("name", ["resumed", "away-resumed", "bf16-resumed"])
def test_a_resumed_critic_is_bit_equal(dense, name):
    before = dense[1]["one" if name == "resumed" else name.removesuffix("-resumed")]
    after = dense[1][name]
    assert_bit_equal(after.tensors("final"), before.tensors("final"))
    assert_bit_equal(after.weights("final"), before.weights("final"))
    assert after.notes[0]["metrics"][0] == before.notes[0]["metrics"][1]


def test_a_state_without_a_critics_is_refused_and_weights_are_enough(dense):
    jobs = dense[1]
    assert jobs["none-saved"].notes[0]["fault"] == (
        "algorithm.adv_estimator: gae has a critic, and checkpoint 1 has no state of one; write "
        "run.from_checkpoint.take: weights, with which the critic begins as critic.path says."
    )
    assert jobs["from-group"].notes[0]["values"] == jobs["one"].notes[0]["values"]
    assert jobs["other-kind"].notes[0]["fault"].startswith("critic.optimizer.kind: checkpoint 1 has")


def test_an_export_of_a_checkpoint_has_the_policy_only(dense, tmp_path):
    model, jobs = dense
    checkpoints = Checkpoints(FolderStore(model.parent / "store-bf16"), 0)
    folder = ModelFolder(path=model, model=read_model(str(model)))
    export_as_hf(checkpoints, SAVED, folder, tmp_path / "hf", lambda _: None)
    assert verify_checkpoint(checkpoints, SAVED, lambda _: None).damages == ()
    assert SCORE not in tensors_in(tmp_path / "hf")
    assert_bit_equal(tensors_in(tmp_path / "hf"), jobs["bf16"].weights("after1"))


def test_the_critic_is_exported_as_a_model_that_transformers_loads(dense, tmp_path):
    """After an update; its values of the next samples are those of the trainer that saved it."""
    model, jobs = dense
    checkpoints = Checkpoints(FolderStore(model.parent / "store-saved"), 0)
    folder, form = (
        ModelFolder(path=model, model=with_value_head(read_model(str(model)))),
        FolderForm(prefix=CRITIC_KEYS),
    )
    seen: list[int] = []
    assert export_as_hf(checkpoints, SAVED, folder, tmp_path / "hf", seen.append, form) == "float32"
    assert sum(seen) == weight_bytes(checkpoints.read(SAVED), form)
    values, before = folder_values(tmp_path / "hf", 2), jobs["saved"].notes[0]["values"]
    assert max(abs(a - b) for a, b in zip(before, values, strict=True)) < 3e-6
    shutil.copytree(model, tmp_path / "first")
    first = folder_values(tmp_path / "first", 2)
    assert max(abs(a - b) for a, b in zip(before, first, strict=True)) > 1e-3, "the update shows"


def test_a_checkpoint_without_a_critic_exports_none(dense, tmp_path):
    model, _ = dense
    checkpoints = Checkpoints(FolderStore(model.parent / "store-group"), 0)
    folder = ModelFolder(path=model, model=with_value_head(read_model(str(model))))
    with pytest.raises(ConfigError, match="--critic: checkpoint 1 has no critic"):
        export_as_hf(
            checkpoints, SAVED, folder, tmp_path / "hf", lambda _: None, FolderForm(prefix=CRITIC_KEYS)
        )


def test_virtual_pipeline_stages_have_values_and_gradients_of_transformers(dense):
    """Their model has four layers."""
    paper = paper_critic(dense[0].parent / "deep", gamma=GAMMA, lam=LAM, masked=MASKED)
    found, wanted = dense[1]["vpp2"], [*itertools.chain(*paper.values)]
    for notes in found.notes:
        assert max(abs(a - b) for a, b in zip(notes["values"], wanted, strict=True)) < 1e-5
    assert farthest_gradient(found.tensors("first"), paper.gradient) < 1e-5


def test_two_ranks_go_on_from_one(dense):
    one, moved = dense[1]["one"], dense[1]["dp2-from-one"]
    assert largest_difference(moved.tensors("final"), one.tensors("final")) < 1e-6


def test_an_optimizer_in_host_memory_and_sleep_change_no_bit(dense):
    one = dense[1]["one"]
    for name in ("away", "napping"):
        assert_bit_equal(dense[1][name].tensors("final"), one.tensors("final"))
        assert_bit_equal(dense[1][name].weights("final"), one.weights("final"))
    assert dense[1]["napping"].notes[0]["left_bytes"] == [0, 0], "a critic leaves the device too"
    assert dense[1]["napping"].notes[0]["live_bytes"] < 64 << 10


@pytest.mark.parametrize(
    ("name", "as_without"),
    [("swap", "one"), ("beside", "one"), ("swap-bf16", "bf16"), ("swap-bf16-resumed", "bf16"),
     ("dp2-swap", "dp2")],
)  # fmt: skip
def test_turns_of_policy_and_critic_change_no_bit(dense, name, as_without):
    """Also with a save between them, whatever is resumed from which."""
    mine, others = dense[1][name], dense[1][as_without]
    assert_bit_equal(mine.tensors("final"), others.tensors("final"))
    assert_bit_equal(mine.weights("final"), others.weights("final"))
    for found, wanted in zip(mine.notes, others.notes, strict=True):
        assert found["metrics"][-1] == wanted["metrics"][-1]
        assert not any(found["left_bytes"])


def test_policy_and_critic_are_never_on_the_device_together(dense):
    swap, (both,) = dense[1]["swap"].notes[0], set(dense[1]["both"].notes[0]["device_bytes"]["micro_batch"])
    policy, critic = sorted(set(swap["device_bytes"]["micro_batch"]), reverse=True)
    assert policy + critic == both, "the critic's head is smaller"
    assert swap["held_bytes"] == policy, "the critic does not wake with it"


def test_while_the_critic_warms_up_the_policy_stays(dense):
    one, waiting = dense[1]["one"].notes[0]["metrics"], dense[1]["waiting"].notes[0]["metrics"]
    assert not [key for key in waiting[0] if key.startswith("actor/")]
    assert waiting[0].items() <= one[0].items(), "the critic learns as ever"
    assert waiting[1]["actor/lr"] == one[0]["actor/lr"], "the policy's schedule has not begun"
    assert waiting[1]["critic/lr"] == one[1]["critic/lr"]


def test_a_folder_without_a_value_head_begins_with_values_of_zero(dense):
    assert set(dense[1]["blank"].notes[0]["values"]) == {0.0}


def test_planted_mistakes_are_found(dense, paper):
    jobs = dense[1]
    wanted = [*itertools.chain(*paper.values)]
    for name in ("summed", "summed-sp"):
        values = jobs[name].notes[0]["values"]
        assert max(abs(a - b) for a, b in zip(values, wanted, strict=True)) < 1e-5, "values do not show it"
        assert farthest_gradient(jobs[name].tensors("first"), paper.gradient) > 0.1
    expected = jobs["one"].notes[0]["metrics"][0]
    for name, key in (("whitened", "critic/advantages/max"), ("other-head", "critic/returns/mean")):
        assert jobs[name].notes[0]["metrics"][0][key] != pytest.approx(expected[key], rel=1e-3)


def test_experts_over_ranks_have_values_and_gradients_of_transformers(tmp_path):
    model = make_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2, **TINY["qwen3_moe"])
    add_score(model)
    layout = {EP: 2, "mini_batch_size": 4}
    layouts = {"ep2": layout, "again": layout | {"recompute": "full"}}
    listed = [job(tmp_path, model, name, each, FIRST) for name, each in layouts.items()]
    jobs = run_world(tmp_path / "pair", 2, listed)
    paper = paper_critic(model, gamma=GAMMA, lam=LAM, masked=MASKED, num_steps=1)
    wanted = [*itertools.chain(*paper.values)]
    for found in jobs.values():
        for notes in found.notes:
            assert max(abs(a - b) for a, b in zip(notes["values"], wanted, strict=True)) < 1e-5
        assert farthest_gradient(found.tensors("first"), paper.gradient) < 1e-5
    assert torch.count_nonzero(paper.gradient[SCORE])
