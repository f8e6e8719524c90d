"""Bytes of a GPU while it trains, by part, for each pipeline stage."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from yatt.adapters.inputs.model_family import critic_of_run
from yatt.config.schema import RunConfig, TrainerSection
from yatt.config.sizes import num_trainer_nodes
from yatt.forecast.memory.activations import (
    FLOAT,
    KernelSet,
    TokenShare,
    backward_bytes,
    layer_bytes,
    left_bytes,
    norm_bytes,
)
from yatt.forecast.memory.parameters import BufferSizes, ParameterTable, chunk_buffers, table_of
from yatt.forecast.memory.ranks import RankLayout, in_flight, model_chunks, planned_layout
from yatt.models.shape import Layer, Shape

CHUNK_BYTES, MIN_CHUNK, MAX_CHUNK = 64 << 20, 128, 1024
"""As in `yatt.trainer.forward.logprobs`; a test compares them."""

PART_BYTES, NUM_SLOTS = 512 << 20, 3
"""As in `yatt.trainer.mcore.parted_step`; a test compares them."""

INDEX_BYTES = 24
"""Per token: the token, its position and its row of logits, as int64."""

LIKELIEST_COPY, LIKELIEST_BYTES, LIKELIEST_LEFT, LIKELIEST_CHUNK = 8, 28, 8, 17
"""Per token and likeliest token of a teacher: ids and log-probs as they come from the host, and as the head
takes them; what of them is left in the head's backward pass, and what a chunk needs then."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDemand:
    """What the trainer's memory depends on.

    Args:
        num_moments: tensors in float32 that the optimizer keeps per parameter.
        num_rows: positions of a micro-batch whose logits are needed, at most.
        has_reference: a reference model is on the GPU too.
        critic: of a critic, which is on the GPU too.
        has_turns: instead, it and the policy take turns there (`critic.swap`).
        top_k: likeliest tokens of a teacher, at each row.
    """

    shape: Shape
    parameters: ParameterTable
    section: TrainerSection
    num_moments: int
    share: TokenShare
    num_rows: int
    has_reference: bool
    critic: "TrainerDemand | None" = None
    has_turns: bool = False
    top_k: int = 0

    @property
    def layout(self) -> RankLayout:
        """Sizes of the parallel groups."""
        return self.share.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModels:
    """Bytes of the models beside the policy on one rank: frozen weights of a reference model; of a critic its
    weights, gradients, and optimizer, as the policy's; if they take turns, the largest sum in its turn."""

    reference: int = 0
    critic_weights: int = 0
    critic_gradients: int = 0
    critic_optimizer: int = 0
    critic_turn: int = 0

    @property
    def critic_kept(self) -> int:
        """Weights and gradients of a critic that stay on the GPU."""
        return 0 if self.critic_turn else self.critic_weights + self.critic_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes of one rank of a pipeline stage.

    Args:
        others: of models beside the policy, which stay while one of them works, unless they take turns.
        activations: kept for the backward pass, over all micro-batches in flight; of the larger model, or of
            the policy if they take turns.
        head: log-probs and their gradients, with the last norm, on the last stage: at the peak, before any
            layer's backward pass.
        layer: one layer's backward pass, recomputed activations included. It begins when `head` is free.
        step: temporary tensors of the optimizer, when activations are free.
        slots: for that time, places on the device for an optimizer's state that is away; 0: it stays.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    others: OtherModels
    activations: int
    head: int
    layer: int
    step: int
    slots: int = 0

    @property
    def kept(self) -> int:
        """What stays between micro-batches."""
        others = self.others
        of_critic = 0 if others.critic_turn else others.critic_optimizer
        optimizer = 0 if self.slots else self.optimizer + of_critic
        return self.weights + self.gradients + optimizer + others.reference + others.critic_kept

    @property
    def peak(self) -> int:
        """Largest sum at any time."""
        own = self.kept + max(self.activations + max(self.head, self.layer), self.step + self.slots)
        return max(own, self.others.critic_turn)


ModelTable = tuple[Shape, ParameterTable]
"""A model's shape, and its parameters by kind."""


