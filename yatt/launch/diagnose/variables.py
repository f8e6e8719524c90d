"""Findings about environment variables that a run's trainer ranks would get."""

from collections.abc import Iterator, Mapping

from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig, step_environment
from yatt.core.attempts.trainer_environment import contrary_variables
from yatt.errors import Finding
from yatt.launch.diagnose.records import fail, warn


def variable_findings(site: SiteConfig, config: RunConfig, env: Mapping[str, str]) -> Iterator[Finding]:
    """Compares what the nodes' processes get with what megatron-core wants on GPUs.

    Args:
        env: of this process, which the job inherits.
    """
    if config.launch.device == "cpu":
        return
    for each in contrary_variables(config, step_environment(site, env)):
        where = "the site file (env)" if each.name in site.env else "your shell or `setup`"
        cure = f"It comes from {where}."
        yield (fail if each.is_refused else warn)("environment", f"{each.name} {each.says}", cure)
