"""The command: examples, suggestions, completion, runs by name, `yatt config`, `yatt init`."""

import itertools
import json
import subprocess
from typing import get_type_hints

import pytest
import yaml

from tests.obs_runs import make_run
from tests.runs import HANG_S
from yatt.adapters.run_folder.run_config import load_run
from yatt.cli.finding import run_folder
from yatt.cli.main import EXAMPLES, command_parser, completion_script, main
from yatt.config.load import load_resolved, load_run_config
from yatt.config.origin import annotated_yaml, load_with_origins
from yatt.config.schema import RunConfig
from yatt.config.sections.sft import SftConfig
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError
from yatt.launch.folder.known import remember_run
from yatt.launch.resolve.resolved import resolve_config

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture
def call(monkeypatch, capsys):
    def called(*words):
        monkeypatch.setattr("sys.argv", ["yatt", *map(str, words)])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return called


@pytest.mark.parametrize("name", list(command_parser()[1].choices))
def test_each_command_has_examples_that_its_parser_takes(name, call):
    assert EXAMPLES[name]
    for line in EXAMPLES[name]:
        words = line.removeprefix('eval "$(').removesuffix(')"').split()
        assert words[:2] == ["yatt", name]
        parser, _ = command_parser()
        found, rest = parser.parse_known_args(words[1:])
        assert not rest or "more" in found, line
        assert not any(word.startswith("-") for word in rest), line
    code, out, _ = call(name, "--help")
    assert code == 0 and all(f"  {line}" in out for line in EXAMPLES[name])


def test_examples_are_of_commands_only():
    assert EXAMPLES.keys() == command_parser()[1].choices.keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stauts", "x"], "there is no command 'stauts'. Did you mean 'status'?"),
        (["repotr", "x"], "there is no command 'repotr'. Did you mean 'report'?"),
        (["quux"], "there is no command 'quux'. See yatt --help."),
        (["logs", "x", "--rolle", "y"], "see yatt logs --help. Did you mean '--role'?"),
        (["submit", "x", "--site", "s", "--dryrun"], "Did you mean '--dry-run'?"),
        (["--sit", "logs", "x"], "unrecognized arguments: --sit; see yatt logs --help."),
        (["\x1b[31m"], r"there is no command '\x1b[31m'. See yatt --help."),
    ],
)
def test_a_mistyped_word_is_named_with_the_nearest(words, says, call):
    code, out, err = call(*words)
    assert (code, out) == (2, "") and says in err


def complete(script, *words):
    asked = " ".join(f"'{word}'" for word in words)
    asking = f"COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _yatt"
    line = f"{script}\n{asking}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", line], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run.yaml").touch()
    script = completion_script(command_parser()[1], "bash")
    assert complete(script, "yatt", "stat") == ["status"]
    assert complete(script, "yatt", "logs", "x", "--ro") == ["--role"]
    assert "--sweep" in complete(script, "yatt", "submit", "--")
    assert complete(script, "yatt", "run", "my-") == ["my-run.yaml"]
    assert completion_script(command_parser()[1], "zsh").startswith("autoload")


def test_a_run_is_found_by_folder_file_run_file_name_and_id(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths = make_run(tmp_path)
    paths.events.touch()
    run_file = tmp_path / "mine.yaml"
    run_file.write_text(f"run: {{dir: {paths.root}}}\n")  # other keys do not matter
    for named in (paths.root, paths.config, paths.events, run_file):
        assert run_folder(named) == paths.root
    remember_run(paths.root)
    monkeypatch.chdir(tmp_path.parent)
    assert run_folder(type(tmp_path)(paths.root.name)) == paths.root
    monkeypatch.setattr("yatt.cli.finding._id", lambda root: "rabc123" if root == paths.root else "")
    assert run_folder(type(tmp_path)("rabc123")) == paths.root
    assert str(run_folder(type(tmp_path)("unheard-of"))) == "unheard-of"


def test_two_runs_of_one_name_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        root = make_run(tmp_path / name).root
        remember_run(root)
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match=f"several of your runs are named {root.name}"):
        run_folder(type(tmp_path)(root.name))


def test_a_file_without_a_folder_is_refused(tmp_path, call):
    (tmp_path / "x.yaml").write_text("rollout: {n: 4}\n")
    code, _, err = call("status", tmp_path / "x.yaml")
    assert code == 2 and "x.yaml has no run.dir; give the run folder." in err


@pytest.mark.parametrize("only_written", [False, True])
@pytest.mark.parametrize("file", [QUICKSTART, "configs/gsm8k.yaml"])
def test_the_annotated_config_loads_to_the_same_config(tmp_path, file, only_written):
    arguments = ["rollout.n=16", r"rollout.stop=['a', " '"b\\nc"]', "checkpoint.storage_options={k: 1.5e-7}"]
    config, origins = load_with_origins([tmp_path.__class__(file)], arguments)
    text = annotated_yaml(config, origins, only_written=only_written)
    (tmp_path / "again.yaml").write_text(text)
    assert load_run_config([tmp_path / "again.yaml"], []) == config
    assert all("#" in line or line.strip().endswith(":") for line in text.splitlines())
    assert ("# default" in text) != only_written
    assert origins["rollout.n"] == "argument 'rollout.n=16'" and f"# {file}:" in text


