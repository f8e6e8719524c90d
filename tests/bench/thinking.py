"""What the second request of a judge that thinks costs: seconds of both requests. Prints the figures that
docs/judging.md quotes: `python -m tests.bench.thinking`, and without vLLM's prefix cache with `no-cache`."""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.contract.test_engine import options_for, run, sample
from tests.tiny_models import make_qwen3
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine
from yatt.records import message as m

QUESTIONS, QUESTION, THOUGHT, VERDICT = 16, 128, 256, 1
CHOICE = json.dumps({"choice": ["7", "8"]})


def seconds_of(engine: Engine, round_number: int, end: list[int]) -> tuple[float, float]:
    """Seconds of the thoughts about some questions, and of the verdicts after them."""
    prompts = [
        [20 + (round_number * QUESTIONS + q) % 200, *range(30, 29 + QUESTION)] for q in range(QUESTIONS)
    ]
    asked = [
        sample(
            f"t{q}",
            prompt_ids=m.pack_ids(ids),
            seed=q,
            max_tokens=THOUGHT,
            ignore_eos=True,
            stop=("</think>",),
        )
        for q, ids in enumerate(prompts)
    ]
    began_s = time.monotonic()
    thoughts = run(engine, *asked)
    between_s = time.monotonic()
    told = [
        sample(
            f"v{q}", prompt_ids=m.pack_ids([*ids, *m.unpack_ids(thoughts[f"t{q}"].token_ids), *end]), seed=q,
            temperature=0.0, max_tokens=VERDICT, structure=CHOICE, watched=(5, 6),
        )
        for q, ids in enumerate(prompts)
    ]  # fmt: skip
    run(engine, *told)
    return between_s - began_s, time.monotonic() - between_s


def main() -> None:
    """Measures one way."""
    has_cache = "no-cache" not in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        model = make_qwen3(Path(folder) / "judge", tied=True, layers=4)
        end = Tokenizer(model).encode_plain("\n</think>\n\n")
        options = options_for(
            model, max_model_tokens=512, max_num_seqs=QUESTIONS, kv_cache_bytes=256 << 20,
            deterministic=False, arguments={"enable_prefix_caching": has_cache},
        )  # fmt: skip
        engine = build_engine("vllm", options)
        engine.start()
        seconds_of(engine, 0, end)  # compiles grammars, fills caches of code
        first_s, second_s = seconds_of(engine, 1, end)
        engine.close()
    print(
        f"{QUESTIONS} questions of {QUESTION} tokens, thoughts of {THOUGHT}, cache {has_cache}: thoughts "
        f"{first_s:.2f} s, verdicts {second_s:.2f} s ({second_s / first_s:.1%})"
    )


if __name__ == "__main__":
    main()
