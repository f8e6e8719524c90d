"""Choosing engine and device, and the options made from sections."""

import importlib.util
import os
from dataclasses import replace

import pytest

from tests.tiny_models import make_scripted_model
from yatt.config.schema import GenRMSection
from yatt.engine.build import build_engine
from yatt.engine.environment import choose_device, choose_engine, prepare_environment
from yatt.engine.protocol import genrm_options
from yatt.engine.vllm import engine_arguments
from yatt.errors import ConfigError


def only(monkeypatch, *installed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)


def test_auto_takes_vllm_then_transformers(monkeypatch):
    only(monkeypatch, "vllm", "transformers")
    assert choose_engine("auto", "k") == "vllm"
    only(monkeypatch, "transformers")
    assert choose_engine("auto", "k") == "transformers"
    assert choose_engine("scripted", "k") == "scripted"


def test_what_is_not_installed_is_named(monkeypatch):
    only(monkeypatch)
    with pytest.raises(ConfigError, match=r"rollout.engine: auto needs vllm or transformers, and neither"):
        choose_engine("auto", "rollout.engine")
    with pytest.raises(ConfigError, match=r"rollout.engine: vllm needs the package vllm, which can"):
        choose_engine("vllm", "rollout.engine")


def test_the_device_is_the_run_files_word():
    assert choose_device("cpu") == "cpu"
    assert choose_device("cuda") == "cuda"


def test_auto_is_cuda_only_with_a_driver_and_a_gpu_given(monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert choose_device("auto") == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == "cpu"
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_device("auto") == "cpu"


def test_on_cuda_vllm_is_not_asked_for_the_sampler_of_flashinfer(monkeypatch):
    for device, expected in (("cpu", None), ("cuda", "0")):
        environment = {"VLLM_USE_FLASHINFER_SAMPLER": "1"} if device == "cuda" else {}
        monkeypatch.setattr(os, "environ", environment)
        prepare_environment(device=device, threads=1)
        assert environment.get("VLLM_USE_FLASHINFER_SAMPLER") == expected


@pytest.fixture
def genrm(tmp_path):
    model = make_scripted_model(tmp_path)
    return GenRMSection(name="judge", model=model, template="{completion}", max_num_seqs=7)


def test_a_deterministic_engine_runs_one_request_without_prefix_cache(genrm):
    arguments = engine_arguments(genrm_options(genrm, device="cpu", deterministic=True))
    assert (arguments["max_num_seqs"], arguments["enable_prefix_caching"]) == (1, False)
    arguments = engine_arguments(genrm_options(genrm, device="cpu", deterministic=False))
    assert (arguments["max_num_seqs"], arguments["enable_prefix_caching"]) == (7, True)


def test_only_a_gpu_engine_is_asked_to_sleep_for_real(genrm):
    on_cpu = engine_arguments(genrm_options(genrm, device="cpu", deterministic=False))
    assert on_cpu["enforce_eager"] and "enable_sleep_mode" not in on_cpu
    assert on_cpu["kv_cache_memory_bytes"] == 256 << 20
    on_gpu = engine_arguments(genrm_options(genrm, device="cuda", deterministic=False))
    assert on_gpu["enable_sleep_mode"] and not on_gpu["enforce_eager"]
    assert "kv_cache_memory_bytes" not in on_gpu


def test_whole_experts_are_asked_of_vllm_on_cuda_only(genrm):
    wanted = replace(genrm, expert_parallel=True, tp_size=2)
    on_gpu = genrm_options(wanted, device="cuda", deterministic=False)
    assert engine_arguments(on_gpu)[
        "enable_expert_parallel"
    ] and "enable_expert_parallel" not in engine_arguments(
        genrm_options(genrm, device="cuda", deterministic=False)
    )
    with pytest.raises(ConfigError, match="expert_parallel needs vllm, not transformers"):
        build_engine("transformers", on_gpu)
    with pytest.raises(ConfigError, match="expert_parallel needs CUDA"):
        build_engine("vllm", replace(on_gpu, device="cpu")).start()
