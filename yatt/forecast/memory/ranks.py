"""The trainer's layout as numbers: ranks of each kind, and the layers of each pipeline stage."""

from dataclasses import dataclass

from yatt.config.schema import TrainerSection
from yatt.trainer.mcore.layout import end_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Sizes of the parallel groups.

    Args:
        world_size: trainer ranks.
        tp, pp, vpp, cp, ep: as in the run file's `trainer` section.
        etp: ranks that share the matrices of an expert.
        has_sequence_parallel: activations outside of matrix products are sharded over TP.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    has_sequence_parallel: bool = False

    @property
    def dp(self) -> int:
        """Copies of the model."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def state_shards(self) -> int:
        """Ranks over which the optimizer state of parameters outside of experts is divided: DP x CP."""
        return self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which the optimizer state of experts is divided. Without expert parallelism experts are
        in the same buffer as the other parameters."""
        return self.world_size // (self.etp * self.ep * self.pp) if self.ep > 1 else self.state_shards


def planned_layout(section: TrainerSection, world_size: int) -> RankLayout:
    """The layout that the run file's trainer section asks for."""
    return RankLayout(
        world_size=world_size,
        tp=section.tensor_model_parallel_size,
        pp=section.pipeline_model_parallel_size,
        vpp=section.virtual_pipeline_model_parallel_size,
        cp=section.context_parallel_size,
        ep=section.expert_model_parallel_size,
        etp=section.expert_tp_size,
        has_sequence_parallel=section.sequence_parallel,
    )


def model_chunks(num_layers: int, section: TrainerSection, stage: int) -> list[range]:
    """Layers of each model chunk of a pipeline stage; one chunk without interleaving.

    Source: megatron-core's `get_num_layers_to_build` and `get_transformer_layer_offset`.
    """
    pp, vpp = section.pipeline_model_parallel_size, section.virtual_pipeline_model_parallel_size
    if vpp > 1:
        size, per_round = num_layers // (pp * vpp), num_layers // vpp
        firsts = [turn * per_round + stage * size for turn in range(vpp)]
        return [range(first, first + size) for first in firsts]
    first, last = end_stages(num_layers, section)
    if first is None or last is None:
        each = num_layers // pp
        return [range(stage * each, (stage + 1) * each)]
    middle = (num_layers - first - last) // (pp - 2) if pp > 2 else 0
    bounds = [0, first, *(first + middle * (1 + at) for at in range(pp - 2)), num_layers]
    return [range(bounds[stage], bounds[stage + 1])]


def in_flight(layout: RankLayout, stage: int) -> int:
    """Micro-batches of one chunk whose activations a stage holds at the same time, at most.

    Source: megatron-core's 1F1B schedules: warm-up micro-batches, and the one that runs.
    """
    behind = layout.pp - stage - 1
    if layout.vpp == 1:
        return behind + 1
    return 2 * behind + (layout.vpp - 1) * layout.pp + 1
