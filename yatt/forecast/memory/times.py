"""Expected seconds of one iteration: arithmetic over rates, which are given or assumed.

Training: floating-point operations of all passes over peak rate and utilization. Sampling: an engine's step
reads all weights, and for each running sequence it reads keys and values or computes, whichever is longer.
An engine that writes nothing reads each text once, in one step, as fast as training would. Switch: bytes over
the link between GPU and host. Prefill of prompts that are continued, reward functions, saves and the network
between nodes are left out.

Source of the utilization: Chowdhery et al., arXiv 2204.02311, appendix B.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from yatt.adapters.inputs.model_family import critic_of_run
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sizes import (
    engine_gpus,
    engine_nodes,
    first_split,
    max_num_seqs,
    node_gpus,
    num_trainer_nodes,
    slab_gpus,
)
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.forecast.memory.engines import EngineMemory
from yatt.forecast.memory.fit import MemoryPlan
from yatt.forecast.memory.trainer import TrainerMemory
from yatt.forecast.time.figures import RunFigures
from yatt.judging.judging import questions_per_completion
from yatt.models.flops import forward_flops
from yatt.models.model import Model
from yatt.trainer.mcore.layout import steps_per_iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRates:
    """Rates of a GPU. Defaults: NVIDIA's data sheet of the H100 SXM, and shares of it that are assumed.

    Args:
        peak_flops: operations per second in bfloat16, dense.
        utilization: share of it in training (MFU); 0.3 is assumed, Megatron-LM's README reports up to 0.47.
        memory_bytes_per_s: bandwidth of the GPU's memory.
        memory_share: share of it that decoding reaches; assumed.
        link_bytes_per_s: between a GPU and its host; assumed, PCIe 5.0 x16.
    """

    peak_flops: float = 989e12
    utilization: float = 0.3
    memory_bytes_per_s: float = 3.35e12
    memory_share: float = 0.6
    link_bytes_per_s: float = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInputs:
    """What expected times depend on beside the run file.

    Args:
        tokens: mean tokens of a completion.
        measured: figures of a run; they replace what rates give.
    """

    tokens: float
    rates: HardwareRates = field(default_factory=HardwareRates)
    measured: RunFigures = field(default_factory=RunFigures)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Seconds of the parts of one iteration.

    Args:
        verdicts: of GenRMs; while completions are sampled unless the placement is colocated.
        speeds: of one engine, by role, as `yatt simulate` takes them.
        verdict_tokens: of a GenRM's verdicts per completion, by role.
    """

    rollout_s: float
    verdicts_s: float
    train_s: float
    switch_s: float
    is_colocated: bool
    speeds: Mapping[str, EngineSpeed]
    verdict_tokens: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """All of it, one after the other; verdicts beside the rollout where they have GPUs of their own."""
        both = (self.rollout_s, self.verdicts_s)
        return (sum(both) if self.is_colocated else max(both)) + self.train_s + self.switch_s


def train_s(config: RunConfig, model: Model, tokens: float, rates: HardwareRates) -> float:
    """Seconds of all passes over one rollout batch, the critic's among them.

    Args:
        tokens: mean length of a sample, with its prompt.
    """
    section, critic = config.trainer, critic_of_run(config)
    steps = steps_per_iteration(section)
    update = 4 if section.recompute == "full" else 3
    passes = section.ppo_epochs * update + (steps > 1) + config.has_reference
    samples = section.train_batch_size * config.rollout.n
    gpus = num_trainer_nodes(config) * config.launch.gpus_per_node
    length = round(tokens)
    shape = replace(model.shape, vocab_size=1) if model.has_value_head else model.shape
    flops = passes * forward_flops(shape).of_sequence(length, length)
    if critic is not None:
        its = forward_flops(replace(critic.shape, vocab_size=1))  # its head has one row
        flops += (1 + config.critic.epochs * update) * its.of_sequence(length, length)
    return samples * flops / (gpus * rates.peak_flops * rates.utilization) * _bubble(config, tokens)


def swapped_bytes(config: RunConfig, stage: TrainerMemory) -> int:
    """Bytes that a GPU of this pipeline stage copies in an iteration, because policy and critic take turns on
    it: the critic in and out, the policy and a reference in; and out what has changed since the last time,
    the policy's optimizer, unless the trainer has slept in between."""
    if not config.critic.swap:
        return 0
    is_away, others = config.trainer.offload_optimizer, stage.others
    state, its_state = (0, 0) if is_away else (stage.optimizer, others.critic_optimizer)
    out = state if config.placement.mode == "disaggregated" else 0
    return 2 * (others.critic_weights + its_state) + stage.weights + others.reference + state + out


def _bubble(config: RunConfig, tokens: float) -> float:
    """Factor for pipeline stages that are idle at the ends of a mini-batch."""
    section = config.trainer
    pp, model_parallel = section.pipeline_model_parallel_size, section.tensor_model_parallel_size
    model_parallel *= pp * section.context_parallel_size
    dp = num_trainer_nodes(config) * config.launch.gpus_per_node // model_parallel
    micros = section.mini_batch_size * config.rollout.n * tokens / dp / section.max_tokens_per_micro_batch
    return 1 + (pp - 1) / (max(micros, 1.0) * section.virtual_pipeline_model_parallel_size)


def engine_speed(engine: EngineMemory, model: Model, tokens: float, rates: HardwareRates) -> EngineSpeed:
    """The speed of one engine whose sequences have this mean length while they run."""
    bandwidth = rates.memory_bytes_per_s * rates.memory_share
    read_s = engine.kv.of_tokens(tokens) / bandwidth
    flops = forward_flops(model.shape)
    compute_s = (flops.token + flops.row) / (engine.num_gpus * rates.peak_flops * rates.utilization)
    return EngineSpeed(engine.weights / bandwidth, max(read_s, compute_s))


