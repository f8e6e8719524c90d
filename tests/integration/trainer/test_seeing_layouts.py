"""Models that take pictures compute, learn and resume as transformers does, in every layout."""

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.paper_losses import Given, paper_gradient
from tests.integration.trainer.pictured import (
    pictures_in,
    prepare_pictures,
    transformers_logprobs,
    with_pictures,
)
from tests.integration.trainer.program import samples
from tests.integration.trainer.test_families import ALGORITHM, ONE_STEP, PAIR, SPREAD, not_equal
from tests.integration.trainer.test_layouts import largest_difference
from tests.tiny_vision import as_engines_read, make_vision_model, probe_of_transformers, probe_rows

pytestmark = pytest.mark.slow
FULL = {"recompute": "full"}
DENSE = {"one": {}, **PAIR, "dp2": {"overlap_grad_reduce": True}}
LAYOUTS = DENSE | SPREAD
RECOMPUTED = {f"{name}-again": layout | FULL for name, layout in LAYOUTS.items()}
MOVES = {"tp2": "one", "pp2": "tp2", "cp2": "pp2", "dp2": "cp2", "one": "dp2"}
MOVES_OF_EXPERTS = {"tp2ep2": "ep2", "one": "tp2ep2"}
"""Layouts that resume, and those that saved."""

TOWER = ("visual.", "model.visual.", "vision_tower.", "multi_modal_projector.")


NOISE = 1e-9
"""Largest gradient of a bias of keys: the same for all keys, it changes no softmax."""


def is_key_bias(name):
    return name.startswith("vision_tower.") and name.endswith(".k_proj.bias")


class Scene:
    """A tiny model, and what worlds of one and two ranks did with it."""

    def __init__(self, folder, kind, trained):
        self.folder, self.vision = folder, {"train": trained}
        has_experts = kind.endswith("_moe")
        self.layouts = LAYOUTS if has_experts else DENSE
        self.moves = MOVES | MOVES_OF_EXPERTS if has_experts else MOVES
        self.again = ["one", *SPREAD] if has_experts else [*DENSE]  # the others are the dense families'
        two = [name for name in self.layouts if name != "one"]
        self.model = make_vision_model(folder / "model", kind)
        self.pictures = prepare_pictures(folder / "media", self.model)
        self.jobs = run_world(folder / "alone", 1, [self.learning("one"), self.gradient("one-again")])
        pair = [self.learning(name) for name in two] + [
            self.gradient(f"{name}-again") for name in self.again if name != "one"
        ]
        moves = [self.resuming(name, saved) for name, saved in self.moves.items() if name != "one"]
        self.jobs |= run_world(folder / "pair", 2, [*pair, *moves])
        self.jobs |= run_world(folder / "last", 1, [self.resuming("one", self.moves["one"])])

    def learning(self, name):
        return self.job(name, name, [
            ["probe", "start"], ["seen", 1], ["gradient", "first"], ["save", 1], ["publish", "after1"],
            ["train", 2], ["publish", "final"], ["seen_last", 1], ["export", "exported"],
        ])  # fmt: skip

    def gradient(self, name):
        return self.job(name, name, [["probe", "start"], ["seen", 1], ["only_gradient", "first"]])

    def resuming(self, name, saved):
        actions = [["publish", "after1"], ["train", 2], ["publish", "final"]]
        job = self.job(f"{name}-from-{saved}", name, actions, saved)
        return {**job, "restore": "manifests/00000001.000001.json"}

    def job(self, name, layout, actions, store=""):
        return {
            "name": name, "model": self.model, "pictures": self.pictures, "algorithm": ALGORITHM,
            "vision": self.vision,
            "layout": (LAYOUTS | RECOMPUTED)[layout] | ONE_STEP, "actions": actions,
            "store": str(self.folder / f"store-{store or name}"),
        }  # fmt: skip

    def trains(self, name):
        """Whether a tensor of the model's files is trained."""
        part = self.vision["train"]
        if name.endswith("correction_bias"):
            return False
        return (
            not name.startswith(TOWER)
            or part == "all"
            or (part == "connector" and ("merger" in name or "projector" in name))
        )

    def given(self):
        model, logprobs_of = transformers_logprobs(self.model)
        table = pictures_in(self.folder / "media")
        return Given(model, *with_pictures(*samples(1), table), logprobs_of)