def critic_table(config: RunConfig) -> ModelTable | None:
    """The critic's; None: the run has none.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    critic = critic_of_run(config)
    return None if critic is None else (critic.shape, table_of(critic))


def trainer_demand(
    config: RunConfig, shape: Shape, parameters: ParameterTable, critic: ModelTable | None = None
) -> TrainerDemand:
    """The demand of a run, with the largest micro-batch that it can have. An algorithm of the user's own that
    needs a reference model without a KL term is not known here."""
    section, longest = config.trainer, longest_sample(config)
    layout = planned_layout(section, num_trainer_nodes(config) * config.launch.gpus_per_node)
    samples = -(-section.mini_batch_size * config.rollout.n // max(layout.dp, 1))
    tokens = min(section.max_tokens_per_micro_batch, samples * longest)
    share = TokenShare(
        num_tokens=-(-tokens // layout.cp),
        longest=longest,
        item_bytes=ITEM_BYTES[config.model.dtype],
        is_packed=tokens > longest,
        kernels=kernels_of(config, shape),
        layout=layout,
    )
    policy = TrainerDemand(
        shape=shape,
        num_moments=config.optimizer.num_moments,
        parameters=parameters,
        section=section,
        share=share,
        num_rows=share.num_tokens,
        has_reference=config.has_reference,
        top_k=config.top_k,
    )
    if critic is None:
        return policy
    num_moments = config.critic.optimizer.num_moments
    its = replace(
        policy, shape=critic[0], parameters=critic[1], num_moments=num_moments, has_reference=False, top_k=0
    )
    return replace(policy, critic=its, has_turns=config.critic.swap)


def kernels_of(config: RunConfig, shape: Shape) -> KernelSet:
    """The kernels that the trainer uses; with `auto` Transformer Engine's on GPUs, if it has all layers."""
    if config.launch.device == "cpu":
        return "cpu"
    return "torch" if config.model.spec == "torch" or shape.needs_torch_spec else "te"


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest sample."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def trainer_memory(demand: TrainerDemand, stages: Iterable[int] = ()) -> list[TrainerMemory]:
    """Memory of a rank of each of these pipeline stages; of all if none is named."""
    return [_stage(demand, stage) for stage in stages or range(demand.layout.pp)]


def worst_stage(stages: Iterable[TrainerMemory]) -> TrainerMemory:
    """The stage that needs most."""
    return max(stages, key=lambda each: each.peak)


def stage_buffers(demand: TrainerDemand, stage: int) -> BufferSizes:
    """Elements of the flat buffers of a stage."""
    layout, total, is_tied = demand.layout, BufferSizes(), demand.shape.is_tied
    num_layers = demand.shape.num_layers
    for chunk in model_chunks(num_layers, demand.section, stage):
        kinds = demand.parameters.chunk(chunk, is_tied=is_tied)
        is_whole_end = (chunk.start == 0) != (chunk.stop == num_layers)
        total += chunk_buffers(kinds, layout, has_copy=is_tied and is_whole_end)
    return total


def _stage(demand: TrainerDemand, stage: int) -> TrainerMemory:
    """One stage's memory. Critic and policy work one after the other, so the larger one's passes count; or
    the larger one's sum, if only one of them is there."""
    policy = _stage_alone(demand, stage)
    if demand.critic is None:
        return policy
    critic = _stage_alone(demand.critic, stage)
    others = replace(
        policy.others,
        critic_weights=critic.weights,
        critic_gradients=critic.gradients,
        critic_optimizer=critic.optimizer,
        critic_turn=critic.peak if demand.has_turns else 0,
    )
    if demand.has_turns:
        return replace(policy, others=others)
    return replace(
        policy,
        others=others,
        activations=max(policy.activations, critic.activations),
        layer=max(policy.layer, critic.layer),
        step=max(policy.step, critic.step),
        slots=max(policy.slots, critic.slots),
    )


