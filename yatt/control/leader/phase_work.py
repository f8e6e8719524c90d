"""The leader's own work in each phase, from metadata: orders to the nodes, and their combined answers."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.files.patience import with_retries
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.config.schema import ValidationSection
from yatt.control.gpus.weights.publications import sum_of_boxes, sum_of_parts
from yatt.control.leader.batch_meter import BatchMeter
from yatt.control.leader.batches import Batch, BatchSampling
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.saves.commits import Commits
from yatt.control.leader.saves.restoring import Restoring, Resumed
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.node import Node
from yatt.core.figures.drop_counters import FAILED_GROUPS, MEDIA_FAULTS
from yatt.core.gpus.placement import ROLLOUT, dp_lead_ranks
from yatt.core.phases import phases
from yatt.core.phases.phases import Acted, Phase
from yatt.core.samples.balance import Cost, CostFit, plan_iteration
from yatt.errors import EXIT_FINISHED, ConfigError
from yatt.models.pictures.probe import ProbeTokens
from yatt.obs.metrics import (
    CHANGED_INPUTS,
    FAILED_SHARE,
    STEP,
    RowFile,
    completes_draft,
    read_metric_rows,
    strict_row,
    validation_of,
)
from yatt.records import cluster as c, message as m
from yatt.records.events.attempts import AttemptResumed
from yatt.records.events.groups import ValidationFailed
from yatt.records.events.saves import CheckpointBegan
from yatt.records.message import pack_ids

QUIT_DEADLINE_S = 30.0


class PhaseWork:
    """The leader's work in each phase.

    Args:
        batches: samples.
        row: the row of metrics.
        probe: tokens of the sync probe.
    """

    def __init__(
        self,
        node: Node,
        clients: NodeClients,
        commits: Commits,
        batches: BatchSampling,
        row: MetricsRow,
        probe: ProbeTokens,
    ) -> None:
        self._node, self._clients, self._commits, self._row = node, clients, commits, row
        self._batches, self._probe_tokens = batches, probe
        self._load = BatchMeter(node, clients, batches.slabs, commits.events)
        self._groups: dict[int, c.GroupFact] = {}
        self._judges: dict[str, float] = {}  # of their batch, see `Batch`
        self._costs = CostFit()

    @property
    def slabs(self) -> Slabs:
        """Which role has which slab."""
        return self._batches.slabs

    async def run(self, act: phases.Act) -> Acted:
        """Carries out one act."""
        match act.phase:
            case Phase.JOIN:
                await self._batches.judges.choose_first()
                await start_workers(self._node, self._clients)
            case Phase.BUILD:
                found = await self._build()
                self._batches.track.resumed(found.iteration)
                return Acted(act.seq, resumed=found.iteration, is_local=found.is_local)
            case Phase.SYNC:
                began_s = clock.monotonic_s()
                await self._batches.track.published(act.iteration)
                self._load.trained(clock.monotonic_s() - began_s)
            case Phase.ROLLOUT:
                again = await self._take_batch(act.iteration)
                return Acted(act.seq, again=again, takes_turns=self.slabs.takes_turns)
            case Phase.SCORE:
                return Acted(act.seq, again=await self._score(act))
            case _:
                began_s = clock.monotonic_s()
                plain = {
                    Phase.PUBLISH: self._publish,
                    Phase.VALIDATE: self._validate,
                    Phase.TRAIN: self._train,
                    Phase.SAVE: self._save,
                    Phase.EXPORT: self._export,
                }
                await plain[act.phase](act.iteration)
                if act.phase in (Phase.TRAIN, Phase.SAVE, Phase.PUBLISH):
                    self._load.trained(clock.monotonic_s() - began_s)
        return Acted(act.seq)

    def stop(self) -> bool:
        """Samples nothing more; returns whether something is sampled beside the acts."""
        return self._batches.track.stop()

    async def end(self, end: phases.End) -> None:
        """Writes the complete row of metrics, and orders every node to quit."""
        await self._commits.close()
        if end.exit_code == EXIT_FINISHED:
            self._row.flush()
        await self._clients.quit(end.reason, end.exit_code, QUIT_DEADLINE_S)

    # ---- phases ---------------------------------------------------------------------------------

    async def _build(self) -> Resumed:
        store = await self._clients.ask(0, c.OpenTrainerStore())
        await self._clients.ask_trainer_nodes(c.BuildTrainer(host=store.host, port=store.port))
        restoring = Restoring(self._node, self._clients, self._commits.checkpoints, self._commits.events)
        began_s = clock.monotonic_s()
        found = await restoring.run()
        restored_s = round(clock.monotonic_s() - began_s, 6)
        await self._commits.check_newest()
        await call_in_thread(partial(self._commits.checkpoints.adopt, found.adopted))
        if found.adopted:
            self._commits.resumed(found.adopted)
        if found.adopted and not found.is_local:
            await self._commits.note(found.iteration)
        paths, guard = self._node.paths, self._check_newest
        before = await self._patiently(partial(read_metric_rows, paths.metrics))
        file = await self._patiently(partial(RowFile, paths.metrics, found.iteration, guard))
        whole = [row for row in before if found.adopted and completes_draft(row, found.row)]
        row = whole[-1] if whole else {**validation_of(before, found.iteration), **found.row}
        self._row.resume(file, row, written=before, unwritten=found.unwritten)
        await self._patiently(lambda: RowFile(paths.samples, found.iteration + 1, guard).close())
        self.slabs.resumed(found.row)
        self._commits.events.emit(
            AttemptResumed(
                iteration=found.iteration,
                seconds=restored_s,
                local_bytes=found.local_bytes,
                is_local=found.is_local,
                changed=list(found.changed),
                lost=max((row[STEP] for row in before), default=0),
            )
        )
        if found.changed:
            self._row.count({CHANGED_INPUTS: len(found.changed)})
        return found

    async def _patiently(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in a thread, with retries: only claims and commits may fail an attempt at once."""
        return await call_in_thread(partial(with_retries, work))

    async def _publish(self, policy_version: int) -> None:
        await self.slabs.ready()
        await self._batches.track.may_publish()
        probe = self._probe(policy_version)
        order = m.Publish(policy_version=policy_version, probe=probe)
        answers = await self._clients.ask_trainer_nodes(order)
        take = c.TakeWeights(
            policy_version=policy_version,
            probe=probe,
            probe_logprobs=answers[0].probe_logprobs,
            rounding=answers[0].rounding,
            sums=sum_of_boxes(answer.sums for answer in answers),
            part_sums=sum_of_parts(answer.part_sums for answer in answers),
        )
        await self._clients.ask_nodes(dict.fromkeys(sorted(self._node.placement.pools[ROLLOUT]), take))
        self._row.values["perf/weights_bytes"] = sum(answer.size_bytes for answer in answers)

    async def _measure_held_out(self, iteration: int) -> None:
        """Measures the loss of held-out rows whose completions are given."""
        opened = await self._clients.ask_trainer_nodes(c.OpenHeldOut())
        groups = sorted((g for answer in opened for g in answer.groups), key=lambda group: group.number)
        if not groups:
            raise ConfigError(
                "data.val_files: none of the first rows (validation.max_prompts) is short enough; raise "
                "data.max_prompt_tokens, rollout.max_response_tokens, or validation.max_prompts."
            )
        order = await self._train_order(iteration, groups, len(groups), is_held_out=True)
        measured = await self._clients.ask_trainer_nodes(order)
        found = measured[0].metrics.items()
        self._row.values |= {key.replace("train/", "val/"): v for key, v in found if key.startswith("train/")}

    async def _validate(self, iteration: int) -> None:
        if self._node.config.is_given:
            await self._measure_held_out(iteration)
            return
        began_s = clock.monotonic_s()
        await self._batches.track.quiet()
        self._row.waited(clock.monotonic_s() - began_s)
        found: dict[str, list[c.SourceScores]] = {}
        for answer in await self._clients.ask_trainer_nodes(c.ValidateOrder(iteration=iteration)):
            for source, scores in answer.sources.items():
                found.setdefault(source, []).append(scores)
        self._batches.track.quiet_is_over()
        for source, parts in found.items():
            self._validated(iteration, source, parts)

    def _validated(self, iteration: int, source: str, parts: Sequence[c.SourceScores]) -> None:
        """Adds a data source's results to the row. A completion without a score is left out of the mean, as
        in training, and counted."""
        section, values = self._node.config.validation, self._row.values
        count, failed = sum(part.count for part in parts), sum(part.failed for part in parts)
        if not count:
            return
        values[f"val-aux/{source}/{section.reward}/failed"] = failed
        values[f"val-aux/{source}/{section.reward}/{FAILED_SHARE}"] = failed / count
        if failed:
            reasons = Counter[str]()
            for part in parts:
                reasons.update(part.reasons)
            self._commits.events.emit(
                ValidationFailed(
                    iteration=iteration,
                    source=source,
                    reward=section.reward,
                    failed=failed,
                    count=count,
                    why=reasons.most_common(1)[0][0],
                )
            )
        if scored := count - failed:
            key = f"{source}/{section.reward}/mean@{section.n}"
            values[f"val-core/{key}"] = sum(part.total for part in parts) / scored
            for name in sorted({name for part in parts for name in part.extras}):
                total = sum(part.extras.get(name, 0.0) for part in parts)
                values[f"val-aux/{source}/{name}/mean@{section.n}"] = total / scored
            values |= of_prompts(parts, source, section)

    # ---- sampling -------------------------------------------------------------------------------

    async def _take_batch(self, iteration: int) -> bool:
        """Waits for the batch; returns whether groups are missing."""
        self._row.flush()
        began_s = clock.monotonic_s()
        again = await self._batches.track.batch(iteration)
        self._row.waited(clock.monotonic_s() - began_s)
        self._use(self._batches.take(iteration))
        return again

    async def _score(self, act: phases.Act) -> bool:
        """Scores the batch with engines that take turns; returns whether groups are missing at the end."""
        batch = await self._batches.score(act.iteration, act.scoring)
        self._use(batch)
        return act.scoring + 1 >= len(self._node.placement.turns) and batch.num_missing > 0

    def _use(self, batch: Batch) -> None:
        self._groups, self._judges = batch.groups, batch.judges
        self._row.count(batch.counters)
        self._row.sampled(batch.seconds)
        self._load.sampled(batch.counters, batch.seconds)

    # ---- training -------------------------------------------------------------------------------

    async def _train(self, iteration: int) -> None:
        began_s = clock.monotonic_s()
        groups = [self._groups[number] for number in sorted(self._groups)]
        load = asyncio.ensure_future(self._load.batch_over(iteration, groups))
        groups, order = await self._with_pictures(iteration, groups)
        trained = await self._clients.ask_trainer_nodes(order)
        numbers = tuple(sorted(self._groups))
        await self._clients.ask_trainer_nodes(c.CommitNotice(iteration=iteration, numbers=numbers))
        self._costs = self._costs.after(cost for node in trained for cost in node.costs)
        self._row.fill(iteration, trained, groups, clock.monotonic_s() - began_s)
        self._row.values |= {**await load, **self._judges, "placement/cost_ratio": self._cost().b}
        self._groups = {}

    async def _with_pictures(
        self, iteration: int, groups: list[c.GroupFact]
    ) -> tuple[list[c.GroupFact], c.TrainOrder]:
        """Returns the order of an update, and its groups, when ranks have seen the pictures of all of them. A
        group of which one cannot be used any more is left out, and the others are dealt anew.

        Raises:
            ConfigError: none is left.
        """
        while groups:
            order = await self._train_order(iteration, groups, self._node.config.trainer.mini_batch_size)
            numbers = tuple(group.number for group in groups)
            show = c.ShowPictures(
                iteration=iteration, numbers=numbers, plan=order.plan, dp_lead_ranks=order.dp_lead_ranks
            )
            has_pictures = bool(self._node.config.data.media_store)
            shown = await self._clients.ask_trainer_nodes(show) if has_pictures else ()
            lost = {sample_id: why for answer in shown for sample_id, why in answer.lost.items()}
            if not lost:
                return groups, order
            whys = {fact.prompt_group: lost[i] for fact in order.facts if (i := fact.sample_id) in lost}
            await self._clients.ask_trainer_nodes(c.LeaveOut(iteration=iteration, reasons=whys))
            num_lost = sum(fact.prompt_group in whys for fact in order.facts)  # some nodes may have it still
            self._row.count({MEDIA_FAULTS: num_lost, FAILED_GROUPS: len(whys)})
            groups = [group for group in groups if group.number not in whys]
        raise ConfigError(
            f"no prompt group is left for update {iteration}, because pictures of all of them cannot be used "
            "any more: the rollout.group.drop events have each one's reason; put the files back."
        )

    async def _train_order(
        self,
        iteration: int,
        groups: Sequence[c.GroupFact],
        groups_per_step: int,
        *,
        is_held_out: bool = False,
    ) -> c.TrainOrder:
        """Deals the groups' samples to ranks and micro-batches."""
        config, parallel = self._node.config, self._node.config.trainer
        facts = tuple(fact for group in groups for fact in group.samples)
        tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        dp_size = self._node.placement.world_size // (
            tp_size * cp_size * parallel.pipeline_model_parallel_size
        )
        plan = await call_in_thread(
            partial(
                plan_iteration,
                facts,
                groups_per_step=groups_per_step,
                dp_size=dp_size,
                cap_tokens=parallel.max_tokens_per_micro_batch,
                cost=self._cost(),
                keeps_groups=config.has_pairs,
            )
        )
        leads = dp_lead_ranks(tp_size=tp_size, cp_size=cp_size, dp_size=dp_size)
        return c.TrainOrder(
            iteration=iteration, facts=facts, plan=plan, dp_lead_ranks=leads, is_held_out=is_held_out
        )

    def _cost(self) -> Cost:
        """Returns the measured cost; in deterministic mode a constant, since nothing may depend on timing."""
        return Cost() if self._node.config.run.deterministic else self._costs.cost()

    async def _save(self, iteration: int) -> None:
        """Takes a snapshot of all state; the upload goes on in the background."""
        await self._batches.track.may_publish()  # the snapshot has the weights that are published next
        began_s, config = clock.monotonic_s(), self._node.config
        taken = await self._clients.ask_trainer_nodes(m.TakeSnapshot(iteration=iteration))
        draft = Manifest(
            iteration=iteration, attempt=self._node.attempt, parent=self._commits.checkpoints.parent,
            run_id=config.run.id, config_hash=self._node.config_hash, files=(), nodes=(),
            common=msgspec.Raw(next(node.common for node in taken if node.common != b"{}")),
            row=strict_row(self._row.values), unwritten=tuple(map(strict_row, self._row.unwritten)),
            inputs=dict(self._node.inputs) or msgspec.UNSET,
        )  # fmt: skip
        size_bytes = sum(node.size_bytes for node in taken)
        self._commits.events.emit(CheckpointBegan(iteration=iteration, size_bytes=size_bytes))
        self._commits.begin(self._commits.checkpoints.prefix(iteration), draft, size_bytes)
        self._row.values["ckpt/bytes"] = size_bytes
        self._row.values["ckpt/stall_s"] = clock.monotonic_s() - began_s

    async def _export(self, _: int) -> None:
        """Writes the policy as a Hugging Face folder. A failure costs no training: all of it is committed."""
        await self._clients.ask_trainer_nodes(m.ExportHF(folder=str(self._node.paths.model)))

    def _check_newest(self) -> None:
        check_newest(self._node.paths, self._node.attempt)

    def _probe(self, policy_version: int) -> tuple[bytes, ...]:
        config, section = self._node.config, self._node.config.sync
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1
        num_tokens = min(section.probe_tokens, longest)
        draw = random.Random(f"probe/{config.run.seed}/{policy_version}")
        rows = self._probe_tokens.sequences(draw, section.probe_prompts, num_tokens, longest)
        return tuple(map(pack_ids, rows))


async def start_workers(node: Node, clients: NodeClients) -> None:
    """Makes all nodes start their processes."""
    launch = node.config.launch
    await clients.ask_all(c.StartWorkers(), max(launch.start_timeout_s, launch.phase_timeout_s))


def of_prompts(parts: Sequence[c.SourceScores], source: str, section: ValidationSection) -> dict[str, float]:
    """Returns the metrics of a data source that need several completions of a prompt: best@N and maj@N."""
    num_prompts, metrics = sum(part.num_prompts for part in parts), dict[str, float]()
    for size in sorted({size for part in parts for size in part.best}):
        kind = "val-core" if size == section.n else "val-aux"
        sums = [part.best[size] for part in parts if size in part.best]
        best = sum(total for total, _ in sums) / sum(number for _, number in sums)
        metrics[f"{kind}/{source}/{section.reward}/best@{size}"] = best
    if section.n > 1 and any(part.num_voted for part in parts):
        majority = sum(part.majority for part in parts) / num_prompts
        metrics[f"val-core/{source}/{section.reward}/maj@{section.n}"] = majority
    return metrics
