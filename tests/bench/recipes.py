"""The recipes with their memory plans, and results that others published: writes `docs/recipes.md`.

    python -m tests.bench.recipes        writes it

tests/unit/test_recipes.py checks every recipe, and compares the page with this file.
"""

from dataclasses import dataclass
from pathlib import Path

from yatt.cli.commands.planning import fit_in_words, plan_in_words as plan_page, times_in_words
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.config.sizes import num_trainer_nodes
from yatt.core.gpus.placement import genrm_role
from yatt.errors import Finding
from yatt.forecast.memory.advice import plan_faults
from yatt.forecast.memory.fit import GIB, MemoryPlan, memory_plan
from yatt.forecast.memory.ranks import RankLayout, planned_layout
from yatt.forecast.memory.times import IterationTimes, TimeInputs, iteration_times
from yatt.forecast.time.alternatives import Alternative, as_colocated, as_partial, genrm_slab_counts
from yatt.forecast.time.comparing import SettingsComparison, SimulatedResult
from yatt.forecast.time.figures import RunFigures, log_normal, train_gpu_s
from yatt.forecast.time.recommending import setup_of
from yatt.launch.checks.planned_memory import models_of
from yatt.models.model import Model, read_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"

VERL = "verl, docs/algo/baseline.md"
QWEN25, QWEN3 = "qwenlm.github.io/blog/qwen2.5-llm", "arXiv 2505.09388"
QWEN25_VL = "arXiv 2502.13923"
NEMO = "NeMo-RL v0.6, docs/about/performance-summary.md"
DEEPSEEK = "arXiv 2412.19437"
EXPECTED = {
    "qwen2.5-7b-rule": (
        ("GSM8K, MATH before training", "91.6, 75.5", QWEN25),
        ("GSM8K after GRPO with LoRA", "93.4", VERL),
        ("GSM8K after ReMax", "97", VERL),
    ),
    "qwen2.5-7b-genrm": (("GSM8K, MATH before training", "91.6, 75.5", QWEN25),),
    "qwen2.5-vl-7b-geo3k": (("MathVista before training", "68.2", QWEN25_VL),),
    "qwen3-8b-rule": (("MATH-500 before training, without and with thinking", "87.4, 97.4", QWEN3),),
    "qwen3-8b-genrm": (("MATH-500 before training, without and with thinking", "87.4, 97.4", QWEN3),),
    "qwen3-8b-rlhf": (),
    "qwen3-8b-ppo": (("MATH-500 before training, without and with thinking", "87.4, 97.4", QWEN3),),
    "qwen3-8b-sft": (),
    "qwen3-8b-dpo": (),
    "qwen3-8b-distill": (
        ("AIME 2024 after RL, and after on-policy distillation", "67.6, 74.4", f"{QWEN3}, table 21"),
        ("GPU hours of these", "17,920 and 1,800", f"{QWEN3}, table 21"),
    ),
    "qwen3-30b-a3b": (
        ("MATH-500 before training, without and with thinking", "89.8, 98.0", QWEN3),
        ("seconds per iteration on 32 H100, 4k tokens", "192 (1,102 tokens/s per GPU)", NEMO),
    ),
    "qwen3-235b-a22b": (
        ("MATH-500 before training, without and with thinking", "91.2, 98.0", QWEN3),
        ("seconds per iteration on 128 H100, 8k tokens", "395 (58.9 tokens/s per GPU)", NEMO),
    ),
    "qwen3-vl-30b-a3b": (),
    "deepseek-v3": (("MATH-500, AIME 2024 before training", "90.2, 39.2", DEEPSEEK),),
}
"""Results of others, by recipe: what, how much, where it is published. Every recipe has an entry."""

SIGMA = 0.8
"""Standard deviation of the logarithm of the tokens of a completion; the plans name it too."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run file and its plan."""

    name: str
    config: RunConfig
    models: dict[str, Model]
    plan: MemoryPlan

    @property
    def layout(self) -> RankLayout:
        launch = self.config.launch
        return planned_layout(self.config.trainer, num_trainer_nodes(self.config) * launch.gpus_per_node)

    @property
    def faults(self) -> list[Finding]:
        return plan_faults(self.config, self.models, self.plan)

    @property
    def time_inputs(self) -> TimeInputs:
        return TimeInputs(tokens=self.config.rollout.max_response_tokens / 2)

    @property
    def times(self) -> IterationTimes:
        return iteration_times(self.config, self.models, self.plan, self.time_inputs)


@dataclass(frozen=True, slots=True)
class ComparedPlacements:
    """The roles of a recipe in turns on all GPUs, and in the fixed split that is best by prediction,
    simulated as by `yatt simulate` with the figures of the recipe's plan.

    Attributes:
        switch_s: seconds of a switch.
    """

    turns: SimulatedResult
    split: SimulatedResult
    switch_s: float

    @property
    def turning_s(self) -> float:
        """Seconds of a switch from which on the split is faster; nothing else depends on them."""
        switches = [round(each.switch_s / self.switch_s) for each in (self.turns, self.split)]
        others = [each.iteration_s - each.switch_s for each in (self.turns, self.split)]
        return (others[1] - others[0]) / (switches[0] - switches[1])

    @property
    def best(self) -> str:
        """The mode of the faster one."""
        return min(
            self.turns, self.split, key=lambda each: each.iteration_s
        ).alternative.config.placement.mode


