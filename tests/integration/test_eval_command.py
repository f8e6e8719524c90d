"""`yatt eval` as a user types it, with real engines, real functions that misbehave, and real kills."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import HANG_S, RunFile, command, environment, kill, popen, rows, wait_for, yatt
from tests.tiny_models import make_qwen3
from tests.unit.adapters.test_judge_api import Service, says
from yatt.adapters.processes.process import Identity

pytestmark = pytest.mark.slow

SMALL = {"kv_cache_bytes": 32 << 20, "enforce_eager": True}
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """How many letters of the first half of the alphabet."""
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
'''


class Evaluation:
    """A model, data, a reward function and a folder for sockets of its own."""

    def __init__(self, folder: Path, reward: str = REWARD, prompts: int = 6) -> None:
        self.folder, self.model = folder, folder / "policy"
        make_qwen3(self.model, tied=True, seed=0)
        self.data = folder / "test.jsonl"
        listed = [
            {"prompt": f"{i} plus {i % 7} is", "data_source": "odd" if i % 2 else "even",
             "reward_model": {"ground_truth": str(i + i % 7)}}
            for i in range(prompts)
        ]  # fmt: skip
        self.data.write_text("".join(json.dumps(row) + "\n" for row in listed))
        (folder / "reward.py").write_text(reward)
        self.scratch = RunFile(folder).scratch
        self.out = folder / "out"

    @property
    def own(self) -> str:
        """The file of functions."""
        return str(self.folder / "reward.py")

    def words(
        self, *more: str, engine: str = "transformers", like: dict[str, Any] | None = None
    ) -> list[str]:
        scores = ["--reward", self.own] if like is None else ["--like", str(self.like(like))]
        return [
            "eval", str(self.model), str(self.data), *scores, "--max-tokens", "8", "--device", "cpu",
            "--out", str(self.out), "model.dtype=float32", "data.max_prompt_tokens=32",
            f"rollout.engine={engine}", "rollout.enforce_eager=true", f"rollout.kv_cache_bytes={32 << 20}",
            f"launch.scratch_dir={self.scratch}", "launch.reward_processes=1", *more,
        ]  # fmt: skip

    def like(self, sections: dict[str, Any]) -> Path:
        """A run file with these sections."""
        path = self.folder / "like.yaml"
        path.write_text(yaml.safe_dump({
            "run": {"dir": str(self.folder / "none")}, "model": {"path": str(self.model)},
            "data": {"train_files": [str(self.data)]}, "optimizer": {"lr": 0.1},
            "trainer": {"total_iterations": 1, "train_batch_size": 1, "mini_batch_size": 1}, **sections,
        }))  # fmt: skip
        return path

    def run(self, *more: str, engine: str = "transformers", code: int = 0) -> str:
        done = yatt(*self.words(*more, engine=engine))
        assert done.returncode == code, done.stdout + done.stderr
        assert self.leftovers() == []
        return done.stdout + done.stderr

    def leftovers(self) -> list[str]:
        return [path.name for path in self.scratch.glob("yatt-*")]

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "samples.jsonl").read_text().splitlines()]

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return found


def greedy(model: Path, prompts: list[str], max_tokens: int) -> list[str]:
    """What transformers itself completes, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        done = policy.generate(ids, max_new_tokens=max_tokens, do_sample=False)
        texts.append(tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


ROWS = """
def map_row(row):
    return {**row, "prompt": f"mapped {row['prompt']}"}
"""


@pytest.mark.parametrize("is_of_hub", [False, True], ids=["a file", "the hub"])
def test_rows_are_fetched_and_mapped_as_a_run_does(
    tmp_path: Path, is_of_hub: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Evaluation(tmp_path)
    (tmp_path / "rows.py").write_text(ROWS)
    section = {"train_files": [str(one.data)], "weights": {str(one.data): 2.0}, "map": f"{tmp_path}/rows.py"}
    words = one.words(
        "--temperature", "0", like={"data": section, "rewards": [{"name": "r", "path": one.own}]}
    )
    entry = str(one.data)
    if is_of_hub:
        pytest.importorskip("datasets")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        (tmp_path / "repository").mkdir()
        one.data.rename(tmp_path / "repository/test.jsonl")
        entry = f"hf:{tmp_path}/repository:test"
        one.data.write_text("")
    words[2] = entry
    done = yatt(*words)
    assert done.returncode == 0, done.stderr
    assert [each["prompt"] for each in one.samples()][:2] == ["mapped 0 plus 0 is", "mapped 1 plus 1 is"]
    assert one.result()["data"] == [entry] and one.leftovers() == []


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_greedy_samples_are_those_of_transformers_and_the_mean_is_that_by_hand(
    tmp_path: Path, engine: str
) -> None:
    one = Evaluation(tmp_path)
    printed = one.run("--temperature", "0", "--json", engine=engine)
    samples = one.samples()
    assert [each["completion"] for each in samples] == greedy(one.model, [s["prompt"] for s in samples], 8)
    by_hand = [sum(c in "abcdefghijklm" for c in each["completion"]) / 8 for each in samples]
    assert [each["scores"]["reward"] for each in samples] == by_hand
    result = json.loads(printed.splitlines()[0])
    assert result == one.result()
    assert result["overall"]["rewards"]["reward"]["mean"] == pytest.approx(sum(by_hand) / len(by_hand))
    assert result["sources"]["even"]["prompts"] == 3 and result["settings"]["n"] == 1


def test_an_evaluation_repeated_is_equal_in_deterministic_mode_and_another_seed_is_not(
    tmp_path: Path,
) -> None:
    found = []
    for index, seed in enumerate((3, 3, 4)):
        (tmp_path / str(index)).mkdir()
        one = Evaluation(tmp_path / str(index))
        one.run("--n", "3", "--seed", str(seed), "run.deterministic=true")
        found.append([(s["prompt_number"], s["sample_number"], s["completion"]) for s in one.samples()])
    assert found[0] == found[1]
    assert found[0] != found[2]


BAD_REWARD = '''
import ctypes, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """One prompt hangs, one crashes the process, one raises; the others have a score."""
    number = int(ground_truth)
    if number == 4:
        time.sleep(3600)
    if number == 6:
        ctypes.string_at(0)
    if number == 8:
        raise ValueError("no score for this one")
    return 0.5
'''


def test_calls_that_hang_crash_or_raise_cost_their_own_samples(tmp_path: Path) -> None:
    one = Evaluation(tmp_path, BAD_REWARD)
    rewards = [
        {"name": "bad", "path": one.own, "timeout_s": 10.0}, {"name": "exact", "path": "builtin:exact"},
    ]  # fmt: skip
    done = yatt(*one.words(like={"rollout": {"n": 2}, "rewards": rewards}))
    assert done.returncode == 0, done.stdout + done.stderr
    truths = {s["ground_truth"]: s for s in one.samples()}
    assert "took longer than its timeout_s 10" in truths["4"]["no_score"]["bad"]
    assert "ended its process each time" in truths["6"]["no_score"]["bad"]
    assert "ValueError: no score for this one" in truths["8"]["no_score"]["bad"]
    assert {t for t, s in truths.items() if s["scores"].get("bad") == 0.5} == {"0", "2", "10"}
    assert all("exact" in sample["scores"] for sample in truths.values()), "other scores are not lost"
    bad = one.result()["overall"]["rewards"]["bad"]
    assert (bad["mean"], bad["scored"], bad["failed"]) == (0.5, 6, 6)
    assert "6 samples without a score of 'bad'; the first:" in done.stderr
    assert one.leftovers() == []


FUNCTIONS = """
def step(text, episode):
    return "go on"

def trl(prompts, completions, **columns):
    assert len(completions) == 3, "the whole group"
    return [float(rank) for rank, _ in enumerate(completions)]

async def ask(data_source, solution_str, ground_truth, extra_info, prompt, client):
    return 1.0 if await client.complete("is it right? " + solution_str) else 0.0
"""


def test_environments_group_functions_and_genrm_clients_work_on_several_engines(tmp_path: Path) -> None:
    one = Evaluation(tmp_path, FUNCTIONS)
    make_qwen3(tmp_path / "judge", tied=True, seed=1)
    like = {
        "rollout": {"n": 3}, "environment": {"path": one.own, "max_turns": 2},
        "rewards": [{"name": "ranks", "path": one.own, "function": "trl", "style": "trl"}],
        "genrms": [{"name": "asked", "model": str(tmp_path / "judge"), "engine": "scripted",
                    "path": one.own, "function": "ask", "max_tokens": 4}],
    }  # fmt: skip
    words = one.words("--max-tokens", "64", "launch.gpus_per_node=2", engine="scripted", like=like)
    done = yatt(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = one.samples()
    assert [s["scores"]["ranks"] for s in samples] == [0.0, 1.0, 2.0] * 6
    assert all(s["scores"]["asked"] == 1.0 for s in samples)
    assert any("\n\n" in s["completion"] for s in samples), "two turns of the policy"
    assert one.result()["overall"]["rewards"]["ranks"]["mean"] == 1.0
    assert one.leftovers() == []


def children(pid: int, module: str) -> list[int]:
    """Descendants that run this module."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += children(child, module)
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found += [child] if module.encode() in words else []
    return found


SLOW_ENGINE = ("--n", "64", "rollout.max_num_seqs=4")


def begun(one: Evaluation, *more: str, **how: Any) -> "subprocess.Popen[str]":
    return popen(
        command(*one.words(*more, **how)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def engine_of(process: "subprocess.Popen[str]") -> list[int]:
    try:
        return children(process.pid, "yatt.rollout")
    except OSError:
        return []


NOTED_REWARD = """
import pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pathlib.Path(__file__).with_name("scored").touch()
    return 0.5
"""


@pytest.mark.faults
def test_a_killed_engine_is_started_again_and_changes_no_result(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    calm = Evaluation(tmp_path / "calm")
    calm.run(*SLOW_ENGINE, "run.deterministic=true")
    (tmp_path / "killed").mkdir()
    killed = Evaluation(tmp_path / "killed", NOTED_REWARD)
    process = begun(killed, *SLOW_ENGINE, "run.deterministic=true")
    try:
        wait_for((tmp_path / "killed/scored").exists, timeout_s=60, what="a sample")
        assert kill(engine_of(process)[0])
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "it is started again" in errors
    assert [s["completion"] for s in killed.samples()] == [s["completion"] for s in calm.samples()]
    assert killed.leftovers() == []


@pytest.mark.faults
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_every_process_and_leaves_nothing(tmp_path: Path, times: int) -> None:
    """The second time while processes are ended because of the first."""
    one = Evaluation(tmp_path)
    process = begun(one, *SLOW_ENGINE)
    try:
        wait_for(lambda: bool(engine_of(process)), timeout_s=60, what="an engine")
        engines = engine_of(process)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.03)
        process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130
    # The second signal ends the wait for them; they end with their parent, which takes a moment.
    assert times > 1 or not any(map(Identity.of, engines)), "they were waited for"
    is_ended = lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines)  # noqa: E731
    wait_for(is_ended, what="the engines to end")
    assert one.leftovers() == [] and not one.out.exists()


LATE_SIGNAL = """
import os, signal, sys
from yatt.cli.main import main
from yatt.launch.attempt.on_this_machine import LocalBackend

tidy, number = LocalBackend._tidy, getattr(signal, sys.argv.pop())

def late(self, *arguments):
    os.kill(os.getpid(), number)
    tidy(self, *arguments)

LocalBackend._tidy = late
sys.exit(main())
"""


@pytest.mark.faults
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 1)])
def test_a_signal_while_the_processes_are_ended_is_no_success(tmp_path: Path, name: str, code: int) -> None:
    one = Evaluation(tmp_path)
    words = [sys.executable, "-c", LATE_SIGNAL, *one.words(engine="scripted"), name]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == ("" if name == "SIGINT" else "yatt: ended by SIGTERM\n")
    assert one.leftovers() == [] and not one.out.exists()


FULL_DISK = """
import errno, os, signal, sys
from yatt.cli.main import main
from yatt.evaluation.evaluate import _Story
from yatt.launch.attempt import attempts

def told(self):
    os.kill(os.getpid(), signal.SIGTERM) if not self.signals else None

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

_Story.show, attempts.write_record = told, full
sys.exit(main())
"""


@pytest.mark.faults
def test_one_signal_ends_an_evaluation_whose_disk_is_full(tmp_path: Path) -> None:
    """A run waits for its disk, and saves then; an evaluation has nothing to save."""
    one = Evaluation(tmp_path)
    words = [sys.executable, "-c", FULL_DISK, *one.words(engine="scripted")]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "yatt: ended by SIGTERM\n")
    assert one.leftovers() == [] and not one.out.exists()


def test_a_reader_that_closes_its_pipe_costs_no_file(tmp_path: Path) -> None:
    """A whole run: its output is that of the command, in whose process nothing else can be looked at."""
    one = Evaluation(tmp_path)
    process = begun(one, engine="scripted")
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors
    assert len(one.samples()) == 6 and one.result()["overall"]["samples"] == 6
    assert one.leftovers() == []


@pytest.mark.faults
def test_a_signal_before_any_engine_leaves_nothing(tmp_path: Path) -> None:
    one = Evaluation(tmp_path)
    (tmp_path / "rows.py").write_text("import time\ndef map_row(row):\n    time.sleep(3600)\n")
    section = {"train_files": [str(one.data)], "map": f"{tmp_path}/rows.py"}
    like = {"data": section, "rewards": [{"name": "r", "path": one.own}]}
    process = popen(command(*one.words(like=like)), env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: any(one.scratch.glob("yatt-*/made")), timeout_s=60, what="rows in the making")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 1 and said.endswith("yatt: ended by SIGTERM\n")
    assert one.leftovers() == []


@pytest.mark.faults
def test_a_killed_evaluation_takes_its_processes_with_it_and_clean_removes_the_folder(
    tmp_path: Path,
) -> None:
    one = Evaluation(tmp_path)
    process = begun(one, *SLOW_ENGINE)
    wait_for(lambda: bool(engine_of(process)), timeout_s=60, what="an engine")
    engines = engine_of(process)
    process.kill()
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), what="their end")
    assert one.leftovers() != []
    assert yatt("clean", str(one.scratch)).returncode == 0
    assert one.leftovers() == []


def test_an_engine_that_cannot_run_ends_the_evaluation_with_its_own_words(tmp_path: Path) -> None:
    one = Evaluation(tmp_path)
    config = json.loads((one.model / "config.json").read_text())
    (one.model / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    said = one.run(code=1)
    assert "rollout-n0s0: RuntimeError: You set" in said and "it is started again" in said
    assert "ignore_mismatched_sizes" in said.splitlines()[-1], "the last line of the log"
    assert not one.out.exists()


def test_functions_that_never_work_are_told_and_end_in_a_failure(tmp_path: Path) -> None:
    one = Evaluation(tmp_path, "def compute_score(*_, **__):\n    raise KeyError('never')\n")
    said = one.run(engine="scripted", code=1)
    assert "6 samples without a score of 'reward'; the first: reward 'reward', prompt 0, sample 0" in said
    assert "KeyError: 'never'" in said
    assert one.result()["overall"]["rewards"]["reward"]["mean"] is None


def test_mistakes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    one = Evaluation(tmp_path)
    (tmp_path / "empty").mkdir()
    for words, says_so in (
        (["eval", str(tmp_path / "none")], "is neither a run nor a model folder: there is no such folder"),
        (["eval", str(tmp_path / "empty")], "is neither a run folder"),
        (one.words("--iteration", "3"), "--iteration: "),
        (one.words("--k", "1,x"), "--k 1,x: write numbers"),
        (one.words("--max-tokens", "0"), "--max-tokens: write 1 or more"),
        (one.words("--out", "/proc/result"), "--out /proc/result: nothing can be written in /proc"),
        (one.words("rollout.topp=1"), "rollout.topp"),
        (one.words(str(tmp_path / "missing.jsonl")), "missing.jsonl"),
        ([*one.words(), "--reward", "builtin:nothing"], "no built-in 'nothing'"),
    ):
        done = yatt(*words)
        assert done.returncode == 2, (words, done.stdout + done.stderr)
        assert says_so in done.stderr, (words, done.stderr)
        assert not one.out.exists() and one.leftovers() == []


def test_the_mean_is_that_of_the_runs_own_validation(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    listed = [{"prompt": f"{i} minus {i % 5} is", "data_source": "minus"} for i in range(5)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in listed))
    run = RunFile(tmp_path, {
        "rollout": {"engine": "transformers"}, "data": {"val_files": [str(held_out)]},
        "validation": {"reward": "digits", "n": 4}, "trainer": {"total_iterations": 2},
    })  # fmt: skip
    assert yatt("run", str(run.write())).returncode == 0
    last = rows(run.run_dir / "metrics.jsonl")[-1]
    (validated,) = (value for key, value in last.items() if key.endswith("/mean@4"))
    found = yatt("eval", str(run.run_dir), "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["overall"]["rewards"]["digits"]["mean"] == pytest.approx(validated)
    exported = yatt("eval", str(run.run_dir), "--iteration", "2", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["overall"] == json.loads(found.stdout)["overall"]


def test_a_run_is_evaluated_by_its_checkpoint_and_its_judges(tmp_path: Path) -> None:
    service = Service(lambda _: says("I think it is fine. score: 1"))
    judge = {
        "name": "judge", "model": make_qwen3(tmp_path / "judge", tied=False, seed=1), "dtype": "float32",
        "template": "{prompt}{completion_a}{completion_b}", "judging": {"by": "pairwise"}, "max_tokens": 6,
        "verdict": {"pattern": "([a-z])", "scores": {"a": 1.0, "e": 0.0}}, "engine": "transformers",
        "on_unparsable": "score",
    }  # fmt: skip
    remote = {
        "name": "remote", "model": "m", "api": {"url": service.url}, "template": "{completion}",
        "verdict": {"pattern": "score: ([0-9])"},
    }  # fmt: skip
    run = RunFile(tmp_path, {
        "run": {"deterministic": False}, "rollout": {"engine": "transformers"},
        "genrms": [judge, remote], "trainer": {"total_iterations": 2}, "data": {"val_files": []},
    })  # fmt: skip
    file = run.write()
    held_out = tmp_path / "train.jsonl"
    try:
        trained = yatt("run", str(file))
        assert trained.returncode == 0, trained.stderr
        words = ["eval", str(run.run_dir), str(held_out), "--limit", "4", "--json"]
        last = yatt(*words, "--out", str(tmp_path / "last"))
        assert last.returncode == 0, last.stdout + last.stderr
        first = yatt(*words, "--iteration", "1", "--out", str(tmp_path / "first"))
        assert first.returncode == 0, first.stdout + first.stderr
    finally:
        service.close()
    newest, older = json.loads(last.stdout), json.loads(first.stdout)
    assert (newest["iteration"], older["iteration"]) == (2, 1)
    assert newest["source"] == older["source"] == str(run.run_dir)
    for result in (newest, older):
        rewards = result["overall"]["rewards"]
        assert rewards["remote"]["mean"] == 1.0 and rewards["remote"]["scored"] == 16
        assert rewards["judge"]["mean"] == pytest.approx(0.5), "wins and losses of a group cancel"
        assert rewards["digits"]["scored"] == 16 and result["settings"]["n"] == 4
    assert (tmp_path / "first/samples.jsonl").read_text() != (tmp_path / "last/samples.jsonl").read_text()
    assert run.leftovers() == []