def names_in_files(model):
    """Of transformers' parameters: Qwen2.5-VL's files have older names."""
    known = as_engines_read(load_file(f"{model}/model.safetensors"))

    def name_of(name):
        older = name.removeprefix("model."), name.replace("model.language_model.", "model.", 1)
        oldest = name.replace("model.language_model.", "language_model.model.", 1), f"language_model.{name}"
        return next(each for each in (name, *older, *oldest) if each in known)

    return name_of


def wrong_log_probs(scene, expected):
    for name in (*scene.layouts, *(f"{each}-again" for each in scene.again)):
        seen = torch.tensor(scene.jobs[name].notes[0]["seen"])
        if (far := (seen - expected).abs().max().item()) > 3e-6:
            yield f"{name}: log-probs differ by {far:.1e}"


def wrong_probes(scene, model):
    expected = [probe_of_transformers(model, scene.model, row) for row in probe_rows(scene.model)]
    assert len(expected) == 3, "the last one has a picture"
    for name in (*scene.layouts, *(f"{each}-again" for each in scene.again)):
        found = scene.jobs[name].notes[0]["probe"]["logprobs"]
        for row, wanted in zip(found, expected, strict=True):
            if (far := (torch.tensor(row) - wanted).abs().max().item()) > 3e-6:
                yield f"{name}: the probe differs by {far:.1e}"


def wrong_gradients(scene, expected):
    for name in (*scene.layouts, *(f"{each}-again" for each in scene.again)):
        tensors = scene.jobs[name].tensors("first")
        got = {key: tensor for key, tensor in tensors.items() if not key.endswith("correction_bias")}
        if got.keys() != expected.keys():
            yield f"{name}: other tensors {sorted(got.keys() ^ expected.keys())}"
        for tensor_name, tensor in expected.items():
            largest = tensor.abs().max().item() if scene.trains(tensor_name) else 0.0
            wanted = tensor if largest else torch.zeros_like(tensor)
            bound = (
                NOISE if tensor_name.endswith("k_proj.bias") and "tower" in tensor_name else 1e-5 * largest
            )
            if (far := (got[tensor_name] - wanted).abs().max().item()) > bound:
                yield f"{name}: gradient of {tensor_name} differs by {far:.1e} of {largest:.1e}"


def wrong_lessons(scene):
    source = as_engines_read(load_file(f"{scene.model}/model.safetensors"))
    final = {name: scene.jobs[name].weights("final") for name in scene.layouts}
    frozen = [name for name in source if not scene.trains(name)]
    if largest_difference(scene.jobs["one"].weights("after1"), final["one"]) < 1e-4:
        yield "one rank learns nothing"
    for name, weights in final.items():
        if differing := [each for each in frozen if not torch.equal(weights[each], source[each])]:
            yield f"{name}: what is not trained has other {differing[:3]}"
        learning = [each for each in source if each not in frozen and not is_key_bias(each)]
        if idle := {each for each in learning if torch.equal(weights[each], source[each])}:
            yield f"{name}: {sorted(idle)[:3]} learned nothing"
        if (far := largest_difference(weights, final["one"])) > 1e-5:
            yield f"{name}: learned something else, {far:.1e}"


def wrong_exports(scene, given):
    """What a run leaves is a model of transformers with its processor, and has the run's log-probs."""
    for name in ("one", "pp2"):
        folder = scene.jobs[name].folder / "exported"
        model, logprobs_of = transformers_logprobs(folder)
        state = {key: tensor.clone() for key, tensor in load_file(next(folder.glob("*.safetensors"))).items()}
        weights = scene.jobs[name].weights("final")
        if differing := not_equal(as_engines_read(state), weights):
            yield f"{name}: exported other {differing[:3]}"
        last = torch.tensor(scene.jobs[name].notes[0]["seen_last"])
        with torch.no_grad():
            exported = torch.cat([logprobs_of(model, rollout) for rollout in given.rollouts])
        if (far := (exported - last).abs().max().item()) > 3e-6:
            yield f"{name}: log-probs of the exported model differ by {far:.1e}"


