"""Every recipe runs to its end on CPU, with tiny models of its families and its layout in small.

Recipes that differ only in sizes are one run in small: one of these is run, the others are compared with it.
"""

import json
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.given_runs import given_row
from tests.pictures import write_geometry
from tests.reward_models import make_reward_model
from tests.runs import ROOT, RunFile, living, rows, yatt
from tests.tiny_models import make_of_config
from tests.tiny_vision import make_vision_model

pytestmark = pytest.mark.slow
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
RUN = (
    "deepseek-v3",
    "qwen2.5-7b-genrm",
    "qwen2.5-vl-7b-geo3k",
    "qwen3-30b-a3b",
    "qwen3-8b-distill",
    "qwen3-8b-dpo",
    "qwen3-8b-ppo",
    "qwen3-8b-rlhf",
    "qwen3-8b-rule",
    "qwen3-8b-sft",
    "qwen3-vl-30b-a3b",
)
"""Each family, layout, placement, kind of run and kind of reward once."""

ALIKE = {
    "qwen2.5-7b-rule": ("qwen3-8b-rule", "qwen2.5-7b-genrm"),
    "qwen3-235b-a22b": ("deepseek-v3", "qwen3-30b-a3b"),
    "qwen3-8b-genrm": ("qwen2.5-7b-genrm", "qwen3-8b-rule"),
}
"""Which recipe that is run has the same settings in small, and which the same tiny model."""

FOLDER = Path("/folder")
PARALLEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip
SMALL_ENGINE = {"kv_cache_bytes": 32 << 20, "enforce_eager": True}


def in_small(recipe: dict[str, Any], folder: Path, tiny: Callable[[str, Path], str]) -> dict[str, Any]:
    """The same keys; models, data, batches and parallel sizes are small, everything else stays."""
    trainer = recipe["trainer"]
    layout = {key: min(trainer.get(key, 1), 2) for key in PARALLEL}
    ranks = layout["pipeline_model_parallel_size"] * layout["tensor_model_parallel_size"]
    data = [str(folder / ("train.parquet" if "media" in recipe else "train.jsonl"))]
    small = {
        **recipe,
        "run": {**recipe["run"], "dir": str(folder / "run"), "deterministic": False},
        "launch": {"nodes": 1, "gpus_per_node": max(2, ranks), "device": "cpu"},
        "data": {"train_files": data, "val_files": data, "max_prompt_tokens": 96},
        "model": {"path": tiny(recipe["model"]["path"], folder / "policy"), "dtype": "float32"},
        "rollout": {**recipe["rollout"], "n": 4, "max_response_tokens": 8, "tp_size": 1, "max_num_seqs": 8,
                    **SMALL_ENGINE},
        "validation": {**recipe.get("validation", {}), "every": 1, "max_prompts": 2},
        "trainer": {**trainer, **layout, "total_iterations": 2, "train_batch_size": 4, "mini_batch_size": 2,
                    "max_tokens_per_micro_batch": 512},
        "checkpoint": {"save_every": 1},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    }  # fmt: skip
    small["genrms"] = [
        {**genrm, "model": tiny(genrm["model"], folder / genrm["name"]), "dtype": "float32", "tp_size": 1,
         "max_model_tokens": 512, "max_num_seqs": 4, **SMALL_ENGINE,
         **({} if "kind" in genrm else {"max_tokens": 4, "on_unparsable": "score"})}
        for genrm in recipe.get("genrms", ())
    ]  # fmt: skip
    if "critic" in recipe:
        small["critic"] = {**recipe["critic"], "warmup_iterations": 1}
        small["optimizer"] = {**recipe["optimizer"], "lr_warmup_steps": 0}  # one iteration must show
        small["rollout"]["n"] = recipe["rollout"]["n"]
    if "kind" in recipe["run"]:
        small["rollout"] = {"max_response_tokens": 8}
        del small["sync"], small["genrms"]
    if "genrm_gpu_sets" in recipe.get("placement", ()):
        small["placement"] = {**recipe["placement"], "genrm_gpu_sets": 1}
    if "val_files" not in recipe["data"]:
        del small["validation"], small["data"]["val_files"]
    return small


def tiny_of(model: str, folder: Path) -> str:
    """A tiny random model of the family and features of a large one; of one with a tower or a head of
    numbers, of its family. A GenRM is another model than the policy."""
    config = json.loads((ROOT / model / "config.json").read_text())
    if "vision_config" in config:
        return make_vision_model(folder, config["model_type"])
    if config["architectures"][0].endswith("ForSequenceClassification"):
        return make_reward_model(folder)
    return make_of_config(folder, config, seed=int(folder.name != "policy"))


