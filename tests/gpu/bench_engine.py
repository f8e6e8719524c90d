"""One engine beside plain vLLM: tokens a second, sleep and wake, what it leaves on the device, updates of
weights, agreement with the trainer.

    python -m tests.gpu.bench_engine [--toy] [--only CASE ...] --out FOLDER

The weights come from a trainer rank in a process of its own, as in a run; its log-probs of a probe are
compared with the engine's. What is left on the device is the difference of used memory before and after.
"""

import json
import shutil
import time
from pathlib import Path

from tests.gpu.cases import Benchmark, Case, Place, Row, run_in_process, words_of
from yatt.engine.build import build_engine, import_library
from yatt.engine.environment import choose_device, prepare_environment
from yatt.engine.protocol import EngineOptions
from yatt.engine.weights.published import read_publication
from yatt.records import message as m

PROBE = [[(7 * row + 3 * at) % 59 + 3 for at in range(24)] for row in range(4)]
TURNS = 3
CPU_KV_CACHE_BYTES = 64 << 20
GPU_MEMORY_UTILIZATION = 0.85
PART_S = 240.0
PROBE_FILE = "probe.json"


def cases(is_toy: bool) -> list[Case]:
    """For each size: the trainer's part, yatt's engine, plain vLLM."""
    sizes = [("toy", 4, 16, 16)] if is_toy else [("qwen3-0.6b", 64, 128, 256), ("qwen3-1.7b", 128, 512, 512)]
    return [
        Case(
            f"{shape} {part}",
            {"part": part, "shape": shape, "requests": n, "prompt": prompt, "new": new},
            shape,
            PART_S,
        )
        for shape, n, prompt, new in sizes
        for part in ("trainer", "engine", "plain")
    ]


def measure(settings: Row, place: Place) -> Row:
    """Measures one part."""
    parts = {"trainer": measure_trainer, "engine": measure_engine, "plain": measure_plain}
    return parts[settings["part"]](settings, place)


def summary(rows: dict[str, Row]) -> Row:
    """Tokens a second of yatt's engine over those of plain vLLM."""
    rates = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    shapes = {
        name.removesuffix(" plain") for name in rates if f"{name.removesuffix(' plain')} engine" in rates
    }
    return {
        f"{shape}: engine over plain": round(rates[f"{shape} engine"] / rates[f"{shape} plain"], 3)
        for shape in sorted(shapes)
        if f"{shape} plain" in rates
    }


def measure_trainer(settings: Row, place: Place) -> Row:
    """A trainer rank's build, publication, sleep and wake; leaves its host copy for the engine."""
    from tests.gpu.rank import Rank

    dtype = "bfloat16" if choose_device("auto") == "cuda" else "float32"
    folder = published_by(settings, place)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    began_s = time.perf_counter()
    rank = Rank(place.model(settings["shape"]), dtype, stem=folder / "rank-00000")
    row: Row = {"build_s": time.perf_counter() - began_s}
    began_s = time.perf_counter()
    probe = rank.publish(folder / "v1", PROBE)
    row["publish_s"] = time.perf_counter() - began_s
    host = rank.worker._ready.host
    row["host_gib"] = host.host_bytes / 2**30
    row["is_pinned"] = all(held.host.is_pinned() for held in host._held.values() if held.area)
    row["sleep_s"] = _seconds(lambda: rank.worker.handle(m.Sleep()))
    row["used_mib_asleep"] = _used_bytes() / 2**20
    row["wake_s"] = _seconds(lambda: rank.worker.handle(m.Wake()))
    row["second_sleep_s"] = _seconds(lambda: rank.worker.handle(m.Sleep()))
    (folder / PROBE_FILE).write_text(json.dumps(probe))
    return row


def published_by(settings: Row, place: Place) -> Path:
    """Folder of the trainer's host copy and publication."""
    return place.memory / settings["shape"]


def measure_engine(settings: Row, place: Place) -> Row:
    """yatt's vLLM engine: it starts, samples, and then sleeps, wakes and takes weights some times."""
    folder = published_by(settings, place)
    if not (folder / PROBE_FILE).exists():  # the trainer's row is of an earlier call
        log = place.out / "logs" / f"engine-{settings['shape']}-publish.log"
        published = run_in_process(
            "tests.gpu.bench_engine", words_of({**settings, "part": "trainer"}, place), log, PART_S
        )
        if "failed" in published:
            return published
    device = choose_device("auto")
    prepare_environment(device=device, threads=1)
    import_library("vllm")
    options = EngineOptions(
        model=str(place.model(settings["shape"])), dtype="bfloat16" if device == "cuda" else "float32",
        device=device, eos_ids=(2,), max_model_tokens=settings["prompt"] + settings["new"],
        max_num_seqs=settings["requests"], weights_are_replaced=True,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        kv_cache_bytes=0 if device == "cuda" else CPU_KV_CACHE_BYTES,
    )  # fmt: skip
    before_bytes, engine, row = _used_bytes(), build_engine("vllm", options), Row()
    row["start_s"] = _seconds(engine.start)
    row["awake_mib"] = (_used_bytes() - before_bytes) / 2**20
    row["rates"] = [_rate(engine, settings, turn) for turn in range(TURNS)]
    row["tokens_per_s"] = row["rates"][-1]
    row["turns"] = [_turn(engine, folder, before_bytes, settings, TURNS + turn) for turn in range(TURNS)]
    _weights(engine, folder, row)
    engine.add(_sample("aborted", PROBE[0], seed=0, max_tokens=settings["new"]))
    engine.step()
    row["aborted"] = [completion.finish_reason for completion in engine.abort()]
    row["sleep_s_after_abort"] = _seconds(engine.sleep)
    row["left_mib_after_abort"] = (_used_bytes() - before_bytes) / 2**20
    engine.close()
    return row


