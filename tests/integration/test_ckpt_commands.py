"""`yatt ckpt` and `yatt convert` as they are typed: what they print, and with which code they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from tests.conftest import BUCKET
from tests.runs import HANG_S, RunFile, environment, rows, yatt
from tests.saved_weights import save, saved_run, tensors_in
from yatt.adapters.processes.process import Identity
from yatt.adapters.run_folder.ledger import STARTED, write_record
from yatt.checkpoint.store.store import open_store
from yatt.cli.main import main
from yatt.launch.folder.known import known_file
from yatt.paths import RunPaths

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Types a command; gives its exit code, output and errors."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def type_(*words):
        monkeypatch.setattr(sys, "argv", ["yatt", *map(str, words)])
        try:
            code = main()
        except SystemExit as end:  # argparse
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return type_


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path / "run")


def iterations_of(run: RunFile) -> list[int]:
    return sorted(int(path.name[:8]) for path in (run.run_dir / "checkpoints" / "manifests").iterdir())


def damage(run: RunFile, iteration: int) -> str:
    (file,) = (run.run_dir / "checkpoints" / f"global_step_{iteration}").glob("*/rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return f"{file.parent.parent.name}/{file.parent.name}/{file.name}"


def test_list_names_the_checkpoint_that_a_resume_takes(run, typed):
    event = {"kind": "ckpt.commit", "wall": "2020-01-01T00:00:00.000+00:00", "attempt": 1, "node": "node0",
             "role": "leader", "mono_ns": 1, "iteration": 4, "size_bytes": 1}  # fmt: skip
    (run.run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    (file,) = (run.run_dir / "checkpoints" / "global_step_3").glob("*/rank-00000.safetensors")
    file.unlink()
    code, out, _ = typed("ckpt", "list", run.run_dir)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["ITERATION", "ATTEMPT", "SIZE", "AGE", "STATE"]
    assert lines[1].split()[0] == "4"
    assert lines[1].endswith("whole, resumed next")
    assert lines[2].endswith("rank-00000.safetensors is missing")
    code, out, _ = typed("ckpt", "list", run.run_dir, "--json")
    listed = json.loads(out)["checkpoints"]
    assert [(each["iteration"], each["state"]) for each in listed] == [
        (4, "whole"), (3, "damaged"), (2, "whole"), (1, "whole")
    ]  # fmt: skip
    assert [each["is_next"] for each in listed] == [True, False, False, False]
    assert listed[0]["age_s"] is None or listed[0]["age_s"] > 1e8


def test_verify_ends_with_1_if_anything_is_damaged(run, typed):
    assert typed("ckpt", "verify", run.run_dir)[0] == 0
    path = damage(run, 3)
    code, out, err = typed("ckpt", "verify", run.run_dir)
    assert (code, err) == (1, "")
    assert "iteration 4 of attempt 1: whole" in out
    assert "iteration 3 of attempt 1: DAMAGED in 1 place" in out
    assert f"  {path}: exp_avg." in out
    assert typed("ckpt", "verify", run.run_dir, 4)[0] == 0
    code, out, _ = typed("ckpt", "verify", run.run_dir, 3, "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert (code, found["is_whole"], found["damages"][0]["path"]) == (1, False, path)


def test_export_and_convert_write_the_same_folder(run, typed, tmp_path):
    code, out, err = typed("ckpt", "export", run.run_dir, 3, tmp_path / "hf")
    assert (code, out, err) == (0, f"{tmp_path / 'hf'}: the weights of iteration 3, in float32\n", "")
    assert typed("convert", run.run_dir, tmp_path / "hf2")[0] == 0
    wanted = tensors_in(run.folder / "policy")
    for name in ("hf", "hf2"):
        got = tensors_in(tmp_path / name)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)
        assert (tmp_path / name / "tokenizer.json").is_file()


def test_prune_applies_the_rules_by_hand(run, typed):
    code, out, _ = typed("ckpt", "prune", run.run_dir, "--dry-run")
    assert (code, out) == (
        0,
        "would delete iteration 1 of attempt 1\nwould delete iteration 2 of attempt 1\n",
    )
    assert iterations_of(run) == [1, 2, 3, 4]
    best = ("--keep-best", 1, "--best-metric", "critic/rewards/mean")
    code, out, _ = typed("ckpt", "prune", run.run_dir, "--keep", 1, *best)
    assert (code, out.count("deleted")) == (0, 2)
    assert iterations_of(run) == [2, 4]
    assert typed("ckpt", "prune", run.run_dir, "--keep", 3)[1] == "no checkpoint to delete\n"


def test_prune_never_takes_the_newest_whole_checkpoint(run, typed):
    for iteration in (3, 4):
        shutil.rmtree(run.run_dir / "checkpoints" / f"global_step_{iteration}")
    assert typed("ckpt", "prune", run.run_dir, "--keep", 1)[0] == 0
    assert iterations_of(run) == [2, 3, 4]
    shutil.rmtree(run.run_dir / "checkpoints" / "global_step_2")
    typed("ckpt", "prune", run.run_dir, "--keep", 1)
    assert iterations_of(run) == [2, 3, 4], "nothing whole is left"


def test_prune_refuses_a_run_that_is_active(run, typed):
    paths = RunPaths(run.run_dir)
    (paths.claims / "000002").write_text("claimed")
    write_record(paths, 2, STARTED, {"launcher": asdict(Identity.of(os.getpid())), "host": "here"})
    code, _, err = typed("ckpt", "prune", run.run_dir)
    assert code == 2
    assert "attempt 2 of this run is active" in err
    assert "Nothing was deleted" in err
    assert iterations_of(run) == [1, 2, 3, 4]


def test_prune_keeps_what_another_run_has_started_from(run, typed, tmp_path):
    url = str(run.run_dir / "checkpoints")
    other = saved_run(
        tmp_path / "other", iterations=(), run={"from_checkpoint": {"url": url, "iteration": 2}}
    )
    known_file().parent.mkdir(parents=True)
    known_file().write_text(f"{other.run_dir}\n")
    assert typed("ckpt", "prune", run.run_dir, "--keep", 1)[0] == 0
    assert iterations_of(run) == [2, 4], "the other run has no checkpoint of its own yet"
    store = open_store(str(other.run_dir / "checkpoints"), {})
    save(
        store, other.folder / "policy", run_id=(other.run_dir / "checkpoints" / "run_id").read_text().strip()
    )
    assert typed("ckpt", "prune", run.run_dir, "--keep", 1)[0] == 0
    assert iterations_of(run) == [4]


def test_copy_to_s3_and_back_from_the_url_alone(run, typed, tmp_path, s3_endpoint):
    url = f"s3://{BUCKET}/{tmp_path.name}"
    options = {"endpoint_url": s3_endpoint}
    to, of = (
        [w for k, v in options.items() for w in (flag, f"{k}={v}")] for flag in ("--to-option", "--option")
    )
    code, out, _ = typed("ckpt", "copy", run.run_dir, url, 3, *to)
    assert (code, out) == (0, f"{url}: iteration 3 copied\n")
    assert typed("ckpt", "copy", run.run_dir, url, 3, *to)[1] == f"{url}: iteration 3 was there already\n"
    assert typed("ckpt", "verify", url, "--store", *of)[0] == 0
    model = ("--model", run.folder / "policy")
    assert typed("convert", url, tmp_path / "hf", *model, *of)[0] == 0
    got, wanted = tensors_in(tmp_path / "hf"), tensors_in(run.folder / "policy")
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    code, _, err = typed("convert", url, tmp_path / "hf2", *of)
    assert code == 2
    assert "add --model FOLDER" in err


def test_a_run_whose_checkpoints_are_in_s3(typed, tmp_path, s3_endpoint):
    options = {"endpoint_url": s3_endpoint}
    checkpoint = {"url": f"s3://{BUCKET}/{tmp_path.name}", "storage_options": options, "keep": 1}
    run = saved_run(tmp_path / "run", iterations=(1, 2), checkpoint=checkpoint)
    assert typed("ckpt", "verify", run.run_dir)[0] == 0
    assert typed("ckpt", "prune", run.run_dir)[1] == "deleted iteration 1 of attempt 1\n"
    assert typed("ckpt", "export", run.run_dir, tmp_path / "hf")[0] == 0
    code, out, _ = typed("ckpt", "list", run.run_dir, "--json")
    assert code == 0
    assert [each["iteration"] for each in json.loads(out)["checkpoints"]] == [2]
    assert "secret" not in out


MISTAKES = {
    "no run": (["ckpt", "list", "{tmp}"], "is not a run folder: it has no config.yaml"),
    "a store": (["ckpt", "list", "{run}/checkpoints"], "for a checkpoint store add --store"),
    "no such iteration": (["ckpt", "verify", "{run}", "9"], "there is none; write one of 4, 3, 2, 1"),
    "an empty store": (["ckpt", "verify", "--store", "{tmp}/empty"], "has no committed checkpoint"),
    "target exists": (["ckpt", "export", "{run}", "{run}"], "exists already and is not an empty folder"),
    "no parent": (["convert", "{run}", "{tmp}/no/hf"], "there is no folder"),
    "not a model": (["ckpt", "export", "{run}", "{tmp}/hf", "--model", "{tmp}"], "has no config.json"),
    "unknown driver": (["ckpt", "copy", "{run}", "nosuch://x"], "nosuch"),
    "bad option": (["ckpt", "list", "--store", "{run}/checkpoints", "--option", "key"], "write KEY=VALUE"),
    "option of a run": (["ckpt", "list", "{run}", "--option", "a=b"], "its config"),
    "keep nothing": (["ckpt", "prune", "{run}", "--keep", "0"], "--keep is 1 or more"),
    "no metric": (["ckpt", "prune", "{run}", "--keep-best", "2"], "best_metric is empty"),
    "both directions": (["convert", "{run}", "{tmp}/x", "--to-checkpoint", "{tmp}/y"], "either a new FOLDER"),
    "a model as a source": (["convert", "{model}", "{tmp}/x"], "add --to-checkpoint URL"),
    "a store in use": (["convert", "{model}", "--to-checkpoint", "{run}/checkpoints"], "of a run already"),
    "bad id": (["convert", "{model}", "--to-checkpoint", "{tmp}/y", "--run-id", "a/b"], "--run-id may have"),
    "no command": (["ckpt"], "required"),
}  # fmt: skip


def test_mistakes_of_the_user_end_with_2_and_one_sentence(run, typed, tmp_path):
    places = {"tmp": tmp_path, "run": run.run_dir, "model": run.folder / "policy"}
    for name, (words, sentence) in MISTAKES.items():
        code, _, err = typed(*(word.format(**places) for word in words))
        assert (code, sentence in err) == (2, True), (name, code, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_is_not_the_users_mistake_ends_with_1(run, typed, tmp_path):
    for iteration in (1, 2, 3, 4):
        damage(run, iteration)
    code, _, err = typed("ckpt", "copy", run.run_dir, tmp_path / "copy")
    assert (code, "is not what was saved" in err) == (1, True)
    shutil.rmtree(run.run_dir / "checkpoints" / "global_step_4")
    code, _, err = typed("ckpt", "export", run.run_dir, 4, tmp_path / "hf")
    assert (code, "is not there" in err or "No such file" in err) == (1, True), err
    for path in (run.run_dir / "checkpoints").glob("global_step_*"):
        shutil.rmtree(path)
    code, _, err = typed("ckpt", "export", run.run_dir, tmp_path / "hf")
    assert (code, "has no whole checkpoint" in err) == (1, True)
    shutil.rmtree(run.run_dir / "checkpoints")
    for words in (["list"], ["verify"], ["prune"]):
        code, _, err = typed("ckpt", *words, run.run_dir)
        assert (code, "Is the store mounted here?" in err) == (1, True), err
    assert not (tmp_path / "hf").exists()
    assert not list((tmp_path / "copy").glob("manifests/*"))


@pytest.mark.faults
@pytest.mark.parametrize(
    "words", [["prune", "--keep", "1"], ["copy", "COPY", "4"]], ids=lambda words: words[0]
)
def test_a_killed_command_is_completed_by_the_next_one(run, typed, tmp_path, words):
    """The process is killed before its n-th change of the store's files, for some n."""
    command = [words[0], str(run.run_dir), *(str(tmp_path / "copy") if w == "COPY" else w for w in words[1:])]
    codes = []
    for number in (1, 3, 6, 10):
        env = {**environment(), "XDG_STATE_HOME": str(tmp_path / "state")}
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(number), "ckpt", *command], env=env, timeout=HANG_S,
            check=False, capture_output=True,
        )  # fmt: skip
        codes.append(done.returncode)
        assert done.returncode in (-signal.SIGKILL, 0), done.stderr
        assert typed("ckpt", "verify", run.run_dir)[0] == 0
    assert codes[:2] == [-signal.SIGKILL] * 2
    assert typed("ckpt", *command)[0] == 0
    if words[0] == "prune":
        assert iterations_of(run) == [4]
        left = [path.name for path in (run.run_dir / "checkpoints").glob("global_step_*")]
        assert left == ["global_step_4"]
    else:
        assert typed("ckpt", "verify", "--store", tmp_path / "copy")[0] == 0


