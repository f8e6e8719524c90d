"""The leader's work in the phases of an evaluation: orders to the nodes, and the result from what they write.

Each trainer node writes its samples in the order of its prompts; they are joined line by line, so no process
has all of them in memory.
"""

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from yatt.adapters.files.files import read_record
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.checkpoint.convert.hf_folder import whole_folder
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.phase_work import QUIT_DEADLINE_S, start_workers
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.node import Node
from yatt.control.rollouts.groups.kept_files import remove_files
from yatt.core.figures.evaluation import (
    RESULT_NAME,
    SAMPLES_NAME,
    EvalRequest,
    EvalResult,
    EvaluatedSample,
    encoded_result,
    result_of,
)
from yatt.core.phases import phases
from yatt.core.phases.phases import Acted, Phase
from yatt.errors import EXIT_FINISHED, ConfigError
from yatt.records import cluster as c


class EvaluationWork:
    """The leader's work in each phase of an evaluation."""

    def __init__(self, node: Node, clients: NodeClients, slabs: Slabs) -> None:
        self._node, self._clients, self.slabs = node, clients, slabs
        self._too_long = 0

    async def run(self, act: phases.Act) -> Acted:
        """Carries out one act.

        Raises:
            ConfigError: no prompt is short enough.
            OSError: the result cannot be written.
        """
        placement = self._node.placement
        match act.phase:
            case Phase.JOIN:
                await start_workers(self._node, self._clients)
            case Phase.BUILD:
                await call_in_thread(partial(check_newest, self._node.paths, self._node.attempt))
            case Phase.VALIDATE:
                self._sampled(await self._evaluated(placement.sampling.values()))
            case Phase.SCORE:
                await self._evaluated(placement.turns[act.scoring].values())
            case Phase.EXPORT:
                await self._write()
        return Acted(act.seq)

    def stop(self) -> bool:
        """Returns whether something is sampled beside the acts."""
        return False

    async def end(self, end: phases.End) -> None:
        """Removes kept groups that nobody needs any more, and orders every node to quit."""
        if end.exit_code == EXIT_FINISHED:
            await call_in_thread(partial(remove_files, self._node.paths.kept_groups, list))
        await self._clients.quit(end.reason, end.exit_code, QUIT_DEADLINE_S)

    async def _evaluated(self, roles: Iterable[str]) -> list[c.PromptsDone]:
        return await self._clients.ask_trainer_nodes(c.EvaluatePrompts(roles=tuple(sorted(set(roles)))))

    def _sampled(self, answers: Sequence[c.PromptsDone]) -> None:
        self._too_long = sum(answer.too_long for answer in answers)
        if not any(answer.num_prompts for answer in answers):
            raise ConfigError(
                "every prompt is longer than data.max_prompt_tokens "
                f"{self._node.config.data.max_prompt_tokens}; write a larger number."
            )

    async def _write(self) -> None:
        await self._clients.ask_trainer_nodes(c.WriteSamples())
        node = self._node
        files = [node.paths.evaluated_samples(node.attempt, index) for index in node.placement.trainer_nodes]
        await call_in_thread(partial(write_result, node.paths.evaluation, files, self._too_long))


def write_result(request: Path, files: Sequence[Path], too_long: int) -> None:
    """Writes samples and result into a new folder, which appears when it is whole. One that exists is that of
    an attempt that ended right after it, unless it is somebody else's.

    Args:
        request: file of an `EvalRequest`.
        files: samples of one trainer node each.
        too_long: number of prompts that were not used.

    Raises:
        ConfigError: the folder exists and is not empty, or cannot be made.
        OSError: a disk is full, or fails.
    """
    wanted = msgspec.json.decode(read_record(request), type=EvalRequest)
    if _is_written(wanted):
        return
    with whole_folder(Path(wanted.out)) as folder:
        known = list[EvaluatedSample]()
        with (folder / SAMPLES_NAME).open("xb") as file:
            for line, sample in joined_samples(files):
                file.write(line)
                known.append(sample.without_texts())
            file.flush()
            os.fsync(file.fileno())
        with (folder / RESULT_NAME).open("xb") as file:
            result = result_of(wanted, known, too_long)
            file.write(msgspec.json.format(encoded_result(result), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _is_written(wanted: EvalRequest) -> bool:
    """Whether there is this evaluation's result already."""
    try:
        found = msgspec.json.decode((Path(wanted.out) / RESULT_NAME).read_bytes(), type=EvalResult)
    except (OSError, msgspec.DecodeError):
        return False
    same = ("source", "iteration", "data", "settings")
    return all(getattr(found, name) == getattr(wanted, name) for name in same)


def joined_samples(files: Sequence[Path]) -> Iterator[tuple[bytes, EvaluatedSample]]:
    """Yields the lines of all files, with their samples, in the order of the prompts."""
    decoder = msgspec.json.Decoder(EvaluatedSample)

    def lines(path: Path) -> Iterator[tuple[bytes, EvaluatedSample]]:
        with path.open("rb") as file:
            for line in file:
                yield line, decoder.decode(line)

    yield from heapq.merge(*map(lines, files), key=lambda each: each[1].prompt_number)