def compared_placements(recipe: Recipe) -> ComparedPlacements:
    """Simulates both placements of a recipe with GenRMs that have engines."""
    config, times = recipe.config, recipe.times
    most = config.rollout.max_response_tokens
    figures = RunFigures(
        lengths=log_normal(recipe.time_inputs.tokens, SIGMA, most), verdicts=times.verdict_tokens,
        speeds=times.speeds, switch_s=times.switch_s, train_gpu_s=train_gpu_s(times.train_s, config),
    )  # fmt: skip
    comparison = SettingsComparison(setup_of(config, figures, num_iterations=None, seed=0))
    splits: list[Alternative] = [
        as_partial(config, num) for num in genrm_slab_counts(as_partial(config, 1).config)
    ]
    split = min(splits, key=comparison.predicted_s)
    return ComparedPlacements(
        comparison.result(as_colocated(config)), comparison.result(split), times.switch_s
    )


def placement_row(recipe: Recipe) -> list[str]:
    """Cells of the table of placements."""
    found = compared_placements(recipe)
    seconds = [f"{each.iteration_s:.0f} s" for each in (found.turns, found.split)]
    turning = f"{found.turning_s:.1f} s" if found.turning_s > 0 else "any"
    return [
        recipe.name, recipe.config.placement.mode, f"{found.switch_s:.1f} s", seconds[0],
        f"{seconds[1]} ({found.split.alternative.name.removeprefix('partial, ')})", turning,
    ]  # fmt: skip


def recipe_of(path: Path) -> Recipe:
    """Loads a recipe; the models' folders are relative to the repository."""
    found = load_run_config([path], [])
    config = load_run_config([path], [f"model.path={ROOT / found.model.path}"])
    models = models_of(config) | {
        genrm_role(genrm.name): read_model(str(ROOT / genrm.model)) for genrm in config.engine_genrms
    }
    return Recipe(path.stem, config, models, memory_plan(config, models))


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [recipe_of(path) for path in sorted(FOLDER.glob("*.yaml"))]


def row(recipe: Recipe) -> list[str]:
    """Cells of the first table."""
    launch, plan, layout = recipe.config.launch, recipe.plan, recipe.layout
    return [
        f"[{recipe.name}](../configs/recipes/{recipe.name}.yaml)",
        f"{launch.nodes} x {launch.gpus_per_node}",
        f"{layout.tp} x {layout.pp} x {layout.cp} x {layout.dp}",
        str(layout.ep),
        f"{plan.trainer_peak / GIB:.1f}",
        f"{max(engine.peak for engine in plan.engines) / GIB:.1f}" if plan.engines else "no engine",
        f"{max(host.total for host in plan.hosts) / GIB:.0f}",
        "yes" if not recipe.faults else "no",
    ]


HEAD = [
    "recipe", "nodes x GPUs", "TP x PP x CP x DP", "EP", "GiB per GPU that trains", "per GPU of an engine",
    "host memory per node", "fits",
]  # fmt: skip


PLACEMENT_HEAD = [
    "recipe", "its placement", "a switch takes", "iteration, colocated", "iteration, best split (partial)",
    "partial is faster from a switch of",
]  # fmt: skip


def placement_lines(found: list[Recipe]) -> list[str]:
    """The section about placements of recipes with GenRMs."""
    return [
        "## Placements of recipes with GenRMs", "",
        "As `yatt simulate` simulates them, with the figures in each recipe's plan below. Colocated, all "
        "roles have all GPUs, one after the other, and each GPU switches twice as often as in a split. A "
        "switch is the seconds in which a GPU changes its role: sleep, the check of its memory, wake, load "
        "of weights. Its figure is bytes over the link; where yours takes longer (`yatt simulate "
        "runs/one` knows), the last column says when a split (`placement: {mode: partial, genrm_gpu_sets: "
        "N}`) is faster. `split: dynamic` beside it chooses between both by what the run measures. "
        "Differences below 3 % are within what the model can tell. Host memory: colocated, "
        "all GPUs have a sleeping engine of each GenRM.",
        "", "| " + " | ".join(PLACEMENT_HEAD) + " |", "|" + "---|" * len(PLACEMENT_HEAD),
        *("| " + " | ".join(placement_row(each)) + " |" for each in found if each.config.engine_genrms),
    ]  # fmt: skip


def page() -> str:
    """The text of docs/recipes.md."""
    found = recipes()
    lines = [
        "# Recipes", "",
        "Made by `python -m tests.bench.recipes`; do not edit. Complete run files for GPUs of 80 GiB, with "
        "the plans that `yatt plan` prints. No run of this size was made with yatt. The results were "
        "published by others, of the model before training or of other trainers; they show what to expect. "
        "Replace `model.path` and `genrms[0].model` by folders with weights, and the data files by yours. "
        "`configs/sites/h100.yaml` is a site file for such nodes, to change for your cluster.",
        "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD),
        *("| " + " | ".join(row(recipe)) + " |" for recipe in found),
        "", "| recipe | what | result | source |", "|---|---|---|---|",
        *(f"| {name} | {' | '.join(each)} |" for name, rows in EXPECTED.items() for each in rows),
        "", *placement_lines(found),
    ]  # fmt: skip
    for recipe in found:
        text = [
            *plan_page(recipe.config, recipe.models, recipe.plan), "",
            *times_in_words(recipe.times, recipe.time_inputs), "",
            *fit_in_words(recipe.faults),
        ]  # fmt: skip
        lines += ["", f"## {recipe.name}", "", "```", *text, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
