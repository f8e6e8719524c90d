"""TRL's side of the GRPO comparison: ``python -m tests.bench.trl_arm FOLDER CASE``
prints its step times and the mean number of tokens it trained on."""

import itertools
import json
import sys
import time
from pathlib import Path

from tests.bench.grpo_settings import GROUP, LR, THREADS, Case, case_of, digit_share as score


def digit_share(completions: list[str], **_: object) -> list[float]:
    return [score("", text, "") for text in completions]


def main(folder: Path, case: Case) -> tuple[list[float], float]:
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(THREADS)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ended: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ended.append(time.perf_counter())

    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=digit_share,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Clock()],
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_steps=case.iterations, num_generations=GROUP, per_device_train_batch_size=case.trl_batch,
            gradient_accumulation_steps=case.num_completions // case.trl_batch,
            max_completion_length=case.num_tokens,
            generation_kwargs={} if case.num_eos else {"min_new_tokens": case.num_tokens},
            temperature=1.0, beta=0.0, loss_type="dapo", epsilon=0.2, learning_rate=LR,
            lr_scheduler_type="constant", weight_decay=0.01, gradient_checkpointing=False,
            shuffle_dataset=False, disable_tqdm=True, logging_steps=case.iterations,
        ),
    )  # fmt: skip
    trainer.train()
    length = trainer.state.log_history[0]["completions/mean_length"]
    assert case.num_eos or length == case.num_tokens, f"completions have {length}, not {case.num_tokens}"
    assert set(case.eos_ids) <= set(trainer.eos_token_ids), "TRL ends completions at the same tokens"
    return [after - before for before, after in itertools.pairwise(ended)], length


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]), case_of(sys.argv[2]))))
