"""Rollouts of prompts with a picture: prepared files in yatt's engine against vLLM with PIL pictures.

python -m tests.bench.picture_rollouts FOLDER prepared|pil|pil-n     (one arm, in a process of its own)

An arm reads numbers of rounds from its standard input, and answers each with its seconds as JSON.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.bench.media_process import media_server
from tests.bench.quiet import Foreign
from tests.tiny_processors import write_processor
from tests.tiny_vision import IDS, make_vision_model
from tests.worker_process import write_run
from yatt.control.gpus.prepared_requests import PreparedRequests
from yatt.core.samples.placeholders import with_placeholders
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare_environment
from yatt.engine.protocol import EngineOptions
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m

NUM_PROMPTS, GROUP, NUM_TOKENS = 64, 8, 32
WIDTH, HEIGHT, MOST_PIXELS = 512, 384, 512 * 512
ROUNDS, WARM_UP = 7, 1
MOST_TOKENS, MOST_SEQUENCES, KV_CACHE_BYTES = 512, 64, 256 << 20
MOST_RATIO = 1.05
PREPARED, PIL, PIL_N = "prepared", "pil", "pil-n"
ARMS = (PREPARED, PIL, PIL_N)
TITLES = {
    PREPARED: "yatt, prepared files", PIL: "vLLM, PIL pictures", PIL_N: "vLLM, PIL pictures, n completions",
}  # fmt: skip
ANSWER, SHARED_MEMORY = "seconds ", "/dev/shm"
PICTURE = IDS["image_token_id"]

Round = Callable[[int], dict[str, float]]
"""Plays the round of a number; returns wall and processor seconds, and a sum over the sampled tokens."""


def picture_path(folder: Path, number: int, prompt: int) -> Path:
    return folder / "pictures" / f"{number}-{prompt}.jpg"


def write_pictures(folder: Path) -> None:
    """A smooth picture with grain for each prompt of each round, so that no round finds one prepared."""
    (folder / "pictures").mkdir()
    draw = np.random.default_rng(0)
    for number in range(WARM_UP + ROUNDS):
        for prompt in range(NUM_PROMPTS):
            corners = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            smooth = np.asarray(corners.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
            grain = smooth + draw.integers(-12, 13, smooth.shape, dtype=np.int16)
            image = Image.fromarray(grain.clip(0, 255).astype(np.uint8))
            image.save(picture_path(folder, number, prompt), quality=90)


def write_inputs(folder: Path) -> None:
    """The model, whose processor leaves the pictures as large as they are, and the pictures."""
    model = make_vision_model(folder / "model", "qwen3_vl")
    write_processor(folder / "model", size={"shortest_edge": 32 * 32, "longest_edge": MOST_PIXELS})
    write_pictures(folder)
    data = {"media_root": str(folder / "pictures"), "media_store": str(folder / "store")}
    write_run(folder, {"data": data, "model": {"path": model}, "media": {"cache_bytes": 128 << 20}})


def prompt_ids(prompt: int) -> list[int]:
    """A prompt with one mark of a picture, as a chat template makes it."""
    start, end = IDS["vision_start_token_id"], IDS["vision_end_token_id"]
    return [40, start, PICTURE, end, *range(60, 71), 80 + prompt]


def seed_of(number: int, prompt: int, index: int) -> int:
    return number * 10_000 + prompt * GROUP + index


def requests_of(folder: Path, number: int, digests: list[str]) -> list[m.SampleRequest]:
    tokens = picture_tokens(str(folder / "model"))
    requests = []
    for prompt, digest in enumerate(digests):
        ref = m.MediaRef(picture_path(folder, number, prompt).name, digest, WIDTH, HEIGHT)
        ids, media = with_placeholders(prompt_ids(prompt), [ref], tokens)
        requests += [
            m.SampleRequest(
                request_id=f"{prompt}/{index}", prompt_ids=m.pack_ids(ids), temperature=1.0, top_p=1.0,
                seed=seed_of(number, prompt, index), top_k=-1, max_tokens=NUM_TOKENS, ignore_eos=True,
                media=media,
            )
            for index in range(GROUP)
        ]  # fmt: skip
    return requests


@contextlib.contextmanager
def prepared_arm(folder: Path) -> Iterator[Round]:
    """yatt's engine. The pictures of a round are prepared by a media process, whose time counts."""
    model, kept = str(folder / "model"), folder / "kept"
    options = EngineOptions(
        model=model, dtype="float32", device="cpu", eos_ids=(2,), max_model_tokens=MOST_TOKENS,
        max_num_seqs=MOST_SEQUENCES, kv_cache_bytes=KV_CACHE_BYTES, deterministic=False, takes_pictures=True,
        most_pictures=1, media_folder=str(kept),
    )  # fmt: skip
    prepare_environment(device="cpu", threads=1)
    engine: Any = build_engine("vllm", options)
    engine.start()

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        media = runner.run(stack.enter_async_context(media_server(folder / "run", kept)))
        prepared = PreparedRequests(media.prepare, kept)

        async def with_prepared(requests: list[m.SampleRequest]) -> list[m.SampleRequest]:
            return await asyncio.gather(*map(prepared.with_prepared, requests))

        def play(number: int) -> dict[str, float]:
            files = [picture_path(folder, number, prompt) for prompt in range(NUM_PROMPTS)]
            digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]  # as in the data
            engine._reset_caches()
            began_s, began_cpu_s = time.perf_counter(), time.process_time() + media.cpu_s
            for request in runner.run(with_prepared(requests_of(folder, number, digests))):
                engine.add(request)
            done = []
            while engine.is_busy:
                done += engine.step()
            wall_s = time.perf_counter() - began_s
            cpu_s = time.process_time() + media.cpu_s - began_cpu_s
            return answered(wall_s, cpu_s, [m.unpack_ids(each.token_ids) for each in done])

        yield play
        runner.run(stack.aclose())
    engine.close()


