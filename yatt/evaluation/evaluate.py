"""Carries out one evaluation with its processes."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from yatt.control.rollouts.episodes import Sampling, validation_sampling
from yatt.evaluation.host import Served, folder_of_pictures, handlers_restored, node_of, run_hosted
from yatt.evaluation.request import EvalSettings
from yatt.evaluation.samples import EvaluatedSamples, Evaluator


class Reporter(Protocol):
    """Where an evaluation reports to."""

    def progress(self, text: str) -> None:
        """Takes how far it is."""

    def say(self, text: str) -> None:
        """Takes a sentence for the user."""


def evaluated_samples(
    settings: EvalSettings, folder: Path, device: str, reporter: Reporter
) -> EvaluatedSamples:
    """Samples and scores all prompts.

    Args:
        folder: from `private_folder`.
        device: cpu or cuda.

    Raises:
        ConfigError: an input cannot be used.
        KeyboardInterrupt: Ctrl-C ended it; its processes have ended.
        WorkerFailed: a process ends again and again, or a signal came.
    """
    node = node_of(settings.config, folder, device)

    async def work(served: Served) -> EvaluatedSamples:
        return await Evaluator(served, settings.names, settings.limit, reporter.progress).run()

    try:
        with folder_of_pictures(node), handlers_restored():  # the event loop leaves the default ones
            return asyncio.run(run_hosted(node, work, sampling_of(settings), partial(reporter.say)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def sampling_of(settings: EvalSettings) -> Sampling:
    """Returns how samples are drawn: with the seeds of a run's validation."""
    rollout = settings.config.rollout
    return replace(
        validation_sampling(settings.config), temperature=settings.temperature, top_p=rollout.top_p,
        top_k=rollout.top_k, ignore_eos=rollout.ignore_eos,
    )  # fmt: skip
