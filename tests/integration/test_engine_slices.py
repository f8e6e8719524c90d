"""A vLLM engine on several nodes has the same parameters from slices as from whole tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import needs
from tests.runs import ROOT
from tests.tiny_models import make_qwen3, make_sigmoid_moe, make_windowed

pytestmark = [needs("vllm"), pytest.mark.slow]


NUM_RANKS = 2
WRONG = "model.layers.0.self_attn.o_proj.weight"
"""A tensor whose cut is planted wrong in the last publication."""


def told_by_ranks(folder: Path, kind: str) -> list[dict]:
    for seed, name in enumerate(("first", "other")):
        if kind == "deepseek_v3":
            make_sigmoid_moe(folder / name, kind, seed=seed)
        elif kind == "olmo3":
            make_windowed(folder / name, kind, seed=seed)
        else:
            make_qwen3(folder / name, tied=True, seed=seed, kv_heads=1)
    command = [sys.executable, "-m", "tests.sliced_engine", str(folder)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(NUM_RANKS), WRONG], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        assert [rank.wait(500) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("kind", ["one key and value head on two ranks", "deepseek_v3", "olmo3"])
def test_slices_give_an_engine_the_bits_of_whole_tensors(tmp_path: Path, kind: str) -> None:
    """A whole run compares log-probs, and the layers alone pass no reload of vLLM's: only ranks of an engine
    have its parameters. DeepSeek-V3 has experts and a shared one, too; OLMo-3 norms over all heads, whole on
    each rank."""
    for told in told_by_ranks(tmp_path, kind):
        assert told["differing"] == [] and told["num_parameters"] > 20
        assert told["sliced"] == told["whole"], "the log-probs are equal to the bit"
        assert f"of {WRONG}, and this node has fetched" in told["error"], "off by one column"
        assert "placement.send_slices: false" in told["error"]
        assert "has no whole weights" in told["refused"], "it samples nothing from the rest"
