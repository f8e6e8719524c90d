"""Corrections and rejections: the gradient is that of the papers, in every layout; adaptive KL resumes."""

import itertools

import pytest

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.paper_losses import mean_entropy, paper_gradient, paper_loss
from tests.integration.trainer.test_layouts import CP, GRADIENT, PP, TP, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
LAYOUTS = {"tp2": {TP: 2, "sequence_parallel": True}, "pp2": {PP: 2}, "cp2": {CP: 2}, "dp2": {}}
RANGE = {"low": 0.75, "high": 1.65}
OFF = {"rule": "none"}


def case(mode: str, correction: dict, **rejection) -> dict:
    return {"loss_agg_mode": mode, "correction": correction, "rejection": rejection}


CASES = {
    "truncate-token": case("token-mean", {"rule": "truncate", "level": "token", "high": 1.05}),
    "truncate-sequence": case("token-mean", {"rule": "truncate", "level": "sequence", "high": 1.05}),
    "truncate-geometric": case(
        "seq-mean-token-sum", {"rule": "truncate", "level": "geometric", "high": 1.05}
    ),
    "mask-token": case("seq-mean-token-mean", {"rule": "mask", "level": "token", **RANGE}),
    "mask-sequence": case("token-mean", {"rule": "mask", "level": "sequence", **RANGE}),
    "mask-geometric": case("seq-mean-token-mean", {"rule": "mask", "level": "geometric", **RANGE}),
    "reject-token": case("token-mean", OFF, level="token", **RANGE),
    "reject-token-by-sample": case("seq-mean-token-mean", OFF, level="token", **RANGE),
    "reject-sequence": case("seq-mean-token-sum", {"rule": "truncate"}, level="sequence", **RANGE),
    "reject-geometric": case(
        "seq-mean-token-sum-norm", {"rule": "mask", **RANGE}, level="geometric", **RANGE
    ),
    "veto": case("token-mean", OFF, veto=0.6),
}
PAIRS = {
    "tp2": ("truncate-token", "mask-sequence", "reject-geometric"),
    "pp2": ("truncate-geometric", "mask-token", "reject-token-by-sample"),
    "cp2": ("truncate-sequence", "mask-geometric", "reject-sequence", "reject-token-by-sample", "veto"),
    "dp2": ("truncate-sequence",),
}
"""Cases of each layout: one that truncates, one that masks, one that rejects. The layout makes the ratios, of
tokens and of sequences; what is done with them does not depend on it. Context parallelism cuts sequences, so
all that sums over a sample is there. `reject-token` learns in each."""
assert {*CASES} == {"reject-token"}.union(*PAIRS.values())

LEVELS, RULES = ("token", "sequence", "geometric"), ("truncate", "mask")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
MATRIX, MASKS = {}, {}
"""Each rejection with each correction: weights are those of whole sequences, whatever is rejected. In every
second one some samples are not trained on."""
for one, two, three in itertools.product(range(3), range(2), range(3)):
    rejected, rule, level, mode = LEVELS[one], RULES[two], LEVELS[three], MODES[(one + three) % 3]
    bounds = RANGE if rule == "mask" else {"high": 1.05}
    name = f"{rejected}-then-{rule}-{level}"
    MATRIX[name] = case(mode, {"rule": rule, "level": level, **bounds}, level=rejected, **RANGE)
    MASKS[name] = (1, 4, 9) if (one + two + three) % 2 else ()

WITH_LOSS = ("truncate-token", "reject-token", "reject-token-by-sample", "reject-sequence")
MASKED = (0, 5, 11)

LEARN = [["train", 1], ["train", 2], ["publish", "final"]]
ADAPTIVE = {"kl_in": "reward", "kl_target": 1e-4, "kl_horizon": 50.0, "kl_coef": 0.3}


@pytest.fixture(scope="session")
def alone(shallow, tmp_path_factory):
    qwen3 = str(shallow["qwen3"])
    folder = tmp_path_factory.mktemp("alone")
    jobs = [
        {"name": name, "model": qwen3, "algorithm": algorithm, "actions": GRADIENT,
         "masked": MASKS.get(name, ())}
        for name, algorithm in {**CASES, **MATRIX}.items()
    ]  # fmt: skip
    jobs += [
        {"name": f"{name}-learn", "model": qwen3, "algorithm": CASES[name], "actions": LEARN}
        for name in ("reject-token",)
    ]
    jobs += [
        {"name": f"{name}-loss{of}", "model": qwen3, "algorithm": CASES[name], "actions": [["train", 1]],
         "layout": {"mini_batch_size": 4}, "masked": masked}
        for name in WITH_LOSS
        for of, masked in (("", ()), ("-masked", MASKED))
    ]  # fmt: skip
    store = str(folder / "adaptive-store")
    common = {"model": qwen3, "algorithm": ADAPTIVE, "store": store}
    jobs += [
        {
            "name": "adaptive",
            **common,
            "actions": [["train", 1], ["save", 1], ["train", 2], ["publish", "final"]],
        },
        {
            "name": "resumed",
            **common,
            "restore": "manifests/00000001.000001.json",
            "actions": [["train", 2], ["publish", "final"]],
        },
    ]
    return run_world(folder, 1, jobs)