@contextlib.contextmanager
def pil_arm(folder: Path, *, shares_prompts: bool) -> Iterator[Round]:
    """`vllm.LLM.generate`: it opens the pictures and prepares them itself.

    Args:
        shares_prompts: a prompt is one request of several completions, not a request for each.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "model"), dtype="float32", max_model_len=MOST_TOKENS, max_num_seqs=MOST_SEQUENCES,
        enforce_eager=True, enable_chunked_prefill=False, kv_cache_memory_bytes=KV_CACHE_BYTES,
        disable_log_stats=True, logprobs_mode="processed_logprobs", generation_config="vllm", seed=0,
        limit_mm_per_prompt={"image": 1, "video": 0}, skip_mm_profiling=True,
    )  # fmt: skip
    num, copies = (GROUP, 1) if shares_prompts else (1, GROUP)

    def play(number: int) -> dict[str, float]:
        llm.reset_prefix_cache()
        llm.llm_engine.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        asked, parameters = [], []
        for prompt in range(NUM_PROMPTS):
            with Image.open(picture_path(folder, number, prompt)) as file:
                image = file.convert("RGB")
            one = {"prompt_token_ids": prompt_ids(prompt), "multi_modal_data": {"image": image}}
            asked += [one] * copies
            parameters += [
                SamplingParams(
                    n=num, max_tokens=NUM_TOKENS, temperature=1.0, seed=seed_of(number, prompt, index),
                    logprobs=0, ignore_eos=True, detokenize=False,
                )
                for index in range(copies)
            ]  # fmt: skip
        done = llm.generate(asked, parameters, use_tqdm=False)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return answered(wall_s, cpu_s, [list(one.token_ids) for each in done for one in each.outputs])

    yield play


def answered(wall_s: float, cpu_s: float, completions: list[list[int]]) -> dict[str, float]:
    assert len(completions) == NUM_PROMPTS * GROUP
    assert {len(each) for each in completions} == {NUM_TOKENS}
    return {"wall_s": wall_s, "cpu_s": cpu_s, "tokens": float(sum(map(sum, completions)))}


def serve_rounds(folder: Path, arm: str) -> None:
    """Plays a round for each line of the standard input."""
    opened = prepared_arm(folder) if arm == PREPARED else pil_arm(folder, shares_prompts=arm == PIL_N)
    with opened as play:
        for line in sys.stdin:
            print(ANSWER + json.dumps(play(int(line))), flush=True)


class Arm:
    """An arm in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        argv = [sys.executable, "-m", "tests.bench.picture_rollouts", str(folder), name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def play(self, number: int) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(self._log.read_text()[-3000:])

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


def measure() -> tuple[list[dict[str, dict[str, float]]], float]:
    """Each round's answers by arm; and the share of the cores that others used."""
    rounds = []
    with (
        tempfile.TemporaryDirectory(prefix="yatt-", dir=SHARED_MEMORY) as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        write_inputs(folder)
        watch, arms = Foreign(), {}
        for arm in ARMS:  # one after the other, so that their starts do not compete
            arms[arm] = stack.enter_context(contextlib.closing(Arm(folder, arm)))
            arms[arm].play(0)
        for number in range(WARM_UP, WARM_UP + ROUNDS):
            turn = number % len(ARMS)
            rounds.append({arm: arms[arm].play(number) for arm in (*ARMS[turn:], *ARMS[:turn])})
            print(json.dumps({arm: round(one["cpu_s"], 2) for arm, one in rounds[-1].items()}), flush=True)
        stack.close()
        return rounds, watch.share()


def run() -> dict[str, Any]:
    rounds, foreign = measure()

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    def compared(arm: str, key: str) -> str:
        return spread(ratios(arm, key)) if arm != PREPARED else ""

    def ratios(other: str, key: str) -> list[float]:
        return [one[PREPARED][key] / one[other][key] for one in rounds]

    same = sum(len({one["tokens"] for one in each.values()}) == 1 for each in rounds)
    others = (PIL, PIL_N)
    return {
        "title": "Rollouts with a picture in each prompt",
        "how": (
            f"A random Qwen3-VL of three layers in float32; {NUM_PROMPTS} prompts with a JPEG of {WIDTH} x "
            f"{HEIGHT} ({WIDTH * HEIGHT // 1024} tokens) each, {GROUP} completions of {NUM_TOKENS} tokens, "
            "one thread. yatt's engine with prepared files: a media process prepares each picture once. "
            "vllm.LLM.generate with PIL pictures, which it opens and prepares itself: a request for each "
            "completion, as yatt sends them, with vLLM's cache of prepared pictures; or a request of "
            f"{GROUP} completions for each prompt. Same engine settings, seeds and lengths; each round has "
            f"other pictures, and caches are reset before it. {ROUNDS} rounds, interleaved. Processor "
            "seconds: those of the engine's process, and for yatt those of its media process too."
        ),
        "head": ["arm", "processor seconds (least to most)", "prepared files / it", "wall seconds",
                 "prepared files / it, wall"],
        "rows": [
            [TITLES[arm], spread([one[arm]["cpu_s"] for one in rounds]), compared(arm, "cpu_s"),
             spread([one[arm]["wall_s"] for one in rounds]), compared(arm, "wall_s")]
            for arm in ARMS
        ],
        "targets": [
            {"what": f"processor seconds, prepared files / {TITLES[other]}", "target": f"<= {MOST_RATIO}",
             "value": spread(ratios(other, "cpu_s")),
             "met": statistics.median(ratios(other, "cpu_s")) <= MOST_RATIO}
            for other in others
        ],
        "notes": [
            f"All arms sampled the same tokens in {same} of {ROUNDS} rounds. vLLM's own arms differ by "
            f"{statistics.median(one[PIL]['cpu_s'] / one[PIL_N]['cpu_s'] for one in rounds):.2f}: what it "
            "does for each request. yatt sends a request for each completion, so that each can go on in "
            f"another engine. Others used {foreign:.0%} of the cores, which wall seconds show."
        ],
    }  # fmt: skip


if __name__ == "__main__":
    serve_rounds(Path(sys.argv[1]), sys.argv[2])
