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
from tests.integration.trainer.test_families import ALGORITHM, ONE_STEP, PAIR, not_equal
from tests.integration.trainer.test_layouts import largest_difference
from tests.tiny_vision import KINDS, make_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FULL = {"recompute": "full"}
LAYOUTS = {"one": {}, **PAIR}
RECOMPUTED = {f"{name}-again": layout | FULL for name, layout in LAYOUTS.items()}
MOVES = {"tp2": "one", "pp2": "tp2", "cp2": "pp2", "one": "cp2"}
"""Layouts that resume, and those that saved."""

TOWER = ("visual.", "model.visual.")


class Scene:
    """A tiny model, and what worlds of one and two ranks did with it."""

    def __init__(self, folder, kind):
        self.folder = folder
        self.model = make_vision_model(folder / "model", kind)
        self.pictures = prepare_pictures(folder / "media", self.model)
        self.jobs = run_world(folder / "alone", 1, [self.learning("one"), self.gradient("one-again")])
        pair = [self.learning(name) for name in PAIR] + [self.gradient(f"{name}-again") for name in PAIR]
        moves = [self.resuming(name, saved) for name, saved in MOVES.items() if name != "one"]
        self.jobs |= run_world(folder / "pair", 2, [*pair, *moves])
        self.jobs |= run_world(folder / "last", 1, [self.resuming("one", MOVES["one"])])

    def learning(self, name):
        return self.job(name, name, [
            ["seen", 1], ["gradient", "first"], ["save", 1], ["publish", "after1"], ["train", 2],
            ["publish", "final"],
        ])  # fmt: skip

    def gradient(self, name):
        return self.job(name, name, [["seen", 1], ["only_gradient", "first"]])

    def resuming(self, name, saved):
        actions = [["publish", "after1"], ["train", 2], ["publish", "final"]]
        job = self.job(f"{name}-from-{saved}", name, actions, saved)
        return {**job, "restore": "manifests/00000001.000001.json"}

    def job(self, name, layout, actions, store=""):
        return {
            "name": name, "model": self.model, "pictures": self.pictures, "algorithm": ALGORITHM,
            "layout": (LAYOUTS | RECOMPUTED)[layout] | ONE_STEP, "actions": actions,
            "store": str(self.folder / f"store-{store or name}"),
        }  # fmt: skip

    def given(self):
        model, logprobs_of = transformers_logprobs(self.model)
        table = pictures_in(self.folder / "media")
        return Given(model, *with_pictures(*samples(1), table), logprobs_of)


def names_in_files(scene):
    """Of transformers' parameters: Qwen2.5-VL's files have older names."""
    known = load_file(f"{scene.model}/model.safetensors")

    def name_of(name):
        older = name.removeprefix("model."), name.replace("model.language_model.", "model.", 1)
        return next(each for each in (name, *older) if each in known)

    return name_of


def wrong_log_probs(scene, expected):
    for name in (*LAYOUTS, *RECOMPUTED):
        seen = torch.tensor(scene.jobs[name].notes[0]["seen"])
        if (far := (seen - expected).abs().max().item()) > 3e-6:
            yield f"{name}: log-probs differ by {far:.1e}"


def wrong_gradients(scene, expected):
    for name in (*LAYOUTS, *RECOMPUTED):
        got = scene.jobs[name].tensors("first")
        if got.keys() != expected.keys():
            yield f"{name}: other tensors {sorted(got.keys() ^ expected.keys())}"
        for tensor_name, tensor in expected.items():
            largest = 0.0 if tensor_name.startswith(TOWER) else tensor.abs().max().item()
            wanted = tensor if largest else torch.zeros_like(tensor)
            if (far := (got[tensor_name] - wanted).abs().max().item()) > 1e-5 * largest:
                yield f"{name}: gradient of {tensor_name} differs by {far:.1e} of {largest:.1e}"


def wrong_lessons(scene):
    source = load_file(f"{scene.model}/model.safetensors")
    final = {name: scene.jobs[name].weights("final") for name in LAYOUTS}
    tower = [name for name in source if name.startswith(TOWER)]
    if largest_difference(scene.jobs["one"].weights("after1"), final["one"]) < 1e-4:
        yield "one rank learns nothing"
    for name, weights in final.items():
        if differing := [each for each in tower if not torch.equal(weights[each], source[each])]:
            yield f"{name}: the tower has other {differing[:3]}"
        if (far := largest_difference(weights, final["one"])) > 1e-5:
            yield f"{name}: learned something else, {far:.1e}"
    for name, saved in MOVES.items():
        resumed, undisturbed = scene.jobs[f"{name}-from-{saved}"], scene.jobs[saved]
        if differing := not_equal(resumed.weights("after1"), undisturbed.weights("after1")):
            yield f"{name} from {saved}: has other {differing[:3]}"
        if (far := largest_difference(resumed.weights("final"), final[name])) > 1e-6:
            yield f"{name} from {saved}: learned something else, {far:.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_that_sees_is_transformers_in_every_layout(tmp_path, kind):
    """A whole run of the trainer in each of eight layouts, and its resumes in others."""
    scene = Scene(tmp_path, kind)
    given = scene.given()
    with torch.no_grad():
        expected = torch.cat([given.logprobs_of(given.model, rollout) for rollout in given.rollouts])
    faults = [*wrong_log_probs(scene, expected)]
    gradient = paper_gradient(scene.model, ALGORITHM, num_steps=1, given=given)
    names = names_in_files(scene)
    faults += wrong_gradients(scene, {names(name): tensor for name, tensor in gradient.items()})
    assert [*faults, *wrong_lessons(scene)] == []
