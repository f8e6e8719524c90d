"""What a person sees who gets something wrong: one message with the place and the fix, exit code 2, and
nothing half-written; or, where a single sample is at fault, a count and a run that goes on."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import RunFile, living, rows, start, yatt
from tests.tiny_models import make_scripted_model
from yatt.config.load import load_resolved


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = RunFile(tmp_path_factory.mktemp("good"))
    run.write()
    return run


def refused(good: RunFile, *arguments: str, run_dir: Path | None = None) -> str:
    """What `yatt run` says; it must have started nothing and left nothing."""
    done = yatt("run", str(good.folder / "run.yaml"), *arguments)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("yatt: "), done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_dir or good.run_dir).exists()
    return done.stderr


def test_every_mistake_of_the_file_is_listed(good: RunFile) -> None:
    said = refused(good, "optimizer.lr=1e-6", "rolout.n=3", "trainer.mini_batch_size=3")
    assert "argument 'optimizer.lr=1e-6': optimizer.lr: '1e-6' is not a number" in said
    assert "rolout: no such key. Did you mean 'rollout'?" in said


def test_a_missing_model_is_named(good: RunFile) -> None:
    assert "model.path: there is no folder /nowhere/qwen" in refused(good, "model.path=/nowhere/qwen")


def test_an_untrainable_architecture_is_named(good: RunFile, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (folder / "model.safetensors").write_bytes(b"")
    said = refused(good, f"model.path={folder}")
    assert "architecture BertModel cannot be trained; use LlamaForCausalLM" in said


def test_tensors_that_the_config_does_not_promise_are_named_before_anything_starts(
    good: RunFile, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(good.folder / "policy", policy)
    config = json.loads((policy / "config.json").read_text())
    layers = config["num_hidden_layers"]
    fewer = {"num_hidden_layers": layers - 1}
    (policy / "config.json").write_text(json.dumps(config | fewer))
    assert f"of {layers} layers, and num_hidden_layers={layers - 1}" in refused(good, f"model.path={policy}")
    fewer["layer_types"] = config["layer_types"][:-1]
    (policy / "config.json").write_text(json.dumps(config | fewer))
    assert f"the weight table does not use: model.layers.{layers - 1}.input_layernorm" in refused(
        good, f"model.path={policy}"
    )
    (policy / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    assert "layers.0.mlp.gate_proj.weight with shape (" in refused(good, f"model.path={policy}")


def test_files_that_no_trainer_should_read_are_named_beside_other_mistakes(
    good: RunFile, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(good.folder / "policy", policy)
    (policy / "link.safetensors").symlink_to(tmp_path / "nothing")
    (policy / "folder.safetensors").mkdir()
    (policy / "again.safetensors").write_bytes((policy / "model.safetensors").read_bytes())
    said = refused(good, f"model.path={policy}", "data.train_files=[/nowhere.jsonl]")
    assert "has folder.safetensors, which is no file" in said and "has link.safetensors, which is no" in said
    assert "in again.safetensors and in model.safetensors; remove the file that is wrong" in said
    assert "/nowhere.jsonl" in said
    for name in ("link", "again"):
        (policy / f"{name}.safetensors").unlink()
    (policy / "folder.safetensors").rmdir()
    tensors = load_file(policy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int64)
    save_file(tensors, policy / "model.safetensors")
    assert "has tensors that cannot be trained: model.norm.weight (I64)" in refused(
        good, f"model.path={policy}"
    )


def test_whole_experts_need_a_model_that_has_some(good: RunFile) -> None:
    said = refused(
        good, "rollout.expert_parallel=true", "rollout.tp_size=2", "launch.gpus_per_node=2",
        "rollout.engine=vllm", "launch.device=auto",
    )  # fmt: skip
    assert f"rollout.expert_parallel has no effect: {good.folder / 'policy'} has no experts; remove" in said


def test_the_row_without_a_prompt_is_named(good: RunFile, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(1, 5001)]
    lines[4710] = json.dumps({"question": "where is my prompt?"})
    data.write_text("\n".join(lines) + "\n")
    said = refused(good, f"data.train_files=[{data}]")
    assert f"{data}: row 4711 has no prompt: column 'prompt' must be text" in said
    assert "where is my prompt?" in said


def test_a_row_that_is_not_json_is_named(good: RunFile, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    assert f"{data}: row 2 is not JSON" in refused(good, f"data.train_files=[{data}]")


def genrm(**changes: Any) -> str:
    section = {"name": "judge", "model": "/nowhere", "template": "{prompt}{completion}",
               "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0}}}  # fmt: skip
    return f"genrms={json.dumps([section | changes])}"


def test_a_template_with_an_unknown_field_is_named_before_anything_starts(good: RunFile) -> None:
    model = good.folder / "policy"
    said = refused(good, genrm(model=str(model), template="{prompt}{answer}"))
    assert "genrms[0].template: unknown field {answer}; known are {prompt}, {completion}" in said


def test_damaged_files_of_a_judge_are_named_beside_each_other(good: RunFile, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(good.folder / "policy", judge)
    weights = judge / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (judge / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(judge / "generation_config.json")
    said = refused(good, genrm(model=str(judge), template="{completion}", max_model_tokens=256))
    assert f"genrms[0].model: {weights} has a header that cannot be read" in said
    assert f"{judge / 'generation_config.json'} cannot be read: is not a regular file" in said
    (judge / "generation_config.json").unlink()
    weights.write_bytes(whole)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (judge / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(good, genrm(model=str(judge), template="{completion}", max_model_tokens=256))
    assert "promises model.norm.weight in model-00002-of-00002.safetensors, but it is in model" in said


def test_a_judge_whose_heads_its_tp_size_does_not_divide_is_named(good: RunFile, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(good.folder / "policy", judge)
    values = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps(values | {"num_attention_heads": 3}))
    said = refused(
        good, genrm(model=str(judge), template="{completion}", max_model_tokens=256, tp_size=2),
        "launch.gpus_per_node=2", "trainer.tensor_model_parallel_size=2",
    )  # fmt: skip
    assert f"genrms[0].tp_size 2 does not divide the 3 heads of {judge}; write a divisor" in said


def test_reward_functions_that_cannot_be_called_are_named(good: RunFile) -> None:
    (good.folder / "other.py").write_text("def compute_score(data_source, solution, ground_truth): ...\n")
    said = refused(good, f"rewards=[{{name: mine, path: {good.folder / 'other.py'}}}]")
    assert "rewards[mine].function: compute_score of " in said and "has no parameter solution_str" in said


def test_a_verdict_pattern_without_a_group_is_named(good: RunFile) -> None:
    said = refused(good, genrm(model=str(good.folder / "policy"), verdict={"pattern": "Y|N"}))
    assert "genrms[0].verdict.pattern: 'Y|N' has no group" in said


def test_a_missing_reward_function_is_named(good: RunFile) -> None:
    reward = [{"name": "mine", "path": str(good.folder / "reward.py"), "function": "compute_scor"}]
    assert "has no function 'compute_scor' (it has: compute_score)" in refused(
        good, f"rewards={json.dumps(reward)}"
    )


def test_a_reward_file_that_ends_its_process_is_named(good: RunFile) -> None:
    (good.folder / "ends.py").write_text("import sys\nsys.exit(0)\n")
    reward = [{"name": "mine", "path": str(good.folder / "ends.py")}]
    said = refused(good, f"rewards={json.dumps(reward)}")
    assert "rewards[mine].path:" in said
    assert "ends.py:2: loading the file ends the process (SystemExit: 0)" in said


def test_prompts_longer_than_the_model_takes_are_refused(good: RunFile) -> None:
    said = refused(good, "data.max_prompt_tokens=600", "trainer.max_tokens_per_micro_batch=1000")
    assert "data.max_prompt_tokens + rollout.max_response_tokens is 608" in said


def test_a_run_folder_that_cannot_be_made_is_named(good: RunFile, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    said = refused(good, f"run.dir={blocker}/run", run_dir=blocker / "run")
    assert f"{blocker}/run: cannot be used as a folder of the run" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small filesystem needs root")
def test_a_full_disk_is_named_and_leaves_nothing_torn(good: RunFile, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=True)
    try:
        (disk / "filler").write_bytes(b"x" * 20480)  # room for the config, not for what follows
        done = yatt("run", str(good.folder / "run.yaml"), f"run.dir={disk}/run")
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        left = [p for p in (disk / "run").rglob("*") if p.is_file()]
        assert not [p for p in left if p.name.startswith(".")], "temporary files are gone"
        load_resolved(disk / "run" / "config.yaml")  # what is there is whole
    finally:
        subprocess.run(["umount", disk], check=True)


def test_another_config_for_the_same_run_folder_is_refused(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 1}})
    file = str(run.write())
    assert yatt("run", file).returncode == 0
    done = yatt("run", file, "optimizer.lr=5.0e-4")
    assert done.returncode == 2
    assert "optimizer.lr: was 0.001, is 0.0005" in done.stderr
    assert "yatt resume" in done.stderr
    assert yatt("run", file).returncode == 0, "a finished run exits 0 at once"


RAISES_SOMETIMES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "a" in solution_str:
        raise ValueError("I do not like the letter a")
    return float(len(solution_str))
"""


