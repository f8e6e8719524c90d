"""A whole GRPO step, ours (vLLM, megatron-core, weight sync, own processes) against TRL's GRPOTrainer.

Same weights, tokenizer, prompts, group size, temperature, number of tokens, optimizer steps and cores. The
arms run in turn, each in processes of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.grpo_settings import CASES, GROUP, ITERATIONS, LR, NUM_PROMPTS, THREADS, WARM_UP, Case
from tests.bench.quiet import MOST_FOREIGN, Foreign
from tools.tiny_model import make_model, make_tokenizer

PAIRS = 3
TARGET = 0.6
LIMIT_S = 400
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")


def prepare(folder: Path, case: Case) -> int:
    """Prompts, tokenizer, model; gives the number of parameters."""
    prompts = [f"Question {i}: how much is {17 * i % 89} plus {23 * i % 97}? Answer:" for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    words = "the sum of two numbers is found by adding their digits from right to left and carrying tens"
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"{text} {words} {n}"}) + "\n" for n, text in enumerate(prompts))
    )
    vocab_size = make_tokenizer(folder / "model", [corpus], 1024)
    return make_model(
        folder / "model",
        vocab_size=vocab_size,
        hidden_size=case.hidden_size,
        layers=case.layers,
        max_tokens=256,
        seed=0,
    )


def ours(folder: Path, name: str, num_tokens: int) -> tuple[list[float], dict[str, list[float]]]:
    """Step times after the warm-up, and the seconds of each part."""
    run = folder / name
    settings = {
        "run.dir": run, "data.train_files": f"[{folder / 'prompts.jsonl'}]", "data.shuffle": "false",
        "data.max_prompt_tokens": 64, "model.path": folder / "model", "model.dtype": "float32",
        "launch.device": "cpu", "launch.gpus_per_node": THREADS, "launch.threads_per_worker": 1,
        "rollout.n": GROUP, "rollout.max_response_tokens": num_tokens, "rollout.ignore_eos": "true",
        "rollout.engine": "vllm", "rollout.max_num_seqs": 64, "rollout.kv_cache_bytes": 128 << 20,
        "rewards": f"[{{name: digits, path: '{ROOT}/tests/bench/grpo_settings.py', function: digit_share}}]",
        "optimizer.lr": f"{LR:.1e}", "trainer.total_iterations": ITERATIONS,
        "trainer.train_batch_size": NUM_PROMPTS, "trainer.mini_batch_size": NUM_PROMPTS,
        "trainer.max_tokens_per_micro_batch": 8192,
    }  # fmt: skip
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")
    argv = ["-m", "yatt.cli.main", "run", str(empty), *(f"{key}={value}" for key, value in settings.items())]
    call(argv)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if WARM_UP < row["training/global_step"] < ITERATIONS]
    assert all(row["response_length/min"] == num_tokens for row in steady), "every completion has all tokens"
    parts = {part: [row.get(f"timing_s/{part}", 0.0) for row in steady] for part in PARTS}
    return [row["timing_s/step"] for row in steady], parts | phases(run)


def phases(run: Path) -> dict[str, list[float]]:
    """Seconds of each whole phase, switch included, by iteration."""
    seen: dict[str, Counter[int]] = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "phase.end" and WARM_UP < event["iteration"] < ITERATIONS:
            seen.setdefault(f"phase {event['phase']}", Counter())[event["iteration"]] += event["seconds"]
    return {name: list(times.values()) for name, times in seen.items()}


def theirs(folder: Path, num_tokens: int) -> list[float]:
    """TRL's step times after the warm-up."""
    output = call(["-m", "tests.bench.trl_arm", str(folder), str(num_tokens)])
    times: list[float] = json.loads(output.strip().splitlines()[-1])
    return times[WARM_UP - 1 : -1]


def call(argv: list[str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@dataclass(frozen=True)
class Measured:
    """One case's pairs: (our step, TRL's step, cores used by others beside each)."""

    case: Case
    parameters: int
    pairs: list[tuple[float, float, float, float]]
    parts: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.parameters / 1e6:.1f} M parameters, {self.case.num_tokens} tokens"

    def rows(self) -> list[list[str]]:
        return [
            [self.name, f"{mine:.3f} s", f"{other:.3f} s", f"{mine / other:.2f}", f"{us:.0%} and {them:.0%}"]
            for mine, other, us, them in self.pairs
        ]

    def target(self) -> dict[str, Any]:
        ratios = [mine / other for mine, other, *_ in self.pairs]
        disturbed = max(share for _, _, *shares in self.pairs for share in shares)
        is_valid, ratio = disturbed <= MOST_FOREIGN, statistics.median(ratios)
        return {
            "what": f"yatt / TRL, median ratio, {self.name}", "target": f"<= {TARGET}",
            "value": f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            + ("" if is_valid else f"; not valid, others used up to {disturbed:.0%} of the cores"),
            "met": is_valid and ratio <= TARGET,
        }  # fmt: skip

    def note(self) -> str:
        where = ", ".join(f"{part} {seconds * 1e3:.0f}" for part, seconds in self.parts.items())
        return f"Where our step goes with {self.name}, ms: {where}."


def measure(case: Case) -> Measured:
    """Both arms in turn."""
    pairs, parts = [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        folder = Path(name)
        parameters = prepare(folder, case)
        for pair in range(PAIRS):
            foreign = Foreign()
            step_s, measured = ours(folder, f"run{pair}", case.num_tokens)
            beside_us, foreign = foreign.share(), Foreign()
            other_s = statistics.median(theirs(folder, case.num_tokens))
            pairs.append((statistics.median(step_s), other_s, beside_us, foreign.share()))
            for part, times in measured.items():
                parts[part] += statistics.median(times) / PAIRS
    return Measured(case, parameters, pairs, parts)


def run() -> dict[str, Any]:
    measured = [measure(case) for case in CASES]
    return {
        "title": "A whole GRPO step against TRL",
        "how": f"Qwen3 in float32, {NUM_PROMPTS} prompts x {GROUP} completions of fixed length "
        "(end-of-sequence ignored), one optimizer step, temperature 1, no "
        f"KL term, no gradient checkpointing, {THREADS} threads in all. Ours: colocated on {THREADS} slots "
        "of one thread, on each a vLLM engine and a megatron-core rank that take turns, with leases, weight "
        "publication, sync probe and importance correction. TRL: GRPOTrainer with transformers' generate, in "
        f"one process of {THREADS} threads. Median of {ITERATIONS - WARM_UP - 1} steady steps of each run; "
        f"arms in turn, {PAIRS} pairs a case.",
        "head": ["case", "yatt, step", "TRL, step", "ratio", "cores used by others"],
        "rows": [row for one in measured for row in one.rows()],
        "targets": [one.target() for one in measured],
        "notes": [one.note() for one in measured],
    }
