"""Options of an evaluation and the config that its processes get."""

from dataclasses import replace
from pathlib import Path

import pytest

from yatt.config.check import broken_relations
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.config.schema import RunConfig
from yatt.config.sizes import node_gpus
from yatt.core.gpus.placement import placement_of
from yatt.errors import ConfigError
from yatt.evaluation.request import BareModel, EvalOptions, EvalSettings, bare_config, evaluation_settings

RUN = """
run: {dir: /runs/one, seed: 5}
model: {path: /models/policy}
data: {train_files: [/data/train.jsonl], val_files: [/data/val.jsonl]}
launch: {nodes: 16, gpus_per_node: 8, device: cpu}
placement: {mode: disaggregated, trainer_nodes: 8, genrm_gpu_sets: 2}
rollout: {n: 8, temperature: 0.7, top_p: 0.9, tp_size: 2, ahead: 1, max_policy_age: 2}
rewards: [{name: exact, path: "builtin:exact"}]
genrms: [{name: judge, model: /models/judge, template: "{completion}", verdict: {pattern: "(1)"}, tp_size: 4}]
optimizer: {lr: 1.0e-6}
trainer: {total_iterations: 10, train_batch_size: 64, mini_batch_size: 64, tensor_model_parallel_size: 8}
"""
MODEL = Path("/models/exported")


def of_run(tmp_path: Path, options: EvalOptions, *words: str, gpus: int = 0) -> EvalSettings:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return evaluation_settings(load_run_config([path], []), options, words, MODEL, gpus)


def of_model(*words: str, data: tuple[str, ...] = ("a.jsonl",), **options: object) -> EvalSettings:
    bare = BareModel(rewards=("builtin:gsm8k", "my/rewards.py:brevity"), max_tokens=64, prompt_key="question")
    base = bare_config(MODEL, bare, data)
    return evaluation_settings(base, EvalOptions(data=data, **options), words, MODEL, 0)  # type: ignore[arg-type]


def test_a_runs_evaluation_samples_and_scores_as_the_run_does_on_one_node(tmp_path: Path) -> None:
    found = of_run(tmp_path, EvalOptions())
    config = found.config
    assert (config.rollout.n, found.temperature, config.rollout.top_p) == (8, 0.7, 0.9)
    assert found.names == ("exact", "judge") and found.ks == (1, 8)
    assert config.data.val_files == ("/data/val.jsonl",) and config.model.path == str(MODEL)
    assert (config.launch.nodes, config.launch.gpus_per_node) == (1, 4), "one engine of the largest kind"
    assert (config.run.seed, config.placement.mode) == (5, "colocated")


def test_processes_can_load_the_config_whatever_the_run_trains_with(tmp_path: Path) -> None:
    config = of_run(tmp_path, EvalOptions(n=4)).config
    assert broken_relations(config) == []
    assert parse_resolved(resolved_text(config)) == config
    assert broken_relations(of_model().config) == []


GIVEN = """
run: {dir: /runs/one, kind: KIND}
model: {path: /models/policy}
data: {train_files: [/data/train.jsonl], val_files: [/data/val.jsonl]}
optimizer: {lr: 1.0e-6}
trainer: {total_iterations: 10, train_batch_size: 64, mini_batch_size: 64}
"""


def test_what_was_trained_on_given_completions_is_sampled_as_any_model(tmp_path: Path) -> None:
    words = ['rewards=[{name: exact, path: "builtin:exact"}]', "rollout.n=4", "rollout.temperature=0.5"]
    path = tmp_path / "run.yaml"
    path.write_text(GIVEN.replace("KIND", "dpo"))
    base = load_run_config([path], ["trainer.max_tokens_per_micro_batch=8192"])
    found = evaluation_settings(base, EvalOptions(), words, MODEL, 0)
    assert (found.config.rollout.n, found.temperature, found.config.data.form) == (4, 0.5, "prompts")
    assert broken_relations(found.config) == []
    path.write_text(GIVEN.replace("KIND", "reward_model"))
    base = load_run_config([path], ["trainer.max_tokens_per_micro_batch=8192"])
    with pytest.raises(ConfigError, match="such a model gives numbers and samples nothing"):
        evaluation_settings(base, EvalOptions(), words, MODEL, 0)


