"""The process of one rollout engine: ``python -m yatt.rollout --run RUN --attempt N --worker NAME ...``."""

import sys

from yatt.adapters.processes.worker_arguments import parse_arguments
from yatt.config.schema import RunConfig
from yatt.engine.build import build_engine
from yatt.engine.environment import choose_device, choose_engine
from yatt.engine.process import main
from yatt.engine.protocol import rollout_options
from yatt.engine.worker import EnginePlan


def rollout_plan(config: RunConfig) -> EnginePlan:
    """Plan of the engine that samples the policy."""
    return EnginePlan(
        kind=choose_engine(config.rollout.engine, "rollout.engine"),
        options=rollout_options(config, choose_device(config.launch.device)),
        build=build_engine,
        start_limit_s=config.launch.start_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main(parse_arguments("One rollout engine of a yatt run."), rollout_plan))