def test_an_overlay_wins_and_is_named(tmp_path, call):
    overlay = tmp_path / "over.yaml"
    overlay.write_text("rollout:\n  n: 4\nlogging: {webhook_url: 'https://hooks.example/T0/secretpath'}\n")
    code, out, _ = call("config", QUICKSTART, overlay, "optimizer.lr=1.0e-4", "--json")
    found = json.loads(out)
    assert code == 0 and found["rollout.n"] == {"value": 4, "from": f"{overlay}:2"}
    assert found["optimizer.lr"] == {"value": 1e-4, "from": "argument 'optimizer.lr=1.0e-4'"}
    assert found["genrms.0.name"]["from"].startswith(f"{QUICKSTART}:")
    assert "secretpath" not in out


def test_the_config_of_a_run_has_its_changes(tmp_path, call):
    paths = make_run(tmp_path)
    resolve_config(load_resolved(paths.config), changes=["lease.ttl_s=77"]).record(paths)
    code, out, _ = call("config", paths.root, "--changed")
    assert code == 0 and yaml.safe_load(out)["lease"] == {"ttl_s": 77.0}
    assert yaml.safe_load(out)["rewards"] == [{"name": "exact", "path": "builtin:exact"}]
    assert "genrms" not in yaml.safe_load(out)
    code, out, _ = call("config", paths.root)
    (tmp_path / "again.yaml").write_text(out)
    assert load_resolved(tmp_path / "again.yaml") == load_run(paths)
    code, _, err = call("config", paths.root, "rollout.n=3")
    assert code == 2 and "is a run folder, whose config is complete: remove 'rollout.n=3'." in err


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    return path


@pytest.mark.parametrize(
    "more",
    [
        ["--reward", "builtin:exact"],
        ["--judge", "/models/judge"],
        [
            "--judge",
            "/models/judge",
            "--reward",
            "mine.py",
            "--val",
            "held: out.jsonl",
            "--cpu",
            "--nodes",
            "3",
        ],
    ],
)
def test_init_writes_a_file_that_loads(tmp_path, rows, more, call):
    path = tmp_path / "new.yaml"
    code, out, err = call("init", path, "--model", "/models/a: b", "--data", rows, *more)
    assert (code, err) == (0, "") and f"yatt check {path}" in out
    config = load_run_config([path], [])
    assert (config.data.prompt_key, config.data.ground_truth_key) == ("problem", "answer")
    assert config.model.path == "/models/a: b" and config.run.dir == "runs/new"
    if "--judge" in more:
        assert "{prompt}" in config.genrms[0].template and config.genrms[0].verdict.maximum == 10
    if "--cpu" in more:
        assert config.model.dtype == config.genrms[0].dtype == "float32" and config.launch.nodes == 3
        assert config.validation.reward == "mine" and config.data.val_files == ("held: out.jsonl",)
    before = path.read_text()
    code, _, err = call("init", path, "--model", "/m", "--data", rows, *more)
    assert code == 2 and f"{path} exists" in err and path.read_text() == before


def test_init_takes_the_columns_that_are_named_and_chats(tmp_path, call):
    chat = [{"role": "user", "content": "1+1?"}]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": chat, "prompt_id": "7", "meta": {"final": "2"}}) + "\n")
    given = ["--model", "/m", "--data", data, "--reward", "builtin:exact"]
    for number, (words, columns) in enumerate((
        ([], ("messages", "")),
        (["--prompt-key", "prompt_id", "--ground-truth-key", "meta.final"], ("prompt_id", "meta.final")),
    )):  # fmt: skip
        path = tmp_path / f"{number}.yaml"
        assert call("init", path, *given, *words)[0] == 0
        config = load_run_config([path], [])
        assert (config.data.prompt_key, config.data.ground_truth_key) == columns
    for words, says in (
        (
            ["--prompt-key", "text"],
            "--prompt-key text: the first row has no such column; it has messages, prompt_id",
        ),
        (
            ["--ground-truth-key", "meta.last"],
            "--ground-truth-key meta.last: the first row has no such column",
        ),
    ):
        code, _, err = call("init", tmp_path / "no.yaml", *given, *words)
        assert code == 2 and says in err and not (tmp_path / "no.yaml").exists()
    answered = [*chat, {"role": "assistant", "content": "So"}]
    data.write_text(json.dumps({"messages": answered, "answer": 3, "odd": ["x", "y"]}) + "\n")
    code, _, err = call("init", tmp_path / "no.yaml", *given)
    assert code == 2 and "ends with an answer of the assistant" in err and "--prompt-key messages" in err
    for odd in ("answer", "odd"):
        code, _, err = call("init", tmp_path / "no.yaml", *given, "--prompt-key", odd)
        assert code == 2 and f"--prompt-key {odd}: the first row has neither text there nor a list" in err
    assert call("init", tmp_path / "prefill.yaml", *given, "--prompt-key", "messages")[0] == 0


