"""Bytes and seconds by arithmetic for models and numbers of nodes that no test machine has: `docs/scale.md`.

    python -m tests.bench.scale        writes it

Bytes are counted by the code that plans boxes, pieces and files. Seconds are bytes over the rates below.
tests/unit/test_scale.py compares the counts with a real trainer's, and the page with this file.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.recipes import Recipe, recipes
from yatt.adapters.node_local.host_segment import aligned_size
from yatt.checkpoint.commit.pieces import FILE_BYTES
from yatt.checkpoint.local.shards import PIECE_BYTES
from yatt.core.gpus.placement import ROLLOUT
from yatt.forecast.memory.fetching import slice_sizes
from yatt.forecast.memory.fit import GIB
from yatt.models.cuts import cut_dim
from yatt.models.model import Model, model_of
from yatt.models.rows import EMBEDDING, OUTPUT, WeightRow
from yatt.weights.boxes import Block, blocks_of, boxes_of

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
GPUS, GPU_BYTES = 8, 80e9
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
KEPT = {"main": 4, "exp_avg": 4, "exp_avg_sq": 4, "model": 2}
"""Bytes of an element of each kind of tensor that a rank saves, for training in bfloat16."""

GRADIENT_BYTES = 4
ROOM = 0.6
"""Share of a GPU's memory for weights, gradients and optimizer; the rest is for activations."""

RATES = {
    "GPU to host and back, each GPU": (25e9, "PCIe 5.0 x16, pinned memory; assumed"),
    "a node to the object store": (2e9, "assumed"),
    "a node's network": (12.5e9, "100 Gbit/s; assumed"),
    "one engine node's fetch": (2.7e9, "measured on two cores, one for each node, docs/benchmarks.md"),
}
EXTRA_STALL = 0.05
"""Seconds of a save beyond the offload, as a share of a copy of its bytes; the largest that was measured."""

CONFIGS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "Qwen3-1.7B": ((1, 1), {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True}),
    "Qwen3-8B": ((2, 1), {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False}),
    "Qwen3-32B": ((8, 1), {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False}),
    "Llama-70B": ((8, 2), {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "tie_word_embeddings": False}),
}  # fmt: skip
"""Tensor- and pipeline-parallel sizes, and config.json."""

_COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups."""

    tp: int = 1
    pp: int = 1
    dp: int = 1


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter of a rank: its blocks of the whole one, and its number of elements without padding."""

    row: WeightRow
    blocks: list[Block]
    numel: int


def local_parameters(model: Model, layout: Layout, tp_rank: int, pp_rank: int) -> Iterator[Local]:
    """The parameters that ranks of this coordinate save: each of the model once over all coordinates."""
    per_stage = model.shape.num_layers // layout.pp
    for row in model.rows:
        name = row.name
        if name == EMBEDDING:
            stage = 0
        elif name == OUTPUT or "final_layernorm" in name:
            stage = layout.pp - 1
        else:
            stage = int(name.split(".")[2]) // per_stage
        dim = cut_dim(row)
        if stage != pp_rank or (dim is None and tp_rank):
            continue
        blocks = blocks_of(row, dim, rank=tp_rank, size=layout.tp)
        yield Local(row, blocks, sum(math.prod(block.shape) for block in blocks))


def saved_bytes(model: Model, layout: Layout, tp_rank: int, pp_rank: int) -> int:
    """Bytes that all data-parallel ranks of a coordinate save together."""
    numel = sum(local.numel for local in local_parameters(model, layout, tp_rank, pp_rank))
    return numel * sum(KEPT.values())