KILLED = """
import os, signal, sys
from yatt.cli.main import main
left = int(sys.argv.pop(1))
def counted(event, arguments):
    global left
    at = str(arguments[0]) if arguments else ""
    is_change = event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link")
    if is_change and ("global_step" in at or "manifests" in at):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(counted)
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_start_from_a_copied_checkpoint_and_from_an_imported_folder(tmp_path, dtype):
    """With a learning rate of 0 the weights stay where they started."""
    first = saved_run(tmp_path / "first", iterations=(1,))
    source = first.run_dir
    if dtype == "float32":
        done = yatt("ckpt", "copy", str(source), str(tmp_path / "store"))
    else:
        policy = str(first.folder / "policy")
        done = yatt("convert", policy, "--to-checkpoint", str(tmp_path / "store"), "--run-id", "imported")
    assert done.returncode == 0, done.stderr
    other = RunFile(
        tmp_path / "second",
        {
            "run": {"from_checkpoint": {"url": str(tmp_path / "store")}}, "launch": {"nodes": 1},
            "model": {"dtype": dtype}, "optimizer": {"lr": 0.0}, "trainer": {"total_iterations": 2},
            "checkpoint": {"keep_best": 1, "best_metric": "critic/rewards/mean", "save_every": 1, "keep": 1},
        },
    )  # fmt: skip
    other.folder.mkdir()
    from tests.tiny_models import make_qwen3

    make_qwen3(other.folder / "policy", tied=True, seed=5)  # other weights, the same shape
    done = yatt("run", str(other.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = tensors_in(first.folder / "policy")
    trained = tensors_in(other.run_dir / "model")
    exported = yatt("ckpt", "export", str(other.run_dir), str(tmp_path / "hf"))
    assert exported.returncode == 0, exported.stderr
    got = tensors_in(tmp_path / "hf")
    for name, tensor in wanted.items():
        assert torch.equal(trained[name], tensor.to(getattr(torch, dtype))), name
        assert torch.equal(got[name], trained[name]), "the same as the trainer's own export"
    assert rows(other.run_dir / "events.jsonl")