def _stage_alone(demand: TrainerDemand, stage: int) -> TrainerMemory:
    item, sizes = demand.share.item_bytes, stage_buffers(demand, stage)
    frozen = 0 if stage else demand.parameters.num_frozen * item
    own_tower = frozen if demand.parameters.tower else 0  # the reference has a tower of its own
    main = FLOAT if item < FLOAT else 0  # in float32 the main copies are the parameters
    state = main + demand.num_moments * FLOAT
    part = min(sizes.state, PART_BYTES // (FLOAT * (1 + demand.num_moments)))
    step = {"cpu": 0, "torch": 2 * FLOAT * part, "te": 0}[demand.share.kernels]
    slots = min(NUM_SLOTS * part, sizes.state) * state if demand.section.offload_optimizer else 0
    is_last = stage == demand.layout.pp - 1
    return TrainerMemory(
        stage=stage,
        weights=sizes.numel * item + frozen,
        gradients=sizes.numel * FLOAT,
        optimizer=sizes.state * state,
        others=OtherModels(reference=sizes.numel * item + own_tower if demand.has_reference else 0),
        activations=_activations(demand, stage),
        head=_head(demand) if is_last else 0,
        layer=_layer(demand, stage),
        step=step,
        slots=slots,
    )


def _activations(demand: TrainerDemand, stage: int) -> int:
    shape, share, layout = demand.shape, demand.share, demand.layout
    hidden = share.hidden_bytes(shape.hidden_size)
    flying = in_flight(layout, stage)
    chunks = model_chunks(shape.num_layers, demand.section, stage)
    total = flying * max(_chunk_activations(demand, [shape.layers[at] for at in chunk]) for chunk in chunks)
    total += share.num_tokens * INDEX_BYTES + share.longest * shape.attention.head_dim * FLOAT  # and angles
    if layout.has_sequence_parallel:  # megatron-core's buffer for gathered states
        total += share.num_tokens * shape.hidden_size * share.item_bytes
    if layout.pp > 1:  # outputs of the stage, with interleaving inputs too, and one that is sent
        total += (flying * min(layout.vpp, 2) + 1) * hidden
    return total


def _chunk_activations(demand: TrainerDemand, layers: list[Layer]) -> int:
    """Bytes that layers keep of one micro-batch. Parts of layers that are computed again (selective) count as
    kept, so the plan has too many there."""
    size, share, total = demand.shape.hidden_size, demand.share, 0
    hidden, again = share.hidden_bytes(size), _num_again(demand.section, len(layers))
    kept = {layer: layer_bytes(layer, size, share) for layer in set(layers)}
    left = {layer: max(hidden, left_bytes(layer, size, share)) for layer in set(layers)}
    for place, layer in enumerate(layers):
        first = hidden if place == 0 else left[layer]
        total += first if place < again else kept[layer]
    return total


def _num_again(section: TrainerSection, num_layers: int) -> int:
    """How many layers of a chunk, the first ones, are computed again as a whole."""
    if section.recompute != "full":
        return 0
    return min(section.recompute_layers or num_layers, num_layers)


def _layer(demand: TrainerDemand, stage: int) -> int:
    shape, share = demand.shape, demand.share
    chunks = model_chunks(shape.num_layers, demand.section, stage)
    # The layer's output is freed before, or its input is kept already.
    is_kept = share.keeps_inputs or shape.norms_after
    shared = share.hidden_bytes(shape.hidden_size) if is_kept else 0
    return max(_chunk_working(demand, [shape.layers[at] for at in chunk]) for chunk in chunks) - shared


def _chunk_working(demand: TrainerDemand, layers: list[Layer]) -> int:
    """Bytes of a layer's backward pass beside what layers keep. The first layers are the last in the backward
    pass: where they are computed again, what the others kept is free."""
    size, share, again = demand.shape.hidden_size, demand.share, _num_again(demand.section, len(layers))
    kept = {layer: layer_bytes(layer, size, share) for layer in set(layers)}
    working = {layer: backward_bytes(layer, size, share) for layer in set(layers)}
    free = sum(kept[layer] for layer in layers[again:])
    twice = [working[layer] + kept[layer] - free for layer in layers[:again]]
    return max([*twice, *(working[layer] for layer in layers[again:])])


def _head(demand: TrainerDemand) -> int:
    """The last norm, the head's input, and the larger of its chunks and of the gradients of the input.

    Source: `yatt.trainer.forward.logprobs`; three tensors of a chunk in float32, the gradient of the chunk
    before in the model's type, the gradient of the weight in float32.
    """
    share, hidden = demand.share, demand.shape.hidden_size
    item, tp = share.item_bytes, demand.layout.tp
    kept = share.num_held * (norm_bytes(hidden, share) - hidden * item)
    rows_bytes = demand.num_rows * hidden * (item + FLOAT if item < FLOAT else FLOAT)
    entries = -(-demand.shape.vocab_size // tp)
    rows = min(max(CHUNK_BYTES // (FLOAT * entries), MIN_CHUNK), MAX_CHUNK)
    chunk = min(rows, demand.num_rows) * entries
    chunks = chunk * 3 * FLOAT + (chunk * item if rows < demand.num_rows else 0)
    chunks += entries * hidden * FLOAT + demand.num_rows * hidden * item
    last_norm = 4 * FLOAT * hidden * share.num_held  # its backward pass, when rows and chunks are free
    copied = 0 if share.kernels == "cpu" else LIKELIEST_COPY
    likeliest = demand.num_rows * demand.top_k * (copied + LIKELIEST_BYTES)  # of the forward pass
    forward = rows_bytes + chunk * 3 * FLOAT + likeliest
    chunks += demand.top_k * (demand.num_rows * LIKELIEST_LEFT + min(rows, demand.num_rows) * LIKELIEST_CHUNK)
    return kept + max(rows_bytes + chunks, forward if likeliest else 0, last_norm)
