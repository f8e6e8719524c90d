"""The process of one GenRM engine, as yatt.rollout with ``--genrm NAME``; its weights never change: for newer
ones (`genrms[].refresh`) a process is started with ``--model FOLDER``."""

import sys
from dataclasses import replace

from yatt.adapters.processes.worker_arguments import parse_arguments
from yatt.config.schema import GenRMSection, RunConfig
from yatt.engine.build import build_engine
from yatt.engine.environment import choose_device, choose_engine
from yatt.engine.process import main
from yatt.engine.protocol import genrm_options
from yatt.engine.worker import EnginePlan
from yatt.errors import ConfigError


def genrm_plan(config: RunConfig, name: str, folder: str = "") -> EnginePlan:
    """Plan of the engine of the GenRM with that name.

    Args:
        folder: with the weights; empty: the one that the run file names.

    Raises:
        ConfigError: the run file has no such GenRM.
    """
    genrm = next((each for each in config.genrms if each.name == name), None)
    if genrm is None:
        known = ", ".join(each.name for each in config.genrms) or "none"
        raise ConfigError(f"genrms: no GenRM is named {name!r} (known: {known}).")
    options = genrm_options(
        replace(genrm, model=folder or genrm.model),
        device=choose_device(config.launch.device),
        deterministic=config.run.deterministic,
        most_pictures=_most_pictures(config, genrm),
    )
    return EnginePlan(
        kind=choose_engine(genrm.engine, f"genrms[{name}].engine"),
        options=options,
        build=build_engine,
        start_limit_s=config.launch.start_timeout_s,
    )


def _most_pictures(config: RunConfig, genrm: GenRMSection) -> int:
    """Most pictures in a question: with `sees: all` each completion may have as many as a prompt."""
    if genrm.sees == "none" or not config.data.media_store:
        return 0
    if genrm.sees == "prompt":
        return config.media.most_per_prompt
    group = max(config.rollout.n, config.validation.n) if genrm.judging.by == "listwise" else 1
    return config.media.most_per_prompt * group * max(1, genrm.template.count("{completion"))


if __name__ == "__main__":
    arguments = parse_arguments("One GenRM engine of a yatt run.")
    sys.exit(main(arguments, lambda config: genrm_plan(config, arguments.genrm, arguments.model)))