def test_init_asks_for_columns_at_a_terminal(tmp_path, call, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "1+1?", "result": "2"}) + "\n")
    answers = iter(("text", "result"))
    asked = []

    def answer(question):
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr("builtins.input", answer)
    path = tmp_path / "new.yaml"
    assert call("init", path, "--model", "/m", "--data", data, "--reward", "builtin:exact")[0] == 0
    assert asked == [
        "column of the prompt (text, result): ",
        "column of the reference answer (text, result; empty: none): ",
    ]
    config = load_run_config([path], [])
    assert (config.data.prompt_key, config.data.ground_truth_key) == ("text", "result")

    def closed(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    code, _, err = call("init", tmp_path / "no.yaml", "--model", "/m", "--data", data, "--judge", "/j")
    assert code == 2 and "Name that of the prompt with --prompt-key." in err


def test_init_takes_patterns_and_hub_data_sets(tmp_path, rows, call):
    for number, (data, column) in enumerate(
        ((f"{tmp_path}/r*.jsonl", "problem"), ("hf:a/b:main:train", "prompt"))
    ):
        path = tmp_path / f"{number}.yaml"
        code, _, err = call("init", path, "--model", "/m", "--data", data, "--reward", "builtin:exact")
        assert (code, err) == (0, "")
        config = load_run_config([path], [])
        assert (config.data.train_files, config.data.prompt_key) == ((data,), column)


def test_a_list_survives_a_run_folder_that_cannot_be_read(tmp_path, call):
    (tmp_path / "good").mkdir()
    (tmp_path / "odd").mkdir()
    for name in ("good", "odd"):
        root = make_run(tmp_path / name).root
        (root / "claims").mkdir()
    (tmp_path / "odd" / "run" / "metrics.jsonl").mkdir()
    (tmp_path / "odd" / "run" / "finished").mkdir()
    code, out, err = call("list", tmp_path / "good", tmp_path / "odd")
    assert code == 0 and "good/run" in out and "unreadable folder" in out, out + err


@pytest.mark.parametrize("words", [["none.yaml"], [QUICKSTART, "rolout.n=3"]])
def test_a_check_in_json_is_json_whatever_is_wrong(words, call):
    code, out, _ = call("check", *words, "--json")
    found = json.loads(out)
    assert code == 2 and not found["ok"] and found["found"][0]["level"] == "fail"


def test_init_takes_lengths_that_the_model_has(tmp_path, rows, call):
    model = tmp_path / "model"
    model.mkdir()
    for limit, lengths in ((64, (32, 32)), (1 << 17, (1024, 1024)), (None, (1024, 1024))):
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": limit} if limit else {}))
        path = tmp_path / f"{limit}.yaml"
        assert call("init", path, "--model", model, "--data", rows, "--reward", "builtin:exact")[0] == 0
        config = load_run_config([path], [])
        assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == lengths


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "write --model: Hugging Face folder of the policy."),
        (["--model", "/m", "--data", "{rows}"], "write --reward or --judge"),
        (
            ["--model", "/m", "--data", "/none.jsonl", "--reward", "builtin:exact"],
            "/none.jsonl: no such data",
        ),
        (
            ["--model", "/m", "--data", "{odd}", "--reward", "builtin:exact"],
            "question, problem, input, instruction, messages; it has text. Name that of the prompt",
        ),
        (
            ["--model", "/m", "--data", "{rows}", "--judge", "/j", "--val", "v.jsonl"],
            "validation needs a reward",
        ),
        (
            ["--model", "/m", "--data", "{rows}", "--judge", "/j", "--nodes", "0"],
            "--nodes 0: write 1 or more.",
        ),
        (["--model", "a\nb", "--data", "{rows}", "--judge", "/j"], "contains a line break"),
    ],
)
def test_init_names_what_is_missing_and_leaves_no_file(tmp_path, rows, words, says, call):
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"text": "x"}\n')
    words = [word.replace("{rows}", str(rows)).replace("{odd}", str(odd)) for word in words]
    code, _, err = call("init", tmp_path / "new.yaml", *words)
    assert code == 2 and says in err and "Traceback" not in err
    assert not (tmp_path / "new.yaml").exists()


def has_key(kind, key):
    """Whether a config class has a key."""
    for name in key.split("."):
        kinds = get_type_hints(kind)
        if name not in kinds:
            return False
        kind = kinds[name]
    return True


@pytest.mark.parametrize("name", list(command_parser()[1].choices))
def test_the_examples_name_keys_that_exist(name):
    kind = SftConfig if name == "sft" else RunConfig
    for line in EXAMPLES[name]:
        words = line.split()
        for before, word in itertools.pairwise(words):
            key, sign, _ = word.partition("=")
            assert not sign or has_key(SiteConfig if before == "--set" else kind, key), line


@pytest.mark.parametrize("name", ["run", "resume", "check", "config", "sft", "report"])
def test_only_what_is_missing_is_called_missing(name, call):
    code, _, err = call(name)
    assert code == 2 and err.strip().endswith(("required: config", "required: run"))