def wrong_resumes(scene):
    for name, saved in scene.moves.items():
        resumed, undisturbed = scene.jobs[f"{name}-from-{saved}"], scene.jobs[saved]
        if differing := not_equal(resumed.weights("after1"), undisturbed.weights("after1")):
            yield f"{name} from {saved}: has other {differing[:3]}"
        if (far := largest_difference(resumed.weights("final"), undisturbed.weights("final"))) > 1e-5:
            yield f"{name} from {saved}: learned something else, {far:.1e}"


@pytest.mark.parametrize(("kind", "trained"), [
    ("qwen2_5_vl", "all"), ("qwen3_vl", "none"), ("qwen3_vl", "all"), ("qwen3_vl_moe", "all"),
    ("glm4v_moe", "all"), ("internvl_moe", "all"),
])  # fmt: skip
def test_a_family_that_sees_is_transformers_in_every_layout(tmp_path, kind, trained):
    """A whole run of the trainer in each of ten layouts, and its resumes in others."""
    scene = Scene(tmp_path, kind, trained)
    given = scene.given()
    with torch.no_grad():
        expected = torch.cat([given.logprobs_of(given.model, rollout) for rollout in given.rollouts])
    faults = [*wrong_log_probs(scene, expected), *wrong_probes(scene, given.model)]
    gradient = paper_gradient(scene.model, ALGORITHM, num_steps=1, given=given)
    names = names_in_files(scene.model)
    faults += wrong_gradients(scene, {names(name): tensor for name, tensor in gradient.items()})
    assert [*faults, *wrong_lessons(scene), *wrong_resumes(scene), *wrong_exports(scene, given)] == []


def test_a_tower_that_was_frozen_begins_one_that_is_trained(tmp_path):
    """And one in another dtype: a checkpoint in bfloat16 has no main copies of what was not trained."""
    model = make_vision_model(tmp_path / "model", "qwen3_vl")
    common = {
        "model": model, "pictures": prepare_pictures(tmp_path / "media", model), "algorithm": ALGORITHM,
        "store": str(tmp_path / "store"),
    }  # fmt: skip
    again = {"restore": "manifests/00000001.000001.json", "weights_only": True, **common}
    half, train = {"dtype": "bfloat16", **ONE_STEP}, {"train": "all"}
    learned = [["publish", "begun"], ["train", 1], ["publish", "final"]]
    saving = [["train", 1], ["save", 1], ["publish", "saved"]]
    jobs = [
        {"name": "frozen", "layout": half, "actions": saving, **common},
        {"name": "trained", "layout": half, "vision": train, "actions": learned, **again},
        {"name": "whole", "layout": ONE_STEP, "actions": learned, **again},
        {"name": "state", "layout": half, "vision": train, "actions": [], **again, "weights_only": False}
        | {"is_refused": True},
    ]  # fmt: skip
    done = run_world(tmp_path / "world", 1, jobs)
    saved = done["frozen"].weights("saved")
    for name in ("trained", "whole"):
        begun, final = (done[name].weights(each) for each in ("begun", "final"))
        tower = [key for key in saved if key.startswith(TOWER)]
        assert not [key for key in tower if not torch.equal(begun[key], saved[key].to(begun[key].dtype))]
        moved = [key for key in tower if not torch.equal(final[key], begun[key])]
        assert bool(moved) is (name == "trained")
    assert "no state of the optimizer for vision." in done["state"].notes[0]["fault"]


