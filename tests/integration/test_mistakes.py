"""Fifty mistakes of a person, each with its message and its exit code, told before anything is started.

Each case runs in this process, and may use five seconds of CPU. Commands that start a run are also tried as
`yatt check`, which must say the same.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from yatt.cli.main import main
from yatt.config.load import load_run_config

MOST_CPU_S = 5.0


@dataclass(frozen=True)
class Mistake:
    """`words`: the command, with {run} for the run file, {dir} for a folder with files of this test, {done}
    for a run folder; `says`: a part of the message."""

    name: str
    words: str
    says: str
    code: int = 2


def run(name: str, words: str, says: str) -> Mistake:
    """Words after `yatt run RUN_FILE`."""
    return Mistake(name, f"run|{{run}}|{words}", says)


def judge(**changes: object) -> str:
    """`genrms` with one GenRM, whose keys are replaced."""
    section = {
        "name": "judge", "model": "{dir}/judge", "engine": "scripted", "max_model_tokens": 64,
        "template": "{completion}", "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}},
    }  # fmt: skip
    return f"genrms={json.dumps([section | changes])}"


MISTAKES = (
    # the command
    Mistake("command", "stauts|{done}", "there is no command 'stauts'. Did you mean 'status'?"),
    Mistake("option", "logs|{done}|--rol=x|--colour", "unrecognized arguments: --colour"),
    Mistake("no run file", "run|{dir}/none.yaml", "none.yaml: cannot be read (No such file or directory)"),
    Mistake("a folder", "run|{dir}", "is not a regular file"),
    Mistake("a model instead of a run", "status|{dir}/judge", "is not a run folder: it has no config.yaml"),
    Mistake("resume of nothing", "resume|{dir}", "is not a run folder"),
    Mistake("no site", "submit|{run}|--site|{dir}/site.yaml", "site.yaml: cannot be read"),
    Mistake(
        "take back a key",
        "resume|{done}|optimizer.lr=0.5",
        "(it decides what is trained, or which run this is)",
    ),
    Mistake(
        "overlay at resume", "resume|{done}|more.yaml", "write KEY=VALUE; overlay files are for new runs"
    ),
    Mistake("no checkpoint", "ckpt|export|{done}|77|{dir}/out", "has no committed checkpoint"),
    # YAML
    Mistake("no YAML", "run|{dir}/broken.yaml", "broken.yaml: not readable as YAML. Line 3"),
    Mistake("tab", "run|{dir}/tab.yaml", "Line 2"),
    Mistake("empty file", "run|{dir}/empty.yaml", "missing, and it has no default; write it"),
    Mistake("twice", "run|{dir}/twice.yaml", "key 'n' is written twice (first at"),
    run("1e-6", "optimizer.lr=1e-6", "'1e-6' is not a number. YAML reads 1e-6 as text; write 1.0e-06"),
    run("1e2", "trainer.total_iterations=1e2", "'1e2' is not a whole number. Write 100."),
    run("1.0e+02", "trainer.total_iterations=1.0e+02", "100.0 is not a whole number. Write 100."),
    run("an empty stop", "rollout.stop=['']", "rollout.stop[0]: '' is empty; delete it, or write"),
    run("no list", "data.train_files=x.jsonl", "is not a list. Write [x.jsonl]."),
    run("yes", "run.dir=yes", "YAML reads yes, no, on and off as true or false; put it in quotes."),
    run("no value", "rollout.n", "did you mean rollout.n=VALUE"),
    run("item", "rewards.7.weight=1", "rewards"),
    # keys and sizes
    run("section", "rolout.n=3", "rolout: no such key. Did you mean 'rollout'?"),
    run("key", "rollout.temprature=3", "no such key. Did you mean 'temperature'?"),
    run("range", "rollout.n=0", "rollout.n is 0; write"),
    run("sign", "optimizer.lr=-1.0e-6", "optimizer.lr is -1e-06; write"),
    run("mini-batch", "trainer.mini_batch_size=3", "mini_batch_size 3 does not divide train_batch_size 4"),
    run("one sample", "rollout.n=1", "rollout.n"),
    run("tensor parallel", "trainer.tensor_model_parallel_size=3", "tensor_model_parallel_size"),
    run(
        "pipeline",
        "trainer.pipeline_model_parallel_size=4",
        "context parallel = 4 does not divide the 2 GPUs",
    ),
    run("engine GPUs", "rollout.tp_size=2|launch.gpus_per_node=3", "rollout.tp_size: 2 does not divide"),
    run("no trainer node", "placement.mode=disaggregated", "placement.trainer_nodes: 0 of 2 nodes"),
    run("age", "rollout.ahead=1", "rollout.ahead"),
    run(
        "validation", "validation.reward=correct", "validation.reward: 'correct' is not the name of a reward"
    ),
    run(
        "nothing to learn",
        'rewards=[{"name": "a", "path": "builtin:exact", "weight": 0}]',
        "no reward has a weight",
    ),
    run(
        "two of a name",
        'rewards=[{"name":"a","path":"builtin:exact"},{"name":"a","path":"builtin:gsm8k"}]',
        "'a'",
    ),
    run("credential", "checkpoint.url=s3://me:hunter2@bucket/x", "contains a password or a signature"),
    run("secret option", 'checkpoint.storage_options={"secret": "hunter2"}', "is or contains a credential"),
    # models
    run("no model", "model.path=/nowhere/qwen", "model.path: there is no folder /nowhere/qwen"),
    run("no weights", "model.path={dir}/weightless", "has no *.safetensors"),
    run("cut weights", "model.path={dir}/cut", "cut/model.safetensors"),
    run("other architecture", "model.path={dir}/bert", "architecture BertModel cannot be trained"),
    run(
        "context",
        "data.max_prompt_tokens=600|trainer.max_tokens_per_micro_batch=1000",
        "takes 512 tokens at most",
    ),
    # data
    run("no data", "data.train_files=[/none.jsonl]", "/none.jsonl: no such data file"),
    run("column", "data.prompt_key=question", "has no prompt: column 'question' must be text"),
    run("no JSON", "data.train_files=[{dir}/cut.jsonl]", "row 2 is not JSON"),
    run("gzip", "data.train_files=[{dir}/rows.jsonl.gz]", "is compressed (gzip"),
    run("UTF-16", "data.train_files=[{dir}/utf16.jsonl]", "UTF-16; save it as UTF-8"),
    run("no rows", "data.train_files=[{dir}/none.jsonl]", "none.jsonl"),
    run(
        "no truth",
        "data.ground_truth_key=answer|" + 'rewards=[{"name":"a","path":"builtin:exact"}]',
        "no row of",
    ),
    run("all too long", "data.max_prompt_tokens=1", "is longer than 1 tokens; raise it."),
    # functions and judges
    run("no file", 'rewards=[{"name": "mine", "path": "/none.py"}]', "/none.py"),
    run(
        "no function",
        'rewards=[{"name": "mine", "path": "{dir}/mine.py", "function": "scor"}]',
        "no function 'scor'",
    ),
    run(
        "builtin",
        'rewards=[{"name": "mine", "path": "builtin:math"}]',
        "no built-in 'math'; there are exact, gsm8k",
    ),
    run("syntax", 'rewards=[{"name": "mine", "path": "{dir}/syntax.py"}]', "syntax.py"),
    run("arguments", 'rewards=[{"name": "mine", "path": "{dir}/arguments.py"}]', "arguments.py"),
    run("no completion", judge(template="{prompt}"), "{completion}"),
    run("chat", judge(model="{dir}/bare", chat=True), "has no chat template"),
    run("template field", judge(template="{prompt}{answer}"), "unknown field {answer}; known are"),
    run("pattern", judge(verdict={"pattern": "Y/N"}), "'Y/N' has no group"),
    run("regular expression", judge(verdict={"pattern": "([YN"}), "genrms[0].verdict.pattern"),
    run("no judge", judge(model="/nowhere/judge"), "genrms[0].model: there is no folder /nowhere/judge"),
    run("judge's context", judge(model="{policy}", max_model_tokens=4096), "takes 512 tokens at most"),
    # places
    run("other keys for a run", "run.dir={done}|optimizer.lr=0.5", "contains a run with another config:"),
    run("a file in the way", "run.dir={dir}/mine.py/run", "cannot be used as a folder of the run"),
    run("somebody's folder", "run.dir={dir}/judge", "is not a run folder and is not empty"),
    run("a disk for weights", "launch.shm_dir={dir}", "is not a memory filesystem"),
    run("an expired store", "run.from_checkpoint.url={dir}/judge", "has no committed checkpoint"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the table: a good run file, a run folder, and files with one mistake each."""
    root = tmp_path_factory.mktemp("mistakes")
    good = RunFile(root / "good")
    file, folder = good.write(), root / "dir"
    folder.mkdir()
    make_scripted_model(folder / "judge", mean_tokens=3)
    (folder / "judge" / "model.safetensors").write_bytes(b"")
    policy = good.folder / "policy"
    for name in ("weightless", "cut", "bert"):
        shutil.copytree(policy, folder / name)
    (folder / "weightless" / "model.safetensors").unlink()
    shutil.copytree(folder / "judge", folder / "bare")
    named = folder / "bare" / "tokenizer_config.json"
    settings = json.loads(named.read_text())
    del settings["chat_template"]
    named.write_text(json.dumps(settings))
    weights = (policy / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    config = json.loads((policy / "config.json").read_text())
    (folder / "bert" / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    row = json.dumps({"prompt": "1 plus 1 is"}) + "\n"
    (folder / "cut.jsonl").write_text(row + row[:9])
    (folder / "rows.jsonl.gz").write_bytes(b"\x1f\x8b\x08" + bytes(40))
    (folder / "utf16.jsonl").write_bytes(row.encode("utf-16"))
    (folder / "none.jsonl").write_text("\n")
    (folder / "broken.yaml").write_text("run: {dir: x}\ndata: [unclosed\n")
    (folder / "tab.yaml").write_text("run:\n\tdir: x\n")
    (folder / "empty.yaml").write_text("")
    (folder / "twice.yaml").write_text("rollout:\n  n: 4\n  n: 8\n")
    (folder / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    (folder / "syntax.py").write_text("def compute_score(:\n")
    (folder / "arguments.py").write_text("def compute_score(completion):\n    return 1.0\n")
    from yatt.launch.folder.folder import open_folder
    from yatt.launch.resolve.completed import completed_config

    done = open_folder(completed_config(load_run_config([file], [f"run.dir={root}/done"])))
    return {"{policy}": str(policy), "{run}": str(file), "{dir}": str(folder), "{done}": str(done.root)}


def told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, float]:
    """Exit code, everything that was said, and seconds of CPU."""
    monkeypatch.setattr("sys.argv", ["yatt", *words])
    began_s = time.process_time()
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    spent_s = time.process_time() - began_s
    out, err = capsys.readouterr()
    return code, out + err, spent_s


def test_the_table_has_fifty() -> None:
    assert len(MISTAKES) >= 50 and len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told_at_once(
    mistake: Mistake, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = mistake.words
    for name, value in place.items():
        text = text.replace(name, value)
    words = text.split("|")
    monkeypatch.chdir(tmp_path)
    before = sorted(Path(place["{dir}"]).rglob("*"))
    if words[0] == "run":  # first: it starts nothing, whatever it says
        code, said, _ = told(["check", *words[1:]], monkeypatch, capsys)
        assert code == 2 and mistake.says in said, said
    code, said, spent_s = told(words, monkeypatch, capsys)
    assert code == mistake.code and mistake.says in said and "Traceback" not in said, said
    assert spent_s < MOST_CPU_S
    assert sorted(Path(place["{dir}"]).rglob("*")) == before
    assert not (Path(place["{run}"]).parent / "run").exists()
