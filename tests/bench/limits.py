"""Rollout, training and the whole step against what they cost at least, on the same model and tokens.

Each round has five runs, one after the other: yatt on one slot of one thread, `vllm.LLM.generate`, a plain
training loop, that loop with its memory returned after each step, and yatt with the next batch sampled while
this one is trained, on two slots.
"""

import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.bench.grpo_settings import GROUP, LR, WARM_UP
from tests.bench.grpo_step import ROOT, call, prepare
from tests.bench.plain_arms import CASE, THREADS
from tests.bench.quiet import MOST_FOREIGN, Foreign

ROUNDS = 9
MOST_ROLLOUT, MOST_TRAIN = 1.05, 1.1


def ours(folder: Path, name: str, **more: Any) -> dict[str, float]:
    """Median seconds of the parts of a steady iteration."""
    run = folder / name
    settings = {
        "run.dir": run, "data.train_files": f"[{folder / 'prompts.jsonl'}]", "data.shuffle": "false",
        "data.max_prompt_tokens": 64, "data.ground_truth_key": "''",
        "model.path": folder / "model", "model.dtype": "float32",
        "launch.device": "cpu", "launch.gpus_per_node": 1, "launch.threads_per_worker": THREADS,
        "rollout.n": GROUP, "rollout.max_response_tokens": CASE.num_tokens, "rollout.ignore_eos": "true",
        "rollout.engine": "vllm", "rollout.max_num_seqs": 64, "rollout.kv_cache_bytes": 256 << 20,
        "rewards": f"[{{name: digits, path: '{ROOT}/tests/bench/grpo_settings.py', function: digit_share}}]",
        "optimizer.lr": f"{LR:.1e}", "trainer.total_iterations": CASE.iterations,
        "trainer.train_batch_size": CASE.num_prompts, "trainer.mini_batch_size": CASE.num_prompts,
        "trainer.max_tokens_per_micro_batch": 8192, **more,
    }  # fmt: skip
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")
    call(["-m", "yatt.cli.main", "run", str(empty), *(f"{key}={value}" for key, value in settings.items())])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if WARM_UP < row["training/global_step"] < CASE.iterations]
    assert min(row["response_length/min"] for row in steady) == CASE.num_tokens
    phases: dict[str, Counter[int]] = {"rollout": Counter(), "train": Counter()}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "phase.end" and event["phase"] in phases:
            phases[event["phase"]][event["iteration"]] += event["seconds"]
    kept = range(WARM_UP + 1, CASE.iterations)
    parts = ("gen", "update_actor", "step")
    found = {key: statistics.median(row[f"timing_s/{key}"] for row in steady) for key in parts}
    whole = {f"phase {name}": statistics.median(times[i] for i in kept) for name, times in phases.items()}
    return {**found, **whole}


def plain(folder: Path, arm: str) -> float:
    """Median seconds of a steady round."""
    output = call(["-m", "tests.bench.plain_arms", arm, str(folder)], threads=THREADS)
    return statistics.median(json.loads(output.strip().splitlines()[-1])[WARM_UP:])


def one_round(folder: Path, number: int) -> dict[str, float]:
    watch = Foreign()
    mine = ours(folder, f"turns-{number}")
    generate, train, shared = (plain(folder, arm) for arm in ("rollout", "train", "train-shared"))
    ahead = ours(
        folder, f"ahead-{number}",
        **{
            "launch.nodes": 2, "placement.mode": "disaggregated", "placement.trainer_nodes": 1,
            "rollout.ahead": 1, "rollout.max_policy_age": 1,
        },
    )  # fmt: skip
    return {
        "rollout": mine["gen"] / generate,
        "rollout phase": mine["phase rollout"] / generate,
        "training": mine["update_actor"] / train,
        "training, shared": mine["update_actor"] / shared,
        "training phase": mine["phase train"] / train,
        "step, in turns": mine["step"] / (generate + train),
        "step, ahead": ahead["step"] / max(generate, train),
        "generate_s": generate, "train_s": train, "shared_s": shared, "foreign": watch.share(),
    }  # fmt: skip


def run() -> dict[str, Any]:
    """Measures `ROUNDS` rounds."""
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        folder = Path(name)
        parameters = prepare(folder, CASE)
        rounds = []
        for number in range(ROUNDS):
            rounds.append(one_round(folder, number))
            print(json.dumps({key: round(value, 3) for key, value in rounds[-1].items()}), flush=True)
    found = {key: sorted(each[key] for each in rounds) for key in rounds[0]}
    is_valid = statistics.median(found["foreign"]) <= MOST_FOREIGN

    def words(key: str) -> str:
        return f"{statistics.median(found[key]):.2f} ({found[key][0]:.2f} to {found[key][-1]:.2f})"

    targets = [
        {
            "what": what, "target": f"<= {most}",
            "value": words(key) + ("" if is_valid else "; not valid, others used the cores"),
            "met": is_valid and statistics.median(found[key]) <= most,
        }
        for what, key, most in (
            ("rollout / vllm.LLM.generate", "rollout", MOST_ROLLOUT),
            ("update / plain loop", "training", MOST_TRAIN),
        )
    ]  # fmt: skip
    titles = {
        "rollout": "sampling / generate", "rollout phase": "phase rollout with its switch / generate",
        "training": "update / plain loop",
        "training, shared": "update / plain loop that returns its memory after each step, as ours does",
        "training phase": "phase train with its switch / plain loop",
        "step, in turns": "step / (generate + plain loop), the serial limit",
        "step, ahead": "step with rollout.ahead 1 / max(generate, plain loop), the overlapped limit",
    }  # fmt: skip
    return {
        "title": "Against the limits of the libraries",
        "how": (
            f"Qwen3 in float32 with {parameters / 1e6:.1f} M parameters; {CASE.num_completions} completions "
            f"of {CASE.num_tokens} tokens an iteration, one optimizer step, one thread a worker. Limits: "
            "vllm.LLM.generate on the same requests with the same engine settings (seeds and log-probs of "
            "each token, prefix cache reset before each round), and a plain loop of transformers and "
            "torch.optim.AdamW over as many padded tokens. In turns: one slot that engine and trainer share. "
            "Ahead: two slots, so that engine, trainer and controllers share 2 cores. Medians of steady "
            f"iterations; {ROUNDS} rounds of the five runs, interleaved."
        ),
        "head": ["ratio", "median (least to most)"],
        "rows": [[text, words(key)] for key, text in titles.items()],
        "notes": [
            f"generate {statistics.median(found['generate_s']):.2f} s, plain loop "
            f"{statistics.median(found['train_s']):.2f} s, where it returns its memory "
            f"{statistics.median(found['shared_s']):.2f} s; others used "
            f"{statistics.median(found['foreign']):.0%} of the cores."
        ],
        "targets": targets,
    }
