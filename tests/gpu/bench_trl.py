"""A whole GRPO step, colocated: yatt's against that of TRL with its colocated vLLM.

    python -m tests.gpu.bench_trl [--toy] [--only CASE ...] --out FOLDER

Same model, prompts a step, completions, tokens of a completion, one optimizer step. TRL trains bfloat16
weights with moments in bfloat16; yatt has float32 main copies and moments, so it moves more bytes. On CPU TRL
samples with transformers.
"""

import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Callable

from tests.gpu.cases import Benchmark, Case, Place, Row
from tests.gpu.colocated import figures, finish, keep, run_file

SIZES = {"toy": (4, 4, 16), "qwen3-0.6b": (16, 8, 256)}
"""Prompts of a step, completions of a prompt, tokens of a completion; as `colocated.run_file` has them."""
TRL_BATCH = 16
TRL_GPU_MEMORY = 0.5


def cases(is_toy: bool) -> list[Case]:
    """Both sides."""
    shape, steps = ("toy", 4) if is_toy else ("qwen3-0.6b", 8)
    return [
        Case(side, {"side": side, "shape": shape, "iterations": steps}, shape, 270)
        for side in ("yatt", "trl")
    ]


def measure(settings: Row, place: Place) -> Row:
    """Measures one side."""
    if settings["side"] == "yatt":
        return measure_yatt(settings, place)
    if importlib.util.find_spec("trl") is None:
        return {"left_out": "trl is not installed"}
    return measure_trl(settings, place)


def measure_yatt(settings: Row, place: Place) -> Row:
    """A colocated run without checkpoints."""
    run = run_file(settings, place, "yatt")
    said = finish(run)
    found = figures(run)
    keep(run, place.out / "yatt")
    row = {"step_s": found["median"].get("timing_s/step"), "median": found["median"]}
    return row | ({"failed": said} if said else {})


def measure_trl(settings: Row, place: Place) -> Row:
    """TRL's trainer in this process."""
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517",
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
    }  # fmt: skip
    import datasets
    import torch
    import transformers
    import trl

    ended: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ended.append(time.perf_counter())

    trainer = trl.GRPOTrainer(
        model=str(place.model(settings["shape"])),
        reward_funcs=_letters(),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{i} plus {i % 7} is"} for i in range(512)]),
        callbacks=[Clock()],
        args=trl.GRPOConfig(**_trl_settings(settings, place, is_cuda=torch.cuda.is_available())),
    )
    trainer.train()
    steps_s = [after - before for before, after in itertools.pairwise(ended)]
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "step_s": statistics.median(steps_s[1:]), "steps_s": steps_s, "peak_gib": peak_gib,
        "mean_length": trainer.state.log_history[0].get("completions/mean_length"),
    }  # fmt: skip


def _letters() -> Callable[..., list[float]]:
    """The reward of yatt's run, as a function of TRL's kind."""
    return lambda completions, **_: [sum(c in "abcdefghijklm" for c in text) / 8 for text in completions]


def _trl_settings(settings: Row, place: Place, *, is_cuda: bool) -> Row:
    prompts, group, new = SIZES[settings["shape"]]
    engine = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": 384, "vllm_gpu_memory_utilization": TRL_GPU_MEMORY,
    }  # fmt: skip
    return {
        "output_dir": str(place.work / "trl"), "bf16": is_cuda, "report_to": "none", "save_strategy": "no",
        "max_steps": settings["iterations"], "num_generations": group, "max_completion_length": new,
        "per_device_train_batch_size": TRL_BATCH,
        "gradient_accumulation_steps": prompts * group // TRL_BATCH,
        "generation_kwargs": {"min_tokens" if is_cuda else "min_new_tokens": new}, "temperature": 1.0,
        "beta": 0.0, "loss_type": "dapo", "learning_rate": 1e-6, "lr_scheduler_type": "constant",
        "gradient_checkpointing": False, "optim": "adamw_torch_fused" if is_cuda else "adamw_torch",
        "shuffle_dataset": False, "disable_tqdm": True, "logging_steps": 1,
        "model_init_kwargs": {"dtype": "bfloat16" if is_cuda else "float32"},
        **(engine if is_cuda else {"use_cpu": True}),
    }  # fmt: skip


def summary(rows: dict[str, Row]) -> Row:
    """Our seconds of a step over theirs."""
    if not rows.keys() >= {"yatt", "trl"}:
        return {}
    return {"yatt over trl": round(rows["yatt"]["step_s"] / rows["trl"]["step_s"], 3)}


if __name__ == "__main__":
    Benchmark("trl", __doc__, cases, measure, summary).main()
