"""What a person sees when the run file is wrong."""

import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tests.runs import RunFile
from yatt.config.load import (
    config_hash,
    load_command,
    load_over,
    load_resolved,
    load_run_config,
    parse_resolved,
    resolved_text,
    samples_hash,
)
from yatt.errors import ConfigError

GOOD = """\
run: {dir: /shared/run}
data: {train_files: [a.jsonl]}
model: {path: /models/qwen3}
optimizer: {lr: 1.0e-6}
trainer:
  total_iterations: 10
  train_batch_size: 8
  mini_batch_size: 4
rewards:
- {name: rule, path: "builtin:gsm8k"}
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mistakes(folder: Path, text: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config([write(folder, text)], list(arguments))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_good_file_loads_with_defaults(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [])
    assert (config.optimizer.lr, config.lease.ttl_s, config.rollout.n) == (1e-6, 10.0, 8)


def test_the_resolved_text_loads_to_the_same_config(tmp_path: Path) -> None:
    config = load_run_config(
        [write(tmp_path, GOOD)], ["rollout.stop=['a', \"b\"]", "checkpoint.storage_options={k: 1.5}"]
    )
    again = load_resolved(write(tmp_path, resolved_text(config), "config.yaml"))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_overlays_and_arguments_win_in_order(tmp_path: Path) -> None:
    overlay = write(tmp_path, "rollout: {n: 4, top_p: 0.9}\n", "overlay.yaml")
    config = load_run_config([write(tmp_path, GOOD), overlay], ["rollout.n=16"])
    assert (config.rollout.n, config.rollout.top_p) == (16, 0.9)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (
            "1.0e-6",
            "1e-6",
            "run.yaml:4: optimizer.lr: '1e-6' is not a number. YAML reads 1e-6 as text; write 1.0e-06.",
        ),
        ("/shared/run", "0123", "run.dir: 83 is not text. YAML reads 0123"),
        ("total_iterations: 10", "total_iterations: 1:00:00", "'1:00:00' is not a whole number"),
        ("/shared/run", "no", "run.dir: False is not text. YAML reads yes, no, on and off as true or false"),
        ("lr:", "learning_rate: 1, lr:", "optimizer.learning_rate: no such key. Known keys: lr,"),
        (
            "mini_batch_size",
            "mini_batchsize",
            "trainer.mini_batchsize: no such key. Did you mean 'mini_batch_size'?",
        ),
        ("[a.jsonl]", "a.jsonl", "data.train_files: 'a.jsonl' is not a list. Write [a.jsonl]."),
        ("size: 4", "size: 3", "trainer: mini_batch_size 3 does not divide train_batch_size 8"),
        ("run:", "run: {dir: /x}\nrun:", "run.yaml:2: key 'run' is written twice (first at"),
        ("optimizer: {lr: 1.0e-6}\n", "", "optimizer: missing, and it has no default"),
        ("trainer:\n", "trainer:\n  tensor_model_parallel_size: 2\n", "= 2 does not divide the 1 GPUs"),
        ("trainer:\n", "placement: {mode: partial}\ntrainer:\n", "placement.mode: partial splits GPUs"),
        (
            "trainer:\n",
            "checkpoint: {save_every_minutes: -5}\ntrainer:\n",
            "checkpoint.save_every_minutes is -5.0; write 0 to 525600.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {mode: disaggregated}\ntrainer:\n",
            "placement.trainer_nodes: 0 of 2 nodes (launch.nodes): disaggregated needs at least one "
            "trainer node and one engine node; write 1 to 1",
        ),
        (
            "trainer:\n",
            "placement: {mode: disaggregated, trainer_nodes: 1}\ntrainer:\n",
            "trainer node and one engine node; write 2 or more launch.nodes.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {trainer_nodes: 1}\ntrainer:\n",
            "placement.trainer_nodes: in colocated every node trains; remove it",
        ),
        (
            "trainer:\n",
            "checkpoint: {local_dir: scratch}\ntrainer:\n",
            "local_dir: 'scratch' is relative; begin it with / or $NAME",
        ),
        (
            "trainer:\n",
            f"launch: {{scratch_dir: /{'é' * 45}}}\ntrainer:\n",
            "has 91 bytes; a socket's path may have 107, which leaves",
        ),
        (
            "trainer:\n",
            "launch: {engine_gpus_per_node: 4}\ntrainer:\n",
            "launch.engine_gpus_per_node: in colocated every node trains; remove it",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 3, gpus_per_node: 2}\nplacement: {mode: disaggregated, trainer_nodes: 1}\n"
            "trainer:\n  tensor_model_parallel_size: 4\n",
            "= 4 does not divide the 2 GPUs (trainer nodes x launch.gpus_per_node)",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2, gpus_per_node: 4, engine_gpus_per_node: 3}\nrollout: {tp_size: 2}\n"
            "placement: {mode: disaggregated, trainer_nodes: 1}\ntrainer:\n",
            "rollout.tp_size: 2 does not divide launch.engine_gpus_per_node 3; write",
        ),
        (
            "trainer:\n",
            "launch: {gpus_per_node: 24}\nrollout: {tp_size: 3}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}', tp_size: 8}]\ntrainer:\n",
            "rollout.tp_size: 3 does not divide genrms[0].tp_size 8: such engines would not fill a GPU "
            "set, which has 8 GPUs; write one of 1, 2, 4, 8, or another genrms[0].tp_size.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 3, gpus_per_node: 2}\nrollout: {tp_size: 4}\ntrainer:\n",
            "rollout.tp_size: 4 GPUs are 2 nodes (launch.gpus_per_node: 2), and the number of nodes with "
            "engines, 3, is no multiple of that; write 2, 6, or change launch.nodes.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2, gpus_per_node: 4}\nrollout: {tp_size: 8}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}', tp_size: 3}]\ntrainer:\n",
            "genrms[0].tp_size: 3 neither divides launch.gpus_per_node 4 nor is a multiple of it; write",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 6, gpus_per_node: 2}\nrollout: {tp_size: 4}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}', tp_size: 6}]\ntrainer:\n",
            "rollout.tp_size: 4 does not divide genrms[0].tp_size 6; write a divisor of it, or another",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 6, gpus_per_node: 1}\nrollout: {tp_size: 2}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}'}]\n"
            "placement: {mode: partial, genrm_gpu_sets: 3}\ntrainer:\n",
            "placement.genrm_gpu_sets: with rollout.tp_size 2, 2 nodes have one role together; write a ",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 6, gpus_per_node: 1}\nrollout: {tp_size: 2}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}'}]\n"
            "placement: {mode: partial, genrm_gpu_sets: 6}\ntrainer:\n",
            "placement.genrm_gpu_sets: 6 of 6 GPU sets for 1 GenRM(s): each GenRM needs at least 2 GPU sets "
            "and rollout at least 2; write 2 to 4, or use more nodes or GPUs.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 4, gpus_per_node: 1}\nrollout: {tp_size: 2}\n"
            "genrms: [{name: j, model: /m, template: '{prompt}'}]\n"
            "placement: {mode: partial, genrm_gpu_sets: 2, split: dynamic}\ntrainer:\n",
            "placement.split: rollout.tp_size 2 spans nodes, whose GPU sets do not move; write fixed.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2, gpus_per_node: 1}\nrollout: {tp_size: 2, engine: transformers}\ntrainer:\n",
            "rollout.engine: tp_size 2 spans nodes, which needs vllm; write vllm.",
        ),
        (
            "trainer:\n",
            "rollout: {expert_parallel: true}\ntrainer:\n",
            "rollout.expert_parallel: has no effect with rollout.tp_size: 1; remove it, or raise tp_size.",
        ),
        (
            "trainer:\n",
            "launch: {gpus_per_node: 2, device: cpu}\n"
            "genrms: [{name: j, model: /m, template: '{completion}', tp_size: 2, expert_parallel: true}]\n"
            "rollout: {tp_size: 2}\ntrainer:\n",
            "genrms[0].expert_parallel: needs CUDA, but launch.device is cpu; remove it.",
        ),
        (
            "trainer:\n",
            "launch: {gpus_per_node: 2}\n"
            "rollout: {tp_size: 2, engine: transformers, expert_parallel: true}\ntrainer:\n",
            "rollout.expert_parallel: needs engine vllm, not transformers; remove it.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\ngenrms: [{name: j, model: /m, template: '{prompt}'}]\n"
            "placement: {mode: disaggregated, trainer_nodes: 1, genrm_gpu_sets: 1}\ntrainer:\n",
            "placement.genrm_gpu_sets: 1 of 1 GPU sets for 1 GenRM(s): each GenRM needs at least one GPU set "
            "and rollout at least one; use more nodes or GPUs.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {mode: disaggregated, trainer_nodes: 1, genrm_gpu_sets: 1}\n"
            "trainer:\n",
            "placement.genrm_gpu_sets: 1, but no GenRM has an engine; remove it.",
        ),
        (
            "trainer:\n",
            "launch: {node_silence_s: 1}\ntrainer:\n",
            "node_silence_s is 1, but must allow for three heartbeats",
        ),
        ('"builtin:gsm8k"}', '"builtin:gsm8k", weight: 0}', "no reward has a weight other than 0"),
        (
            "trainer:\n",
            "validation: {reward: rul}\ntrainer:\n",
            "validation.reward: 'rul' is not the name of a reward",
        ),
        (
            "trainer:\n",
            "algorithm: {filter_groups: true, filter_by: rul}\ntrainer:\n",
            "algorithm.filter_by: 'rul' is no reward or GenRM; write one of: rule.",
        ),
        (
            "trainer:\n",
            "algorithm: {filter_by: rule}\ntrainer:\n",
            "algorithm.filter_by: has no effect without filter_groups",
        ),
        (
            "trainer:\n",
            "logging: {webhook_url: 'file:///etc/passwd'}\ntrainer:\n",
            "logging.webhook_url: is not a URL; write one that begins with https:// or http://.",
        ),
        (
            "trainer:\n",
            "lease: {ttl_s: 3}\ntrainer:\n",
            "lease: ttl_s is 3, but must allow for three renewals",
        ),
        ("trainer:\n", "rollout: {max_response_tokens: 32768}\ntrainer:\n", "cannot hold the longest sample"),
        ("model:", "model: [", "not readable as YAML. Line"),
        ("1.0e-6", ".inf", "run.yaml:4: optimizer.lr is inf; write 0 to 1."),
        ("1.0e-6", ".nan", "optimizer.lr is nan; write 0 to 1."),
        ("1.0e-6", "-1.0", "optimizer.lr is -1.0; write 0 to 1."),
        ("lr: 1.0e-6", "lr: 1.0e-6, min_lr: 1.0e-3", "optimizer.min_lr: 0.001 is above lr 1e-06"),
        ("lr: 1.0e-6", "lr: 1.0e-6, adam_beta1: 1", "adam_beta1 is 1.0; write 0 or more and below 1."),
        ("lr: 1.0e-6", "lr: 1.0e-6, adam_beta2: 1.5", "adam_beta2 is 1.5; write 0 or more and below 1."),
        ("total_iterations: 10", "total_iterations: -1", "trainer.total_iterations is -1; write 1 or more."),
        ("batch_size: 8", "batch_size: -8", "trainer.train_batch_size is -8; write 1 or more."),
        ("mini_batch_size: 4", "mini_batch_size: 0", "run.yaml:8: trainer.mini_batch_size is 0; write 1 or"),
        ("trainer:\n", "trainer:\n  ppo_epochs: 0\n", "trainer.ppo_epochs is 0; write 1 or more."),
        ("trainer:\n", "rollout: {tp_size: 0}\ntrainer:\n", "rollout.tp_size is 0; write 1 or more."),
        ("trainer:\n", "rollout: {top_k: 0}\ntrainer:\n", "top_k is 0; write -1 (all), or 1 or more."),
        ("trainer:\n", "algorithm: {correction: {high: 0}}\ntrainer:\n", "high is 0.0; write above 0."),
        (
            "trainer:\n",
            "algorithm: {correction: {rule: mask, low: 2, high: 1}}\ntrainer:\n",
            "run.yaml:5: algorithm.correction: low 2 is not below high 1.",
        ),
        (
            "trainer:\n",
            "algorithm: {correction: {low: 0.5}}\ntrainer:\n",
            "run.yaml:5: algorithm.correction: low 0.5 has no effect with truncate.",
        ),
        ("trainer:\n", "algorithm: {rejection: {level: word}}\ntrainer:\n", "algorithm.rejection.level"),
        (
            "trainer:\n",
            "algorithm: {kl_target: 0.1}\ntrainer:\n",
            "run.yaml:5: algorithm.kl_target: is set but kl_in is none",
        ),
        (
            "trainer:\n",
            "algorithm: {kl_in: reward, kl_target: 0.1, kl_horizon: 12}\ntrainer:\n",
            "run.yaml:5: algorithm.kl_horizon: 12 with 64 completions per iteration",
        ),
        (
            "trainer:\n",
            "algorithm: {clip_ratio_c: 0.5}\ntrainer:\n",
            "algorithm.clip_ratio_c is 0.5; write 0 (off), or above 1.",
        ),
        ("trainer:\n", "algorithm: {clip_ratio_c: 1}\ntrainer:\n", "write 0 (off), or above 1."),
        ("trainer:\n", "algorithm: {kl_coef: -0.1}\ntrainer:\n", "kl_coef is -0.1; write 0 or more."),
        ("trainer:\n", "algorithm: {clip_ratio_low: -0.1}\ntrainer:\n", "is -0.1; write 0 to 1."),
        ("trainer:\n", "algorithm: {clip_ratio_high: -0.1}\ntrainer:\n", "is -0.1; write 0 or more."),
        ("trainer:\n", "algorithm: {loss_scale_factor: -1}\ntrainer:\n", "is -1; write 0 or more."),
        (
            "trainer:\n",
            "algorithm: {kl_in: loss, kl_type: k1}\ntrainer:\n",
            "run.yaml:5: algorithm.kl_type: the expected gradient of k1 in the loss is 0",
        ),
        (
            "trainer:\n",
            "genrms: [{name: j, model: m, template: '{completion}', sees: all}]\ntrainer:\n",
            "run.yaml:5: genrms[0].sees: all is for pictures of an environment; write environment.images",
        ),
        ("trainer:\n", "rollout: {n: 1}\ntrainer:\n", "rollout.n: grpo compares completions of one prompt"),
        (
            "trainer:\n",
            "rollout: {n: 1}\nalgorithm: {adv_estimator: reinforce_plus_plus_baseline}\ntrainer:\n",
            "rollout.n: reinforce_plus_plus_baseline compares completions of one prompt",
        ),
        (
            "rewards:",
            f"launch: {{nodes: {10**12}}}\nrewards:",
            "launch.nodes is 1000000000000; write 1 to 65536",
        ),
        ("1.0e-6", "1" * 400, "is not a number"),
        ("1.0e-6", "2024-02-30", "run.yaml:4: '2024-02-30' cannot be read as YAML's 'timestamp'"),
        (
            "/shared/run",
            "2024-02-03",
            "run.dir: datetime.date(2024, 2, 3) is not text. YAML reads it as a date",
        ),
        ("1.0e-6", "!!int x", "run.yaml:4: 'x' cannot be read as YAML's 'int'"),
        ("1.0e-6", '!!int ""', "cannot be read as YAML's 'int'"),
        ("1.0e-6", "!!bool maybe", "cannot be read as YAML's 'bool'"),
        ("1.0e-6", "!!python/object:os.system x", "cannot be read as YAML's"),
        ("model: {path", "model: {<<: {a: 1}, path", "run.yaml:3: merge keys (<<) are not supported"),
        ("model: {path", "model: {? [a, b] : 1, path", "run.yaml:3: a key must be a word, not a list"),
        (
            "[a.jsonl]",
            "&a [*a]",
            "run.yaml:2: nested more than 24 levels deep; an alias (*name) must not",
        ),
        ("[a.jsonl]", "[" * 60 + "]" * 60, "Line 2: nested more than 24 levels deep"),
        ("/shared/run", '"/a\\0b"', "run.dir: '/a\\x00b' contains a NUL character"),
        ("/shared/run", '"/a\\ud800b"', "run.dir: '/a\\ud800b' contains a lone surrogate"),
        ("/shared/run", '"/a\\n#SBATCH -p x"', "run.dir: '/a\\n#SBATCH -p x' contains a line break"),
        ("/shared/run", '"/a\\rb"', "run.dir: '/a\\rb' contains a line break"),
        ("/shared/run", "/a%jb", "run.dir: '/a%jb' contains '%'"),
        ("/shared/run", r"/a\b", r"run.dir: '/a\\b' contains '\'"),
        ("a.jsonl", '"a\\nb"', "data.train_files[0]: 'a\\nb' contains a line break"),
        ("path: /models", '"\\e[31mpath": /models', "model.\\x1b[31mpath: no such key."),
        ("run:", "a\0b:", "run.yaml: not readable as YAML. Line 1: '\\x00' cannot be in a YAML file"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_fix(tmp_path: Path, was: str, now: str, says: str) -> None:
    assert says in mistakes(tmp_path, GOOD.replace(was, now, 1))


def test_a_library_that_changes_pyyaml_does_not_change_how_a_config_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(table, "tag:yaml.org,2002:timestamp", table["tag:yaml.org,2002:str"])
    assert "YAML reads it as a date" in mistakes(tmp_path, GOOD.replace("/shared/run", "2024-02-03"))


def laughs(levels: int, width: int) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_aliases_that_expand_without_end_are_refused_at_once(tmp_path: Path) -> None:
    assert "has more than 50000 values with aliases" in mistakes(tmp_path, laughs(12, 10))


def test_a_file_that_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large.yaml"
    os.mkfifo(fifo)
    large.write_text("# " + "x" * (1 << 20))
    for path, says in (
        (fifo, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (large, "is larger than 512 KiB"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_run_config([path], [])


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run:\n  dir: \xff\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: is not text in UTF-8"):
        load_run_config([path], [])


def test_every_character_of_a_message_can_be_shown(tmp_path: Path) -> None:
    text = GOOD.replace("run: {dir", 'run: {"a\\e[2Jb\\u202e": 1, dir').replace("1.0e-6", '"\\e]0;x\\a"')
    said = mistakes(tmp_path, text, "rollout.\x1b[31mn=3")
    assert all(c.isprintable() for c in said.replace("\n", ""))
    assert "rollout.\\x1b[31mn: no such key" in said


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("1.0e-6", "1e-6").replace("[a.jsonl]", "a").replace("dir:", "dri:")
    said = mistakes(tmp_path, text, "rollout.nn=3")
    assert "5 mistakes, nothing was started" in said
    assert "argument 'rollout.nn=3': rollout.nn: no such key" in said


def test_an_empty_section_takes_back_what_was_written_before(tmp_path: Path) -> None:
    """Else a run file with weights could not get other data files."""
    run = write(tmp_path, GOOD.replace("[a.jsonl]}", "[a.jsonl], weights: {a.jsonl: 2.0}, shuffle: false}"))
    assert load_run_config([run], []).data.weights == {"a.jsonl": 2.0}
    other = load_run_config([run], ["data.weights={}", "data.train_files=[b.jsonl]"]).data
    assert (other.train_files, other.weights, other.shuffle) == (("b.jsonl",), {}, False)
    overlay = write(tmp_path, "data: {weights: {}}\n", "overlay.yaml")
    assert load_run_config([run, overlay], []).data.weights == {}
    assert load_run_config([run, overlay], ["data.weights={a.jsonl: 3.0}"]).data.weights == {"a.jsonl": 3.0}
    assert load_run_config([run, write(tmp_path, "", "nothing.yaml")], []) == load_run_config([run], [])
    with pytest.raises(ConfigError, match=r"data\.train_files: missing"):
        load_run_config([run], ["data={}"])
    with pytest.raises(ConfigError, match=r"argument 'rewards=\{\}': rewards: a section is not a list"):
        load_run_config([run], ["rewards={}"])


def test_names_are_read_as_they_are_written(tmp_path: Path) -> None:
    """YAML reads YES and NO as true and false, and 0x10 as a number."""
    scores = "{YES: 1.0, NO: 0.0, on: 0.5, 0x10: 0.25, 7: 0.75}"
    (tmp_path / "judge.yaml").write_text(
        "genrms: [{name: j, model: m, template: '{completion}', verdict: "
        f"{{pattern: '(.+)', scores: {scores}}}}}]"
    )
    config = load_run_config(
        [RunFile(tmp_path, {"run": {"deterministic": False}}).write(), tmp_path / "judge.yaml"], []
    )
    expected = {"YES": 1.0, "NO": 0.0, "on": 0.5, "0x10": 0.25, "7": 0.75}
    assert config.genrms[0].verdict.scores == expected
    assert parse_resolved(resolved_text(config)).genrms[0].verdict.scores == expected


@pytest.mark.parametrize("argument", ["rollout.n", "=3", "rollout..n=3"])
def test_an_argument_without_key_or_value_is_refused(tmp_path: Path, argument: str) -> None:
    assert "write section.key=value" in mistakes(tmp_path, GOOD, argument)


def test_a_key_without_value_is_not_taken_for_a_file(tmp_path: Path) -> None:
    run = write(tmp_path, GOOD)
    for word in ("rollout.n", "genrms.0.model", "rewards[0].path"):
        with pytest.raises(ConfigError, match=rf"did you mean {re.escape(word)}=VALUE\?"):
            load_command(run, [word])
    for word in ("overlay.yaml", "over/lay.n", "rollout", "Rollout.n"):
        with pytest.raises(ConfigError) as caught:
            load_command(run, [word])
        assert "did you mean" not in str(caught.value) and "Check the path" in str(caught.value)


def test_an_argument_changes_an_item_of_a_list(tmp_path: Path) -> None:
    text = GOOD + "- {name: other, path: 'builtin:exact', weight: 2.0}\n"
    run = write(tmp_path, text)
    for argument in ("rewards.1.weight=3.0", "rewards[1].weight=3.0"):
        rewards = load_run_config([run], [argument]).rewards
        assert [(r.name, r.weight) for r in rewards] == [("rule", 1.0), ("other", 3.0)]
    assert load_run_config([run], ["data.train_files.0=b.jsonl"]).data.train_files == ("b.jsonl",)
    both = load_run_config([run], ["rewards.0.name=first", "rewards.1.name=second"]).rewards
    assert [r.name for r in both] == ["first", "second"]
    overlay = write(tmp_path, "rewards: {0: {weight: 5.0}}\n", "overlay.yaml")
    assert load_run_config([run, overlay], []).rewards[0].weight == 5.0


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("rewards.1.weight=3.0", "rewards has no item 1; its last one is 0"),
        ("rewards[7]={name: a}", "rewards has no item 7; its last one is 0"),
        ("genrms.0.model=/m", "genrms"),
        ("rewards.0.wight=3.0", "wight: no such key"),
        ("rewards.-1.weight=3.0", "rewards: a section is not a list"),
        ("rollout.0=1", "rollout.0: no such key"),
    ],
)
def test_an_item_that_is_not_there_is_refused(tmp_path: Path, argument: str, says: str) -> None:
    said = mistakes(tmp_path, GOOD, argument)
    assert says in said and "argument '" in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read \(No such file"):
        load_run_config([tmp_path / "nothing.yaml"], [])


@pytest.mark.parametrize(
    ("change", "deterministic", "equal"),
    [
        ("rollout.gpu_memory_utilization=0.5", False, True),
        ("rollout.gpu_memory_utilization=0.5", True, False),
        ("rollout.temperature=0.5", False, False),
        ("optimizer.lr=1.0e-5", True, True),
        ("data.train_files=[b.jsonl]", False, False),
    ],
)
def test_what_decides_about_samples(tmp_path: Path, change: str, deterministic: bool, equal: bool) -> None:
    arguments = [f"run.deterministic={str(deterministic).lower()}"]
    file = write(tmp_path, GOOD)
    before, after = load_run_config([file], arguments), load_run_config([file], [*arguments, change])
    assert config_hash(before) != config_hash(after)
    assert (samples_hash(before) == samples_hash(after)) == equal


@pytest.mark.parametrize(
    ("oversample", "age", "says"),
    [(1.25, 0, "allows 1 at most"), (2, 1, ""), (2.1, 1, "allows 2 at most"), (2.1, 2, "")],
)
def test_oversampling_is_refused_where_it_would_harm(
    tmp_path: Path, oversample: float, age: int, says: str
) -> None:
    file = write(tmp_path, GOOD)
    arguments = [f"rollout.oversample={oversample}", f"rollout.max_policy_age={age}"]
    if says:
        assert says in mistakes(tmp_path, GOOD, *arguments)
    else:
        load_run_config([file], arguments)
        assert "run.deterministic" in mistakes(tmp_path, GOOD, *arguments, "run.deterministic=true")
    load_run_config(
        [file], ["rollout.oversample=1", f"rollout.max_policy_age={age}", "run.deterministic=true"]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profile.kinds=[torch]"], "iterations is empty; write some, as [3, 4]"),
        (["profile.iterations=[3]"], "kinds is empty; write kinds: [torch]"),
        (["profile.kinds=[torch]", "profile.iterations=[3]", "profile.ranks=[]"], "ranks is empty"),
        (["profile.kinds=[torch]", "profile.iterations=[3]", "profile.ranks=[1]"], "has ranks 0 to 0"),
        (["profile.kinds=[torch]", "profile.iterations=[3, 11]"], "has 11, trainer.total_iterations is 10"),
        (["profile.kinds=[nvtx]", "profile.iterations=[3]", "launch.device=cpu"], "nvtx needs CUDA"),
        (["profile.kinds=[cupti]", "profile.iterations=[3]"], "profile.kinds"),
        (["profile.kinds=[torch]", f"profile.iterations={list(range(1, 66))}"], "write at most 64"),
    ],
)
def test_a_profile_that_would_not_be_made_is_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in mistakes(tmp_path, GOOD, *arguments)


def test_a_profile_of_some_iterations_is_accepted(tmp_path: Path) -> None:
    arguments = ["profile.kinds=[torch,memory]", "profile.iterations=[3,4]"]
    profile = load_run_config([write(tmp_path, GOOD)], arguments).profile
    assert (profile.kinds, profile.iterations, profile.ranks) == (("torch", "memory"), (3, 4), (0,))


def test_no_part_of_a_mistake_shows_a_credential(tmp_path: Path) -> None:
    """Places, keys and sentences are values: each is without it, not only the text of all."""
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {n: 's3://me:hunter2@bucket/x', 's3://me:hunter2@y': 1, \"\\e[31m\": 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config([file], ["rollout.top_p=s3://me:hunter2@bucket/x"])
    shown = [asdict(found) for found in caught.value.findings]
    assert len(shown) >= 4 and "hunter2" not in f"{shown}{caught.value}" and "***@" in f"{shown}"
    assert all(text.isprintable() for found in shown for text in found.values() if isinstance(text, str))
    assert not any(found["says"].startswith(found["key"]) for found in shown), "a key is told once"


def test_no_heading_shows_a_credential(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [])
    for argument in ("rollout.token=hunter2", "s3://me:hunter2@bucket/x=1", "rollout.\x1b[31mn=1"):
        with pytest.raises(ConfigError) as caught:
            load_over(config, [argument], lambda _: ())
        assert caught.value.heading == "the arguments: 1 mistake, nothing was started."
        assert "hunter2" not in f"{caught.value}"