def test_options_and_words_win_over_the_run(tmp_path: Path) -> None:
    options = EvalOptions(data=("/x.jsonl",), n=3, temperature=0.2, seed=9, ks=(2, 1), limit=5)
    found = of_run(tmp_path, options, "rollout.top_p=0.5", "rollout.tp_size=1", "launch.gpus_per_node=8")
    config = found.config
    assert (config.rollout.n, found.temperature, config.run.seed, found.ks) == (3, 0.2, 9, (1, 2))
    assert (config.rollout.top_p, config.rollout.tp_size, config.launch.gpus_per_node) == (0.5, 1, 8)
    assert config.data.val_files == ("/x.jsonl",) and found.limit == 5


@pytest.mark.parametrize("is_run", [True, False])
def test_nurseries_can_be_switched_off(tmp_path: Path, is_run: bool) -> None:
    word = "launch.nurseries=false"
    settings = of_run(tmp_path, EvalOptions(), word) if is_run else of_model(word)
    assert not settings.config.launch.nurseries
    assert of_run(tmp_path, EvalOptions()).config.launch.nurseries


def test_engines_get_all_gpus_that_whole_slabs_can_have(tmp_path: Path) -> None:
    assert of_run(tmp_path, EvalOptions(), gpus=7).config.launch.gpus_per_node == 4
    assert of_run(tmp_path, EvalOptions(), gpus=8).config.launch.gpus_per_node == 8
    with pytest.raises(ConfigError, match=r"tp_size is 4, but this machine gives 2 GPUs; write"):
        of_run(tmp_path, EvalOptions(), gpus=2)


def test_nodes_are_as_few_as_the_largest_engine_needs_and_placement_is_that_of_the_words(
    tmp_path: Path,
) -> None:
    assert of_run(tmp_path, EvalOptions(nodes=3)).config.launch.nodes == 3
    wide = of_run(tmp_path, EvalOptions(may_span=True), "rollout.tp_size=16", gpus=8).config
    assert (wide.launch.nodes, wide.launch.gpus_per_node) == (2, 8)
    words = ("placement.mode=disaggregated", "placement.trainer_nodes=1", "placement.genrm_gpu_sets=1")
    split = of_run(tmp_path, EvalOptions(nodes=3), *words, gpus=8).config
    placement = placement_of(split)
    assert placement.trainer_nodes == (0,) and placement.slabs_by_node[0] == () and not placement.world_size
    assert placement.pools.keys() == {"rollout", "genrm:judge"} and node_gpus(split) == (0, 8, 8)
    with pytest.raises(ConfigError, match=r"placement\.split has no effect in an evaluation"):
        of_run(tmp_path, EvalOptions(), "placement.split=dynamic")
    with pytest.raises(ConfigError, match=r"placement\.genrm_gpu_sets: 0 of .* GPU sets for 1 GenRM"):
        of_run(tmp_path, EvalOptions(nodes=2), "placement.mode=partial")


@pytest.mark.parametrize("mode", ["colocated", "partial"])
def test_every_node_has_prompts_and_no_phase_a_trainer(tmp_path: Path, mode: str) -> None:
    sets = "placement.genrm_gpu_sets=1" if mode == "partial" else "placement.genrm_gpu_sets=0"
    config = of_run(tmp_path, EvalOptions(nodes=2), f"placement.mode={mode}", sets, gpus=8).config
    placement = placement_of(config)
    phases = (placement.sampling, *placement.scoring, placement.training)
    assert {role for phase in phases for role in phase.values()} == {"rollout", "genrm:judge"}
    assert all(set(phase) == set(placement.slabs) for phase in phases) and placement.trainer_nodes == (0, 1)
    assert len(placement.turns) == (mode == "colocated")


