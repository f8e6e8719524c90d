"""What a person sees when the run file is wrong."""

from pathlib import Path

import pytest

from yatt.config.load import config_hash, load, load_resolved, resolved_text
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
        load([write(folder, text)], list(arguments))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_good_file_loads_with_defaults(tmp_path: Path) -> None:
    config = load([write(tmp_path, GOOD)], [])
    assert (config.optimizer.lr, config.lease.ttl_s, config.rollout.n) == (1e-6, 10.0, 8)


def test_the_resolved_text_loads_to_the_same_config(tmp_path: Path) -> None:
    config = load(
        [write(tmp_path, GOOD)], ["rollout.stop=['a', \"b\"]", "checkpoint.storage_options={k: 1.5}"]
    )
    again = load_resolved(write(tmp_path, resolved_text(config), "config.yaml"))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_overlays_and_arguments_win_in_order(tmp_path: Path) -> None:
    overlay = write(tmp_path, "rollout: {n: 4, top_p: 0.9}\n", "overlay.yaml")
    config = load([write(tmp_path, GOOD), overlay], ["rollout.n=16"])
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
        ("trainer:\n", "placement: {mode: partial}\ntrainer:\n", "placement.mode: partial divides GPUs"),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {mode: disaggregated}\ntrainer:\n",
            "placement.trainer_nodes: 0 of 2 nodes (launch.nodes): disaggregated needs one that trains "
            "and one that runs engines; write 1 to 1",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {trainer_nodes: 1}\ntrainer:\n",
            "placement.trainer_nodes: in colocated every node trains; leave it out",
        ),
        (
            "trainer:\n",
            f"launch: {{scratch_dir: /{'é' * 45}}}\ntrainer:\n",
            "has 91 bytes; a socket's path may have 107, so that",
        ),
        (
            "trainer:\n",
            "launch: {engine_gpus_per_node: 4}\ntrainer:\n",
            "launch.engine_gpus_per_node: in colocated every node trains; leave it out",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 3, gpus_per_node: 2}\nplacement: {mode: disaggregated, trainer_nodes: 1}\n"
            "trainer:\n  tensor_model_parallel_size: 4\n",
            "= 4 does not divide the 2 GPUs (nodes that train x launch.gpus_per_node)",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2, gpus_per_node: 4, engine_gpus_per_node: 3}\nrollout: {tp_size: 2}\n"
            "placement: {mode: disaggregated, trainer_nodes: 1}\ntrainer:\n",
            "rollout.tp_size: 2 does not divide launch.engine_gpus_per_node 3.",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\ngenrms: [{name: j, model: /m, template: '{prompt}'}]\n"
            "placement: {mode: disaggregated, trainer_nodes: 1, genrm_slabs: 1}\ntrainer:\n",
            "placement.genrm_slabs: 1 of 1 slabs for 1 GenRM(s): each GenRM needs at least one slab",
        ),
        (
            "trainer:\n",
            "launch: {nodes: 2}\nplacement: {mode: disaggregated, trainer_nodes: 1, genrm_slabs: 1}\n"
            "trainer:\n",
            "placement.genrm_slabs: 1, but genrms is empty; leave it out.",
        ),
        (
            "trainer:\n",
            "launch: {node_silence_s: 1}\ntrainer:\n",
            "node_silence_s is 1, but three signs of life",
        ),
        ('"builtin:gsm8k"}', '"builtin:gsm8k", weight: 0}', "no reward with a weight other than 0"),
        (
            "trainer:\n",
            "validation: {reward: rul}\ntrainer:\n",
            "validation.reward: 'rul' is not among rewards",
        ),
        ("trainer:\n", "lease: {ttl_s: 3}\ntrainer:\n", "lease: ttl_s is 3, but three renewals"),
        ("trainer:\n", "rollout: {max_response_tokens: 32768}\ntrainer:\n", "cannot hold one longest sample"),
        ("model:", "model: [", "not readable as YAML. Line"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_fix(tmp_path: Path, was: str, now: str, says: str) -> None:
    assert says in mistakes(tmp_path, GOOD.replace(was, now, 1))


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("1.0e-6", "1e-6").replace("[a.jsonl]", "a").replace("dir:", "dri:")
    said = mistakes(tmp_path, text, "rollout.nn=3")
    assert "5 mistakes, nothing was started" in said
    assert "argument 'rollout.nn=3': rollout.nn: no such key" in said


@pytest.mark.parametrize("argument", ["rollout.n", "=3", "rollout..n=3"])
def test_an_argument_without_key_or_value_is_refused(tmp_path: Path, argument: str) -> None:
    assert "write section.key=value" in mistakes(tmp_path, GOOD, argument)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read \(No such file"):
        load([tmp_path / "nothing.yaml"], [])
