"""Bytes of a GPU while an engine holds it, by role: weights, KV cache, and room for sequences.

An engine that writes nothing (`genrms[].kind`) has a KV cache as large as another one's, since vLLM takes
what its share of the GPU leaves; in it are the texts that it reads. A scalar reward model has no head of
tokens. A teacher has logits of every token that it reads. vLLM computes them request by request, does not
count them when it measures at its start, and so needs them beside its share of the GPU.

Source: `_get_prompt_logprobs_dict` in vLLM's v1/worker/gpu_model_runner.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from yatt.config.schema import GenRMSection, RolloutSection, RunConfig
from yatt.config.sizes import engine_roles, rollout_context
from yatt.forecast.memory.parameters import parameter_kind
from yatt.forecast.memory.ranks import RankLayout
from yatt.forecast.memory.trainer import ITEM_BYTES, longest_sample
from yatt.models.model import Model
from yatt.models.rows import OUTPUT
from yatt.models.shape import LatentAttention, Shape

ENGINE_BYTES = 4 << 30
"""Of an engine beside weights and KV cache: context, graphs, activations of a step; assumed."""

BATCHED_TOKENS = 16384
"""vLLM's most tokens of one step on GPUs of 70 GiB and more (`max_num_batched_tokens`), A100 excepted."""

SLEEPING_BYTES = 2 << 30
"""Of a worker that sleeps: context, graphs, communicators; assumed. `lease.max_sleeping_bytes` limits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBytes:
    """Bytes of a sequence's keys and values on one GPU of an engine.

    Args:
        token: of one token in all layers that keep every token.
        narrow_token: of one token in all layers with a window, which keep its last positions.
        window: positions of it; 0: there is none.
    """

    token: int
    narrow_token: int = 0
    window: int = 0

    def of_tokens(self, num_tokens: float) -> float:
        """Bytes of so many tokens."""
        return self.token * num_tokens + self.narrow_token * min(num_tokens, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one GPU of an engine.

    Args:
        role: `rollout` or `genrm:NAME`.
        key: section of the run file, for messages.
        other: context, graphs, activations; and of a teacher logits, see `logits`.
        sleeping: workers of other roles that sleep on the same GPU.
        kv: of sequences, on this GPU.
        longest: tokens of the longest sequence.
        limit: bytes that the engine may use in all.
    """

    role: str
    key: str
    num_gpus: int
    weights: int
    kv_cache: int
    other: int
    sleeping: int
    kv: SequenceBytes
    longest: int
    limit: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.other + self.sleeping

    @property
    def logits(self) -> int:
        """Of a teacher: logits of a step's tokens, and log-probs of them in float32."""
        return self.other - ENGINE_BYTES

    @property
    def num_sequences(self) -> int:
        """Sequences of the maximum length that fit into the KV cache at the same time."""
        return int(self.kv_cache // self.kv.of_tokens(self.longest))


def engine_memory(
    config: RunConfig, models: Mapping[str, Model], gpu_bytes: int, *, num_sleeping: int
) -> list[EngineMemory]:
    """Memory of each role's engines whose model is in `models`.

    Args:
        models: by role.
        num_sleeping: workers that sleep on a GPU while an engine holds it.
    """
    sections: tuple[RolloutSection | GenRMSection, ...] = (config.rollout, *config.engine_genrms)
    if config.is_given:
        return []
    found = []
    for role, section in zip(engine_roles(config), sections, strict=True):
        if role in models:
            found.append(_engine(config, role, section, models[role], (gpu_bytes, num_sleeping)))
    return found


def weights_numel(model: Model, num_gpus: int) -> int:
    """Elements of a model's parameters on one of `num_gpus` GPUs under tensor parallelism."""
    layout = RankLayout(world_size=num_gpus, tp=num_gpus, etp=num_gpus)
    return sum(parameter_kind(row).numel(layout) for row in model.rows)


def sequence_bytes(shape: Shape, num_gpus: int, item_bytes: int) -> SequenceBytes:
    """Bytes of keys and values on one GPU; a GPU has one head at least. Of latent attention, each GPU has the
    vector from which they are made, and the key's positions."""
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        of_layer = (attention.kv_rank + attention.rope_dim) * item_bytes
    else:
        of_layer = 2 * max(attention.num_kv_heads // num_gpus, 1) * attention.head_dim * item_bytes
    num_narrow = sum(window > 0 for window in shape.windows)
    return SequenceBytes(
        token=of_layer * (shape.num_layers - num_narrow),
        narrow_token=of_layer * num_narrow,
        window=max(shape.windows),
    )


def _engine(
    config: RunConfig, role: str, section: RolloutSection | GenRMSection, model: Model, gpu: tuple[int, int]
) -> EngineMemory:
    gpu_bytes, num_sleeping = gpu
    if isinstance(section, GenRMSection):
        key = f"genrms[{config.genrms.index(section)}]"
        item, longest = ITEM_BYTES[section.dtype], section.max_model_tokens or model.shape.max_positions
    else:
        key, item, longest = "rollout", ITEM_BYTES[config.model.dtype], rollout_context(config)
    if isinstance(section, GenRMSection) and section.kind == "scalar":
        model = replace(model, rows=tuple(row for row in model.rows if row.name != OUTPUT))
    weights = weights_numel(model, section.tp_size) * item
    budget = int(section.gpu_memory_utilization * gpu_bytes)
    kv_cache = section.kv_cache_bytes or max(budget - weights - ENGINE_BYTES, 0)
    return EngineMemory(
        role=role,
        key=key,
        num_gpus=section.tp_size,
        weights=weights,
        kv_cache=kv_cache,
        other=ENGINE_BYTES + _logits(config, section, model.shape.vocab_size),
        sleeping=num_sleeping * SLEEPING_BYTES,
        kv=sequence_bytes(model.shape, section.tp_size, item),
        longest=longest,
        limit=gpu_bytes if section.kv_cache_bytes else budget,
    )


def _logits(config: RunConfig, section: RolloutSection | GenRMSection, vocab_size: int) -> int:
    """Bytes of a teacher's logits on each GPU; 0 of another engine. While those of one request are computed,
    the log-probs of the request before are still there."""
    if isinstance(section, RolloutSection) or section.kind != "teacher":
        return 0
    given = section.engine_args.get("max_num_batched_tokens")
    batched = given if type(given) is int and given > 0 else BATCHED_TOKENS
    tokens = min(batched, longest_sample(config))
    before = min(batched - tokens, tokens)
    return vocab_size * (tokens * (ITEM_BYTES[section.dtype] + 4) + before * 4)