def test_a_reference_after_a_fork_is_the_whole_model_of_the_folder(tmp_path):
    """Whatever is trained now: the policy's tower is the checkpoint's, and not the reference's."""
    model = make_vision_model(tmp_path / "model", "qwen3_vl")
    common = {
        "model": model, "pictures": prepare_pictures(tmp_path / "media", model), "layout": ONE_STEP,
        "algorithm": ALGORITHM | {"kl_in": "loss"}, "store": str(tmp_path / "store"),
        "optimizer": {"lr": 1e-2},
    }  # fmt: skip
    again = {"restore": "manifests/00000001.000001.json", "weights_only": True, "is_fork": True, **common}
    learned = [["train", 2]]
    jobs = [
        {"name": "before", "vision": {"train": "all"}, "actions": [["train", 1], ["save", 1]], **common},
        *({"name": part, "vision": {"train": part}, "actions": learned, **again} for part in ("none", "all")),
    ]  # fmt: skip
    done = run_world(tmp_path / "world", 1, jobs)
    frozen, trained = (done[part].notes[0]["metrics"][-1]["actor/kl_loss"] for part in ("none", "all"))
    assert frozen == pytest.approx(trained, rel=1e-5) and trained > 1e-7


TRAPS = {
    "features-by-token-id": ("qwen2_5_vl", "one", "none"),
    "one-axis": ("qwen2_5_vl", "one", "none"),
    "sections-side-by-side": ("qwen3_vl", "one", "none"),
    "normalised-twice": ("qwen3_vl", "one", "none"),
    "without-levels": ("qwen3_vl", "one", "none"),
    "pictures-in-another-order": ("qwen2_5_vl", "one", "none"),
    "levels-of-one-rank": ("qwen3_vl", "tp2", "all"),
    "without-the-gate": ("qwen3_vl", "one-again", "all"),
    "frozen-in-vain": ("qwen2_5_vl", "one", "none"),
    "axes-of-pictures": ("internvl", "one", "none"),
    "squares-turned": ("internvl", "one", "none"),
}
"""Mistakes that others have made, each with a family, a layout and what is trained."""

FOUND_BY_THE_PROBE = (
    "one-axis", "sections-side-by-side", "normalised-twice", "without-levels", "axes-of-pictures",
    "squares-turned",
)  # fmt: skip
"""Those that change what a sequence with one picture means."""


@pytest.fixture(scope="module")
def trapped(tmp_path_factory):
    """What each trap makes of a first gradient, by its name, beside the right one."""
    root, found = tmp_path_factory.mktemp("traps"), {}
    for kind in ("qwen2_5_vl", "qwen3_vl", "internvl"):
        scene = Scene.__new__(Scene)
        scene.folder = root / kind
        scene.model = make_vision_model(scene.folder / "model", kind)
        scene.pictures = prepare_pictures(scene.folder / "media", scene.model)
        for num_ranks in (1, 2):
            jobs = []
            for name, (of_kind, layout, trained) in TRAPS.items():
                if (of_kind, 1 + (layout == "tp2")) == (kind, num_ranks):
                    scene.vision = {"train": trained}
                    job = scene.gradient(layout)
                    jobs += [{**job, "name": name, "trap": name}, {**job, "name": f"right-{name}"}]
            if jobs:
                found |= run_world(root / f"{kind}-{num_ranks}", num_ranks, jobs)
    return found


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_changes_log_probs_or_gradients(trapped, name):
    """A whole run of a rank's first update: what is found there is found by the comparison of layouts."""
    job, right = trapped[name], trapped[f"right-{name}"]
    if name in FOUND_BY_THE_PROBE:
        of_text, also_of_text, of_picture = (
            max(abs(a - b) for a, b in zip(*rows, strict=True))
            for rows in zip(*(each.notes[0]["probe"]["logprobs"] for each in (job, right)), strict=True)
        )
        assert max(of_text, also_of_text) == 0 and of_picture > 1e-3
    if fault := job.notes[0].get("raised"):
        assert "backward through the graph a second time" in fault
        return
    seen, expected = (torch.tensor(each.notes[0]["seen"]) for each in (job, right))
    got, gradient = job.tensors("first"), right.tensors("first")
    worst = max(
        ((got[each] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-6)).item()
        for each, tensor in gradient.items()
    )
    assert (seen - expected).abs().max() > 1e-3 or worst > 1e-2