def reading_speed(
    engine: EngineMemory, model: Model, tokens: float, rates: HardwareRates, *, is_teacher: bool
) -> EngineSpeed:
    """The speed of an engine that writes nothing: a step reads a text of this many tokens for each sequence;
    a teacher also has logits of them."""
    length = round(tokens)
    flops = forward_flops(model.shape).of_sequence(length, length if is_teacher else 0)
    compute_s = flops / (engine.num_gpus * rates.peak_flops * rates.utilization)
    return EngineSpeed(engine.weights / (rates.memory_bytes_per_s * rates.memory_share), compute_s)


def iteration_times(
    config: RunConfig, models: Mapping[str, Model], plan: MemoryPlan, inputs: TimeInputs
) -> IterationTimes:
    """Expected times of one iteration."""
    tokens, rates, measured = inputs.tokens, inputs.rates, inputs.measured
    samples = config.trainer.train_batch_size * config.rollout.n
    seconds, speeds, verdict_tokens = dict[str, float](), dict[str, EngineSpeed](), dict[str, float]()
    for engine in plan.engines:
        is_rollout = engine.role == ROLLOUT
        said = (
            tokens if is_rollout else measured.verdicts.get(engine.role, _verdict_tokens(config, engine.role))
        )
        if not is_rollout:
            verdict_tokens[engine.role] = said
        context = config.data.max_prompt_tokens / 2 + (tokens / 2 if is_rollout else tokens + said / 2)
        kind = "text" if is_rollout else _genrm_of(config, engine.role).kind
        if kind == "text":
            counted = engine_speed(engine, models[engine.role], context, rates)
        else:
            counted = reading_speed(engine, models[engine.role], context, rates, is_teacher=kind == "teacher")
        speed = measured.speeds.get(engine.role, counted)
        speeds[engine.role] = speed
        seconds[engine.role] = _decode_s(config, engine, speed, (samples, said, context))
    verdicts = [seconds[role] for role in seconds if role != ROLLOUT]
    is_colocated = config.placement.mode == "colocated"
    is_away, gpu_s = config.trainer.offload_optimizer, measured.train_gpu_s
    worst, others = plan.worst, plan.worst.others
    has_switches = not config.is_given  # else the trainer never leaves its GPUs
    in_turn = config.critic.swap  # then the critic is away when the trainer sleeps
    state = worst.optimizer + (0 if in_turn else others.critic_optimizer)
    kept = worst.weights + (0 if in_turn else others.critic_weights) + (0 if is_away else state)
    prompt, gpus = config.data.max_prompt_tokens / 2, num_trainer_nodes(config) * config.launch.gpus_per_node
    counted_s = train_s(config, models[ROLLOUT], prompt + tokens, rates)
    if is_away:  # both directions at once, in each step
        epochs = config.trainer.ppo_epochs * worst.optimizer + config.critic.epochs * others.critic_optimizer
        counted_s += steps_per_iteration(config.trainer) * epochs / rates.link_bytes_per_s
    counted_s += swapped_bytes(config, worst) / rates.link_bytes_per_s
    return IterationTimes(
        rollout_s=seconds.get(ROLLOUT, 0.0),
        verdicts_s=sum(verdicts) if is_colocated else max(verdicts, default=0.0),
        train_s=counted_s if gpu_s is None else gpu_s * samples / gpus,
        switch_s=has_switches
        * (2 * kept / rates.link_bytes_per_s if measured.switch_s is None else measured.switch_s),
        is_colocated=is_colocated,
        speeds=speeds,
        verdict_tokens=verdict_tokens,
    )


def _counted_speed(
    config: RunConfig, engine: EngineMemory, model: Model, context: float, rates: HardwareRates
) -> EngineSpeed:
    kind = "text" if engine.role == ROLLOUT else _genrm_of(config, engine.role).kind
    if kind == "text":
        return engine_speed(engine, model, context, rates)
    return reading_speed(engine, model, context, rates, is_teacher=kind == "teacher")


def _verdict_tokens(config: RunConfig, role: str) -> float:
    """Half of the largest thought and verdict, as often as the GenRM is asked for a completion; of an engine
    that writes nothing the one step in which it reads."""
    genrm = _genrm_of(config, role)
    said = (genrm.think.budget + genrm.max_tokens) / 2
    return said * questions_per_completion(genrm, config.rollout.n) if genrm.kind == "text" else 1.0


def _genrm_of(config: RunConfig, role: str) -> GenRMSection:
    return next(each for each in config.engine_genrms if role == genrm_role(each.name))


def _decode_s(
    config: RunConfig, engine: EngineMemory, speed: EngineSpeed, work: tuple[int, float, float]
) -> float:
    """Seconds until all engines of a role have written `samples` texts of `tokens` tokens."""
    samples, tokens, context = work
    engines = num_engines(config, engine.role)
    each = samples / engines
    room = engine.kv_cache / engine.kv.of_tokens(context)
    running = max(min(each, room, max_num_seqs(config, engine.role)), 1.0)
    return max(each * tokens / running, tokens) * speed.token_s(running)


def num_engines(config: RunConfig, role: str) -> int:
    """Engines of a role on all nodes, as they begin."""
    if config.placement.mode == "colocated":
        gpus = sum(node_gpus(config)[node] for node in engine_nodes(config))
    else:
        gpus = first_split(config)[role] * slab_gpus(config)
    return max(gpus // engine_gpus(config)[role], 1)
