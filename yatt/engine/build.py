"""Builds an engine of a given kind. Its library is imported here, not before."""

import importlib

from yatt.adapters.machine.collector import without_collections
from yatt.config.engine_keys import SPECULATION, SPECULATION_ON_CPU
from yatt.engine.protocol import Engine, EngineKind, EngineOptions
from yatt.errors import ConfigError


def build_engine(kind: EngineKind, options: EngineOptions) -> Engine:
    """Builds an engine that has not started.

    Raises:
        ConfigError: it spans nodes, has whole experts on its GPUs or has options, and this kind cannot.
    """
    if kind == "transformers" and options.num_ranks > 1:
        raise ConfigError(f"an engine of {options.num_ranks} GPUs on several nodes needs vllm; install it.")
    if options.expert_parallel and kind != "vllm":
        raise ConfigError(f"expert_parallel needs vllm, not {kind}; install it, or remove expert_parallel.")
    _refuse_arguments(kind, options)
    if (options.label >= 0 or options.is_teacher) and kind != "scripted":
        from yatt.engine.scoring import SCORING_ENGINES

        return SCORING_ENGINES[kind, options.is_teacher](options)
    if kind == "vllm":
        from yatt.engine.vllm import VllmEngine

        return VllmEngine(options)
    if kind == "transformers":
        from yatt.engine.transformers import TransformersEngine

        return TransformersEngine(options)
    from yatt.engine.scripted import ScriptedEngine

    return ScriptedEngine(options)


def _refuse_arguments(kind: EngineKind, options: EngineOptions) -> None:
    if options.arguments and kind != "vllm":
        raise ConfigError(f"engine_args needs vllm, not {kind}; install it, or remove engine_args.")
    if SPECULATION in options.arguments and options.device == "cpu":
        raise ConfigError(f"engine_args.{SPECULATION}: {SPECULATION_ON_CPU}")


def import_library(kind: EngineKind) -> None:
    """Imports the engine's libraries, so that the first Wake does not wait for them."""
    modules = {
        "vllm": ("vllm.v1.engine.llm_engine",),
        "transformers": ("torch", "transformers"),
        "scripted": (),
    }
    with without_collections():
        for name in modules[kind]:
            importlib.import_module(name)