def test_greedy_sampling_takes_one_sample_unless_more_are_asked_for(tmp_path: Path) -> None:
    assert of_run(tmp_path, EvalOptions(temperature=0)).config.rollout.n == 1
    with pytest.raises(ConfigError, match="at temperature 0 all samples of a prompt are the same"):
        of_run(tmp_path, EvalOptions(temperature=0, n=4))


def test_rewards_of_a_model_folder_are_named_by_function_or_file() -> None:
    config = of_model().config
    first, second = config.rewards
    assert (first.name, first.path) == ("gsm8k", "builtin:gsm8k")
    assert (second.name, second.function) == ("brevity", "brevity")
    assert second.path.endswith("/my/rewards.py") and second.path.startswith("/")
    assert (config.rollout.max_response_tokens, config.data.prompt_key) == (64, "question")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, "--n is 0; write 1 or more"),
        ({"n": 4, "ks": (8,)}, "--k: write numbers from 1 to 4"),
        ({"n": 4, "ks": (0,)}, "--k: write numbers from 1 to 4"),
        ({"n": 9, "ks": (1, 2, 3, 4, 5, 6, 7)}, "--k: write at most 6 numbers"),
        ({"temperature": -1.0}, "--temperature: write a number from 0"),
        ({"temperature": float("nan")}, "--temperature: write a number from 0"),
        ({"pass_at": float("nan")}, "--pass-at: write a number"),
        ({"limit": -1}, "--limit: write 1 or more"),
        ({"nodes": -1}, "--nodes: write 1 or more"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        of_model(**options)


def test_a_comparison_of_one_sample_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("{completion}", "{completion_a}{completion_b}").replace(
        "name: judge,", "name: judge, judging: {by: pairwise},"
    ).replace('"(1)"', '"(1)", minimum: 0, maximum: 1')
    )  # fmt: skip
    base: RunConfig = load_run_config([path], [])
    with pytest.raises(ConfigError, match=r"genrms\[0\].judging.by: pairwise compares completions"):
        evaluation_settings(base, EvalOptions(n=1), (), MODEL, 0)


def test_data_and_rewards_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a model folder, not a run: write the data files after it"):
        bare_config(MODEL, BareModel(), ())
    with pytest.raises(ConfigError, match="--reward: two functions have the same name"):
        bare_config(MODEL, BareModel(rewards=("builtin:exact", "exact.py")), ("a.jsonl",))
    none = bare_config(MODEL, BareModel(), ("a.jsonl",))
    with pytest.raises(ConfigError, match="there is nothing to score with: write --reward"):
        evaluation_settings(none, EvalOptions(data=("a.jsonl",)), (), MODEL, 0)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    base = load_run_config([path], [])
    without = replace(base, data=replace(base.data, val_files=()))
    with pytest.raises(ConfigError, match=r"data\.val_files is empty: write the data files after the run"):
        evaluation_settings(without, EvalOptions(), (), MODEL, 0)


@pytest.mark.parametrize("word", [
    "trainer.total_iterations=3", "model.path=/x", "launch.nodes=2", "data.weights={a.jsonl: 2}",
    "data.shuffle=false", "rollout.oversample=2", "run.kind=rl", "run.share=group", "vision.train=all",
    "preference.beta=0.3", "launch.engine_gpus_per_node=4", "placement.send_changes=true",
])  # fmt: skip
def test_words_that_could_have_no_effect_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} has no effect in an evaluation"):
        of_model(word)


def test_words_that_say_how_an_evaluation_is_run_arrive() -> None:
    words = ("run.seed=5", "run.deterministic=true", "launch.node_silence_s=60", "launch.phase_timeout_s=50")
    config = of_model(*words).config
    assert (config.run.seed, config.run.deterministic) == (5, True)
    assert (config.launch.node_silence_s, config.launch.phase_timeout_s) == (60.0, 50.0)


def test_a_mistyped_word_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_pp"):
        of_model("rollout.top_pp=1")