@pytest.fixture(scope="session")
def pair(shallow, tmp_path_factory):
    qwen3 = str(shallow["qwen3"])
    jobs = [
        {
            "name": f"{name}-{layout}",
            "model": qwen3,
            "algorithm": CASES[name],
            "actions": GRADIENT,
            "layout": sizes,
        }
        for layout, sizes in LAYOUTS.items()
        for name in PAIRS[layout]
    ] + [
        {
            "name": f"{name}-{layout}-learn",
            "model": qwen3,
            "algorithm": algorithm,
            "actions": LEARN,
            "layout": sizes,
        }
        for layout, sizes in LAYOUTS.items()
        for name, algorithm in {"reject-token": CASES["reject-token"], "adaptive": ADAPTIVE}.items()
    ]
    return run_world(tmp_path_factory.mktemp("pair"), 2, jobs)


@pytest.fixture(scope="session")
def papers(shallow):
    return {name: paper_gradient(shallow["qwen3"], algorithm) for name, algorithm in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_papers(alone, papers, name):
    got = alone[name].tensors("first")
    assert got.keys() == papers[name].keys()
    assert largest_difference(got, papers[name]) < 1e-5
    assert any(tensor.abs().max() > 1e-3 for tensor in got.values()), "there is a gradient"


def test_the_gradient_is_the_papers_for_each_rejection_with_each_correction(alone, shallow):
    far = {}
    for name, algorithm in MATRIX.items():
        paper = paper_gradient(shallow["qwen3"], algorithm, masked=MASKS[name])
        far[name] = largest_difference(alone[name].tensors("first"), paper)
    assert {name: value for name, value in far.items() if value >= 1e-5} == {}


def test_masks_are_in_each_kind_of_the_matrix():
    kinds = {
        (value, bool(MASKS[name]))
        for name, algorithm in MATRIX.items()
        for value in (
            algorithm["loss_agg_mode"], ("reject", algorithm["rejection"]["level"]),
            algorithm["correction"]["rule"], ("correct", algorithm["correction"]["level"]),
        )
    }  # fmt: skip
    assert len(kinds) == 2 * (3 + 3 + 2 + 3)


@pytest.mark.parametrize("masked", [(), MASKED], ids=["", "masked"])
@pytest.mark.parametrize("name", WITH_LOSS)
def test_the_reported_loss_and_entropy_are_of_the_tokens_that_are_trained_on(alone, shallow, name, masked):
    (metrics,) = alone[f"{name}-loss{'-masked' if masked else ''}"].notes[0]["metrics"]
    loss = paper_loss(shallow["qwen3"], CASES[name], masked)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)
    entropy = mean_entropy(shallow["qwen3"], CASES[name].get("rejection", {}), masked)
    assert metrics["actor/entropy"] == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_each_correction_changes_the_gradient(papers, shallow, name):
    plain = paper_gradient(shallow["qwen3"], case(CASES[name]["loss_agg_mode"], OFF))
    assert largest_difference(plain, papers[name]) > 1e-4


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in PAIRS for name in PAIRS[layout]])
def test_the_gradient_is_the_papers_in_every_layout(pair, papers, name, layout):
    assert largest_difference(pair[f"{name}-{layout}"].tensors("first"), papers[name]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_with_rejection_what_one_learns(alone, pair, layout):
    expected = alone["reject-token-learn"]
    got = pair[f"reject-token-{layout}-learn"]
    assert largest_difference(got.weights("final"), expected.weights("final")) < 1e-5
    for name in ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"):
        key = f"rollout_corr/{name}"
        values = [row[key] for row in expected.notes[0]["metrics"]]
        assert all(0 < value < 1 for value in values)
        for note in got.notes:
            assert [row[key] for row in note["metrics"]] == pytest.approx(values)


def coefficients(job) -> list[float]:
    return [row["actor/kl_coef"] for row in job.notes[0]["metrics"]]


def test_the_adaptive_coefficient_changes_and_continues_after_a_resume(alone, pair):
    first, second = coefficients(alone["adaptive"])
    kl = alone["adaptive"].notes[0]["metrics"][0]["actor/reward_kl_penalty"]
    error = max(-0.2, min(0.2, kl / ADAPTIVE["kl_target"] - 1))
    assert first == 0.3 and second == pytest.approx(0.3 * (1 + error * 16 / 50))
    assert abs(error) > 0.01
    assert coefficients(alone["resumed"]) == [second], "bit for bit"
    same = alone["resumed"].weights("final")
    assert all(tensor.equal(same[name]) for name, tensor in alone["adaptive"].weights("final").items())
    for layout in LAYOUTS:
        assert coefficients(pair[f"adaptive-{layout}-learn"]) == pytest.approx([first, second])