def recipe_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"configs/recipes/{name}.yaml").read_text())


def test_every_recipe_is_run_or_like_one_that_is() -> None:
    assert {path.stem for path in RECIPES} == {*RUN, *ALIKE}
    assert {other for pair in ALIKE.values() for other in pair} <= {*RUN}


@pytest.mark.parametrize("name", ALIKE)
def test_a_recipe_that_is_not_run_is_one_that_is_with_the_model_of_another(name: str, tmp_path: Path) -> None:
    settings, model = ALIKE[name]
    named = lambda large, folder: str(folder)  # noqa: E731
    assert in_small(recipe_of(name), FOLDER, named) == in_small(recipe_of(settings), FOLDER, named)
    judges, others = (
        [tiny_config(each["model"], tmp_path) for each in recipe_of(of).get("genrms", ())]
        for of in (name, settings)
    )
    assert judges == others
    policy, other = (tiny_config(recipe_of(of)["model"]["path"], tmp_path) for of in (name, model))
    assert policy == other


def tiny_config(model: str, folder: Path) -> dict[str, Any]:
    """What decides about the tiny model of a large one, beside random numbers."""
    return json.loads((Path(tiny_of(model, folder / Path(model).name)) / "config.json").read_text())


@pytest.mark.parametrize("name", RUN)
def test_a_recipe_runs_in_small(name: str, tmp_path: Path) -> None:
    """A whole run: it is the document's promise that the recipe's keys together are a run."""
    run = RunFile(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    recipe = recipe_of(name)
    questions = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"{n} plus one is"}],
         "reward_model": {"ground_truth": str(n + 1)}, "extra_info": {"index": n}}
        for n in range(12)
    ]  # fmt: skip
    if "kind" in recipe["run"]:
        questions = [given_row(number, recipe["run"]["kind"]) for number in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    write_geometry(tmp_path / "train.parquet", rows=12)
    shutil.copy(ROOT / "configs/recipes/rewards.py", tmp_path / "rewards.py")
    settings = in_small(recipe, tmp_path, tiny_of)
    if "rewards" in settings:
        settings["rewards"] = [{**each, "path": str(tmp_path / "rewards.py")} for each in settings["rewards"]]
    settings["launch"] |= {"scratch_dir": str(run.scratch), "shm_dir": str(run.shm)}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    done = yatt("run", str(file))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert living(run.run_dir) == {}
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    assert [row["training/global_step"] for row in trained] == [1, 2]
    named = [each["name"] for key in ("rewards", "genrms") for each in settings.get(key, ())]
    assert all(f"critic/score/{name}/mean" in row for row in trained for name in named)
    checks = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "weights.check"]
    assert {e["policy_version"] for e in checks} == (set() if "kind" in recipe["run"] else {0, 1, 2})
    assert all(e["difference"] < 1e-5 for e in checks), "the engines have all tensors of every version"
    check_export(tmp_path / "policy", run.run_dir / "model")
    if "critic" in recipe:
        done = yatt("ckpt", "export", str(run.run_dir), str(tmp_path / "critic"), "--critic")
        assert done.returncode == 0 and "the critic's weights of iteration 2" in done.stdout, done.stderr
        check_export(tmp_path / "policy", tmp_path / "critic", head={"score.weight"})


def check_export(policy: Path, model: Path, head: Set[str] = frozenset()) -> None:
    """The trained model has the policy's tensors, or another head; the last expert or layer is another one, a
    tower is not."""
    from safetensors import safe_open

    (weights,) = model.glob("*.safetensors")
    with safe_open(weights, "pt") as trained, safe_open(policy / "model.safetensors", "pt") as first:
        names = set(first.keys())
        assert set(trained.keys()) == ((names - {"lm_head.weight"}) | head if head else names)
        same = {
            key for key in names & {*trained.keys()} if trained.get_tensor(key).equal(first.get_tensor(key))
        }
        tower = {key for key in trained.keys() if key.startswith("visual.")}  # noqa: SIM118 (not a dict)
        assert tower <= same
        last = max(k for k in {*first.keys()} - tower if k.endswith("mlp.up_proj.weight") or ".experts." in k)
        assert last not in same
