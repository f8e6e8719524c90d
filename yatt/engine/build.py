"""From a kind to an engine. The library behind it is imported here, not before."""

from yatt.engine.protocol import Engine, EngineKind, EngineOptions


def build_engine(kind: EngineKind, options: EngineOptions) -> Engine:
    """An engine that has not started."""
    if kind == "vllm":
        from yatt.engine.vllm import VllmEngine

        return VllmEngine(options)
    if kind == "transformers":
        from yatt.engine.transformers import TransformersEngine

        return TransformersEngine(options)
    from yatt.engine.scripted import ScriptedEngine

    return ScriptedEngine(options)
