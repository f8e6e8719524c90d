"""The process of one engine that samples an evaluated model: as ``yatt.rollout``, with weights that stay."""

import sys
from dataclasses import replace

from yatt.adapters.processes.worker_arguments import parse_arguments
from yatt.config.schema import RunConfig
from yatt.engine.process import main
from yatt.engine.worker import EnginePlan
from yatt.rollout.__main__ import rollout_plan


def evaluated_plan(config: RunConfig) -> EnginePlan:
    """Plan of an engine whose weights are those of the model folder, also if they are quantised."""
    plan = rollout_plan(config)
    return replace(plan, options=replace(plan.options, weights_are_replaced=False))


if __name__ == "__main__":
    sys.exit(main(parse_arguments("One engine of yatt eval."), evaluated_plan))