def _turn(engine, folder: Path, before_bytes: int, settings: Row, turn: int) -> Row:
    """One sleep, wake and update, then a batch of samples, as in an iteration."""
    row: Row = {"sleep_s": _seconds(engine.sleep), "left_mib": (_used_bytes() - before_bytes) / 2**20}
    row["wake_s"] = _seconds(engine.wake)
    row["update_s"] = _seconds(lambda: engine.load_weights(1, str(folder / "v1")))
    expected = json.loads((folder / PROBE_FILE).read_text())
    pairs = [
        (a, b) for x, y in zip(expected, engine.score(PROBE), strict=True) for a, b in zip(x, y, strict=True)
    ]
    row["logprob_difference_mean"] = sum(abs(a - b) for a, b in pairs) / len(pairs)
    row["tokens_per_s"] = _rate(engine, settings, turn)
    return row


def _weights(engine, folder: Path, row: Row) -> None:
    """Adds the rate of updates, and whether the engine has the published bits."""
    from yatt.weights.published import PublishedWeights

    publication = read_publication(str(folder / "v1"), 1)
    published = PublishedWeights(publication.stems, publication.stamp)
    row["weights_gb"] = sum(tensor.nbytes for _, tensor in published) / 1e9
    row["update_gb_per_s"] = row["weights_gb"] / row["turns"][-1]["update_s"]
    compared = engine.compare_weights(1, str(folder / "v1"))
    row["compared"], row["differing"] = compared.num_compared, list(compared.differing)


def measure_plain(settings: Row, place: Place) -> Row:
    """`vllm.LLM.generate` with the same requests."""
    device = choose_device("auto")
    prepare_environment(device=device, threads=1)
    from vllm import LLM, SamplingParams

    on_cpu = {
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, "enforce_eager": True, "enable_chunked_prefill": False,
    }  # fmt: skip
    llm = LLM(
        str(place.model(settings["shape"])), dtype="bfloat16" if device == "cuda" else "float32", seed=0,
        max_model_len=settings["prompt"] + settings["new"], max_num_seqs=settings["requests"],
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION, logprobs_mode="processed_logprobs",
        generation_config="vllm", **({} if device == "cuda" else on_cpu),
    )  # fmt: skip
    rates = []
    for turn in range(TURNS):
        asked = [
            SamplingParams(
                max_tokens=settings["new"], ignore_eos=True, seed=seed, temperature=1.0, logprobs=0,
                detokenize=False,
            )
            for seed in range(settings["requests"])
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in _prompts(settings, turn)]
        began_s = time.perf_counter()
        done = llm.generate(prompts, asked, use_tqdm=False)
        sampled = sum(len(each.outputs[0].token_ids) for each in done)
        rates.append(sampled / (time.perf_counter() - began_s))
    return {"tokens_per_s": rates[-1], "rates": rates}


def _rate(engine, settings: Row, turn: int) -> float:
    """Sampled tokens a second. The first turn compiles or captures kernels."""
    for number, ids in enumerate(_prompts(settings, turn)):
        engine.add(_sample(f"{turn}/{number}", ids, seed=number, max_tokens=settings["new"]))
    began_s, sampled = time.perf_counter(), 0
    while engine.is_busy:
        sampled += sum(len(each.token_ids) // 4 for each in engine.step())
    return sampled / (time.perf_counter() - began_s)


def _sample(request_id: str, ids: list[int], *, seed: int, max_tokens: int) -> m.SampleRequest:
    """A request whose completion has all its tokens."""
    return m.SampleRequest(
        request_id=request_id, prompt_ids=m.pack_ids(ids), seed=seed, temperature=1.0, top_p=1.0, top_k=-1,
        max_tokens=max_tokens, ignore_eos=True,
    )  # fmt: skip


def _prompts(settings: Row, turn: int) -> list[list[int]]:
    """Other prompts in each turn, so that none is in the prefix cache."""
    return [
        [(turn + number + 5 * at) % 59 + 3 for at in range(settings["prompt"])]
        for number in range(settings["requests"])
    ]


def _seconds(call) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _used_bytes() -> int:
    """Of the device, by all processes; 0 on CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    Benchmark("engine", __doc__, cases, measure, summary).main()