def test_a_reward_that_raises_on_some_samples_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 2}, "algorithm": {"filter_groups": True}})
    file = run.write()
    (tmp_path / "reward.py").write_text(RAISES_SOMETIMES)
    done = yatt("run", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(run.run_dir / "metrics.jsonl")
    assert sum(row.get("reward/digits/failed", 0) for row in written) > 0
    assert all(row["rollout/groups"] == 4 for row in written), "failed groups were replaced, not trained on"
    reasons = [e["reason"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "rollout.group.drop"]
    assert any("reward.py:4" in reason and "I do not like the letter a" in reason for reason in reasons)


def test_a_reward_that_always_raises_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 2}})
    file = run.write()
    (tmp_path / "reward.py").write_text("def compute_score(*a, **k):\n    return 1 / 0\n")
    done = yatt("run", str(file))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "prompt groups all failed" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert living(run.run_dir) == {}


def test_a_dataset_of_which_no_prompt_fits_is_refused_before_anything_starts(good: RunFile) -> None:
    said = refused(good, "data.max_prompt_tokens=1")
    assert "data.max_prompt_tokens: every prompt of " in said and "longer than 1 tokens; raise it" in said


def test_a_genrm_whose_verdicts_cannot_be_read_is_counted(tmp_path: Path) -> None:
    judge = make_scripted_model(tmp_path / "judge", mean_tokens=3)
    section = {"name": "judge", "model": judge, "template": "{completion}", "engine": "scripted",
               "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}},
               "on_unparsable": "score", "unparsable_score": -1.0, "max_model_tokens": 64}  # fmt: skip
    run = RunFile(tmp_path, {"genrms": [section], "trainer": {"total_iterations": 1}})
    (Path(judge) / "model.safetensors").write_bytes(b"")
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    row = rows(run.run_dir / "metrics.jsonl")[-1]
    asked, unread = row["genrm/judge/asked"], row["genrm/judge/unparsable"]
    assert unread > 0
    assert asked > 16, "an unreadable verdict is asked for once more"


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """Ports are chosen by the kernel, sockets and memory folders are named by run: nothing to collide."""
    first, second = (RunFile(tmp_path / name, {"trainer": {"total_iterations": 1}}) for name in "ab")
    file = str(second.write())
    other = start("run", str(first.write()))
    try:
        assert yatt("run", file).returncode == 0
        output, _ = other.communicate(timeout=300)
        assert other.returncode == 0, output
    finally:
        if other.poll() is None:
            other.kill()
            other.communicate()


def test_status_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for words in (["status"], ["watch"], ["report"], ["resume"]):
        done = yatt(*words, str(tmp_path))
        assert done.returncode == 2, words
        assert "not a run folder" in done.stderr
