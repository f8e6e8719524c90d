"""A vLLM engine on several nodes has the same parameters from slices as from whole tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import needs
from tests.runs import ROOT
from tests.tiny_models import make_qwen3, make_sigmoid_moe

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(600)]


def told_by_ranks(folder: Path, kind: str, num_ranks: int, spoiled: str = "") -> list[dict]:
    for seed, name in enumerate(("first", "other")):
        if kind == "deepseek_v3":
            make_sigmoid_moe(folder / name, kind, seed=seed)
        else:
            make_qwen3(folder / name, tied=kind == "tied", seed=seed, experts=4 * (kind == "experts"))
    command = [sys.executable, "-m", "tests.sliced_engine", str(folder)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), spoiled], cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        assert [rank.wait(500) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param("tied", 4, id="two key and value heads on four ranks"),
        pytest.param("experts", 2, id="experts by tensor parallelism"),
        pytest.param("deepseek_v3", 2, id="latent attention and a shared expert"),
    ],
)
def test_slices_give_an_engine_the_bits_of_whole_tensors(tmp_path: Path, kind: str, num_ranks: int) -> None:
    """A whole run compares log-probs, and the layers alone pass no reload of vLLM's: only ranks of an engine
    have its parameters."""
    for told in told_by_ranks(tmp_path, kind, num_ranks):
        assert "error" not in told, told
        assert told["differing"] == [] and told["num_parameters"] > 20
        assert told["sliced"] == told["whole"], "the log-probs are equal to the bit"


def test_a_cut_that_is_off_by_one_column_is_refused_and_not_loaded(tmp_path: Path) -> None:
    """Not a whole run, but real ranks: what vLLM does with an error in the middle of its reload."""
    name = "model.layers.0.self_attn.o_proj.weight"
    for told in told_by_ranks(tmp_path, "plain", 2, name):
        assert f"of {name}, and this node has fetched" in told["error"]
        assert "placement.send_slices: false" in told["error"]