def pieces_and_files(model: Model, layout: Layout) -> tuple[int, int]:
    """Pieces and files of the first data-parallel rank of the first coordinate."""
    locals_ = list(local_parameters(model, layout, 0, 0))
    share = -(-sum(local.numel for local in locals_) // layout.dp)
    pieces, size_bytes, at = 0, 0, 0
    for local in locals_:
        begin, end = max(0, -at), min(local.numel, share - at)
        at += local.numel
        if begin >= end:
            continue
        for box in boxes_of(local.blocks, begin, end):
            numel = math.prod(box.shape)
            pieces += sum(-(-numel * item // PIECE_BYTES) for item in KEPT.values())
            size_bytes += numel * sum(KEPT.values())
    return pieces, -(-size_bytes // FILE_BYTES)


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one number of nodes that only train, or train and sample in turn."""

    name: str
    nodes: int

    @property
    def model(self) -> Model:
        return model_of(CONFIGS[self.name][1] | _COMMON)

    @property
    def layout(self) -> Layout:
        tp, pp = CONFIGS[self.name][0]
        return Layout(tp=tp, pp=pp, dp=self.nodes * GPUS // (tp * pp))

    @property
    def part(self) -> float:
        """Parameters of a rank, about."""
        return self.params / (self.layout.tp * self.layout.pp)

    @property
    def params(self) -> int:
        return sum(math.prod(row.full_shape) for row in self.model.rows)

    @property
    def host_bytes(self) -> int:
        """Of one node: each rank has its part of the weights, and its range of the part's state."""
        return GPUS * (
            aligned_size(math.ceil(2 * self.part)) + aligned_size(math.ceil(12 * self.part / self.layout.dp))
        )

    @property
    def fits(self) -> bool:
        """Whether weights, gradients and optimizer leave room on a GPU."""
        if not self.layout.dp:
            return False
        return self.part * (2 + GRADIENT_BYTES + 12 / self.layout.dp) <= ROOM * GPU_BYTES

    def row(self) -> list[str]:
        """The case's cells."""
        size, layout = self.params, self.layout
        offload_s = self.host_bytes / GPUS / _rate("GPU to host and back, each GPU")
        saved = size * sum(KEPT.values())
        pieces, files = pieces_and_files(self.model, layout)
        store = self.nodes * _rate("a node to the object store")
        ranks = layout.tp * layout.pp * layout.dp
        half_s = 2 * self.part / _rate("GPU to host and back, each GPU")
        fetch = min(_rate("a node's network"), _rate("one engine node's fetch"))
        return [
            self.name, str(self.nodes), f"{layout.tp} x {layout.pp} x {layout.dp}",
            f"{self.host_bytes / 1e9:.0f} GB", _seconds(offload_s), _seconds(EXTRA_STALL * offload_s),
            f"{saved / 1e9:.0f} GB",
            f"{pieces * ranks} / {files * ranks}", _seconds(saved / store),
            _seconds(2 * half_s), _seconds(2 * size / fetch), _seconds(saved / store),
        ]  # fmt: skip


def _rate(name: str) -> float:
    return RATES[name][0]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


HEAD = [
    "model", "nodes", "TP x PP x DP", "host memory per node", "offload", "stall beyond it", "checkpoint",
    "pieces / files", "upload", "publication on a node", "to an engine node", "restore",
]  # fmt: skip
RECIPE_HEAD = [
    "recipe", "nodes", "TP x PP x CP x DP, EP", "GiB per GPU that trains", "per GPU of an engine",
    "host memory per node", "offload", "stall beyond it", "checkpoint", "upload", "publication on a node",
    "to an engine node", "restore",
]  # fmt: skip


def recipe_row(recipe: Recipe) -> list[str]:
    """A recipe's cells: bytes of its memory plan, seconds as in the other table."""
    nodes, plan, layout = recipe.config.launch.nodes, recipe.plan, recipe.layout
    sizes, worst = {row: math.prod(row.full_shape) for row in recipe.models[ROLLOUT].rows}, plan.worst
    size, link, others = sum(sizes.values()), _rate("GPU to host and back, each GPU"), worst.others
    # A critic is saved and offloaded too; it has no output layer.
    critic = sum(n for row, n in sizes.items() if row.name != OUTPUT) if others.critic_weights else 0
    saved = (size + critic) * sum(KEPT.values())
    offload_s = (worst.weights + worst.optimizer + others.critic_weights + others.critic_optimizer) / link
    store_s = saved / (nodes * _rate("a node to the object store"))
    fetch = min(_rate("a node's network"), _rate("one engine node's fetch"))
    return [
        recipe.name, str(nodes), f"{layout.tp} x {layout.pp} x {layout.cp} x {layout.dp}, {layout.ep}",
        f"{plan.trainer_peak / GIB:.1f}",
        f"{max(engine.peak for engine in plan.engines) / GIB:.1f}" if plan.engines else "no engine",
        f"{max(host.total for host in plan.hosts) / 1e9:.0f} GB", _seconds(offload_s),
        _seconds(EXTRA_STALL * offload_s), f"{saved / 1e9:.0f} GB", _seconds(store_s),
        *((_seconds(2 * worst.weights / link), _seconds(_needed(recipe, 2 * size) / fetch))
          if plan.engines else ("-", "-")),
        _seconds(store_s),
    ]  # fmt: skip


def _needed(recipe: Recipe, whole: int) -> int:
    """Bytes of an engine node: of the whole model, or the slices of one node of an engine over several."""
    sizes = slice_sizes(recipe.config, recipe.models[ROLLOUT])
    if sizes is None:
        return whole
    parts = Counter[int]()
    for (_, _, part), size in sizes.total.items():
        parts[part] += size
    return max(parts.values())


def page() -> str:
    """The text of docs/scale.md."""
    lines = [
        "# Scale by arithmetic", "",
        "Made by `python -m tests.bench.scale`; do not edit. Dense models in bfloat16 on nodes of 8 GPUs of "
        "80 GB. The code that plans boxes counts bytes, pieces and files; a test compares them with a real "
        "trainer's. Seconds are bytes over these rates; no run of this size was made:", "",
        "| rate | GB/s | source |", "|---|---|---|",
        *(f"| {name} | {rate / 1e9:g} | {source} |" for name, (rate, source) in RATES.items()),
        "", f"Stall beyond the offload: {EXTRA_STALL:g} of a copy, the largest that was measured. "
        "Publication on a node: from a GPU to its host copy and from there to an engine's GPU, in the "
        "trainer's layout. To an engine node: the whole model, or of an engine over several nodes this "
        "node's slices, through the chain of adr/0044 (where only changes travel, less). Upload and restore: "
        "all trainer nodes at once, at the rate of the store. Cases where weights, gradients and "
        f"optimizer need more than {ROOM:.0%} of a GPU are left out.",
        "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD),
    ]  # fmt: skip
    for name in CONFIGS:
        for nodes in NODES:
            if (case := Case(name, nodes)).fits:
                lines.append("| " + " | ".join(case.row()) + " |")
    lines += [
        "", "## Recipes", "",
        "The run files of [recipes](recipes.md), mixtures of experts too. Memory is that of `yatt plan`: of "
        "the pipeline stage that needs most, with activations, and of a node with sleeping GenRMs and "
        "processes. Seconds are counted as above.",
        "", "| " + " | ".join(RECIPE_HEAD) + " |", "|" + "---|" * len(RECIPE_HEAD),
        *("| " + " | ".join(recipe_row(recipe)) + " |" for recipe in recipes()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
