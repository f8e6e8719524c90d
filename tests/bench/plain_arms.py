"""What sampling and training cost at least: seconds of each round, by `vllm.LLM.generate` and a plain loop.

``python -m tests.bench.plain_arms ARM FOLDER``. `rollout`: the requests of one iteration. `train`: as many
tokens with transformers and torch: one forward, the clipped loss, one backward, one AdamW step.
`train-shared`: the same, and freed memory is returned to the system after each step, as on a slot that an
engine shares. Nothing of yatt is used.
"""

import ctypes
import functools
import json
import os
import sys
import time
from pathlib import Path

from tests.bench.grpo_settings import GROUP, LR, Case

CASE = Case("limits", 256, 6, num_prompts=8, num_tokens=64, trl_batch=0, iterations=8)
THREADS = 1
CLIP = 0.2


def prompts_of(folder: Path) -> list[str]:
    rows = (folder / "prompts.jsonl").read_text().splitlines()[: CASE.num_prompts]
    return [json.loads(row)["prompt"] for row in rows]


def rollout(folder: Path) -> list[float]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "model"), dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True,
        enable_chunked_prefill=False, kv_cache_memory_bytes=256 << 20, disable_log_stats=True,
        logprobs_mode="processed_logprobs", generation_config="vllm", seed=0,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    asked = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in prompts_of(folder)]
    taken = []
    for number in range(CASE.iterations):
        parameters = [
            SamplingParams(
                max_tokens=CASE.num_tokens, temperature=1.0, seed=number * 1000 + index, logprobs=0,
                ignore_eos=True, detokenize=False,
            )
            for index in range(CASE.num_completions)
        ]  # fmt: skip
        llm.reset_prefix_cache()  # as after an update of the weights
        began_s = time.perf_counter()
        done = llm.generate([each for each in asked for _ in range(GROUP)], parameters, use_tqdm=False)
        taken.append(time.perf_counter() - began_s)
        assert all(len(each.outputs[0].token_ids) == CASE.num_tokens for each in done)
    return taken


def train(folder: Path, *, is_shared: bool = False) -> list[float]:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    prompts = [tokenizer(text)["input_ids"] for text in prompts_of(folder)]
    longest, draw = max(map(len, prompts)) + CASE.num_tokens, torch.Generator().manual_seed(0)
    taken = []
    for _ in range(CASE.iterations):
        ids = torch.zeros((CASE.num_completions, longest), dtype=torch.long)
        attended, mask = torch.zeros_like(ids), torch.zeros(ids.shape)
        for row in range(CASE.num_completions):
            prompt = prompts[row // GROUP]
            end = len(prompt) + CASE.num_tokens
            completion = torch.randint(0, model.config.vocab_size, (CASE.num_tokens,), generator=draw)
            ids[row, :end] = torch.cat([torch.tensor(prompt), completion])
            attended[row, :end], mask[row, len(prompt) : end] = 1, 1.0
        advantages = torch.randn((CASE.num_completions, 1), generator=draw)
        began_s = time.perf_counter()
        logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logprobs - logprobs.detach())
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -(surrogate * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        taken.append(time.perf_counter() - began_s)
        if is_shared:
            del logits, logprobs, ratio, surrogate, loss
            ctypes.CDLL(None).malloc_trim(0)
    return taken


ARMS = {"rollout": rollout, "train": train, "train-shared": functools.partial(train, is_shared=True)}

if __name__ == "__main__":
    print("\n" + json.dumps(ARMS[sys.argv[1]](Path(sys.argv[2]))))
