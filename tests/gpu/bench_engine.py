"""One engine: tokens a second, sleep and wake, what it leaves on the device, weight updates, agreement.

    python -m tests.gpu.bench_engine [--toy] [--shapes qwen3-1.7b] [--out FOLDER]

The weights come from a trainer rank in a process of its own, as in a run; its log-probs of a probe are
compared with the engine's. What is left on the device is the difference of used memory before and after.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.shapes import SHAPES, arguments, make_model, show
from yatt.engine.build import build_engine, import_library
from yatt.engine.environment import choose_device, choose_engine, prepare
from yatt.engine.protocol import EngineOptions
from yatt.engine.published import read_publication
from yatt.records import message as m

PROBE = [[(7 * row + 3 * at) % 59 + 3 for at in range(24)] for row in range(4)]


def publish(model: Path, folder: Path) -> None:
    """The trainer's process: weights and the probe's log-probs."""
    from tests.gpu.rank import Rank

    dtype = "bfloat16" if choose_device("auto") == "cuda" else "float32"
    rank = Rank(model, dtype, stem=folder / "rank-00000")
    (folder / "probe.json").write_text(json.dumps(rank.publish(folder / "v1", PROBE)))


def measure(model: Path, folder: Path, *, toy: bool) -> dict:
    """The engine's process."""
    device = choose_device("auto")
    kind = "transformers" if toy else choose_engine("auto", "rollout.engine")
    prepare(device=device, threads=1)
    import_library(kind)
    asked = (4, 16, 8) if toy else (128, 512, 512)
    num_requests, prompt_tokens, max_tokens = asked
    options = EngineOptions(
        model=str(model), dtype="bfloat16" if device == "cuda" else "float32", device=device, eos_ids=(2,),
        max_model_tokens=prompt_tokens + max_tokens, max_num_seqs=num_requests, weights_are_replaced=True,
    )  # fmt: skip
    before_bytes, engine, row = _used_bytes(), build_engine(kind, options), {"engine": kind}
    row["start_s"], _ = _timed(engine.start)
    row["awake_gib"] = (_used_bytes() - before_bytes) / 2**30
    row["tokens_per_s"] = _throughput(engine, num_requests, prompt_tokens, max_tokens)
    row["sleep_s"], _ = _timed(engine.sleep)
    row["left_mib"] = (_used_bytes() - before_bytes) / 2**20
    row["wake_s"], _ = _timed(engine.wake)
    row["update_s"], _ = _timed(lambda: engine.load_weights(1, str(folder / "v1")))
    from yatt.weights.published import PublishedWeights

    publication = read_publication(str(folder / "v1"), 1)
    published = PublishedWeights(publication.stems, publication.stamp)
    row["weights_gb"] = sum(tensor.nbytes for _, tensor in published) / 1e9
    row["update_gb_per_s"] = row["weights_gb"] / row["update_s"]
    compared = engine.compare_weights(1, str(folder / "v1"))
    row["compared"], row["differing"] = compared.num_compared, list(compared.differing)
    expected = json.loads((folder / "probe.json").read_text())
    pairs = [
        (a, b) for x, y in zip(expected, engine.score(PROBE), strict=True) for a, b in zip(x, y, strict=True)
    ]
    row["logprob_difference_mean"] = sum(abs(a - b) for a, b in pairs) / len(pairs)
    engine.close()
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _throughput(engine, num_requests: int, prompt_tokens: int, max_tokens: int) -> float:
    """Sampled tokens a second, the second time: kernels are compiled or captured in the first."""
    rates = []
    for turn in range(2):
        for number in range(num_requests):
            ids = [(turn + number + 5 * at) % 59 + 3 for at in range(prompt_tokens)]
            engine.add(
                m.Sample(
                    request_id=f"{turn}/{number}", prompt_ids=m.pack_ids(ids), seed=number,
                    temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens, ignore_eos=True,
                )
            )  # fmt: skip
        began_s, sampled = time.perf_counter(), 0
        while engine.is_busy:
            sampled += sum(len(each.token_ids) // 4 for each in engine.step())
        rates.append(sampled / (time.perf_counter() - began_s))
    return rates[-1]


def _timed(call) -> tuple[float, object]:
    began_s = time.perf_counter()
    given = call()
    return time.perf_counter() - began_s, given


def _used_bytes() -> int:
    """Of the device, by whoever; 0 on CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def in_process(*words: str) -> str:
    """This module with other arguments; gives its last line."""
    argv = [sys.executable, "-m", "tests.gpu.bench_engine", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]} failed:\n{done.stderr[-3000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def main() -> None:
    if sys.argv[1:2] == ["--publish"]:
        publish(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["--engine"]:
        print(json.dumps(measure(Path(sys.argv[2]), Path(sys.argv[3]), toy=sys.argv[4:] == ["--toy"])))
        return
    given = arguments(__doc__.split("\n")[0])
    rows = []
    for name in given.shapes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
            model = make_model(SHAPES[name], Path(disk) / "model")
            in_process("--publish", str(model), memory)
            row = json.loads(in_process("--engine", str(model), memory, *(["--toy"] if given.toy else [])))
            rows.append({"shape": name, **row})
    show("engine", rows, given.out)


if __name__ == "__main__":
    main()
