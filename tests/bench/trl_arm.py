"""TRL's side of the GRPO comparison: ``python -m tests.bench.trl_arm FOLDER TOKENS``
prints its step times."""

import itertools
import json
import sys
import time
from pathlib import Path

from tests.bench.grpo_settings import GROUP, ITERATIONS, LR, NUM_PROMPTS, THREADS
from tests.bench.grpo_settings import digit_share as score


def digit_share(completions: list[str], **_: object) -> list[float]:
    return [score("", text, "") for text in completions]


def main(folder: Path, num_tokens: int) -> list[float]:
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
            max_steps=ITERATIONS, per_device_train_batch_size=NUM_PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=num_tokens, generation_kwargs={"min_new_tokens": num_tokens},
            temperature=1.0, beta=0.0, loss_type="dapo", epsilon=0.2, learning_rate=LR,
            lr_scheduler_type="constant", weight_decay=0.01, gradient_checkpointing=False,
            shuffle_dataset=False, disable_tqdm=True, logging_steps=ITERATIONS,
        ),
    )  # fmt: skip
    trainer.train()
    lengths = trainer.state.log_history[0]["completions/mean_length"]
    assert lengths == num_tokens, f"completions have {lengths} tokens, not {num_tokens}"
    return [after - before for before, after in itertools.pairwise(ended)]


if __name__ == "__main__":
    times = main(Path(sys.argv[1]), int(sys.argv[2]))
    print("\n" + json.dumps(times))
