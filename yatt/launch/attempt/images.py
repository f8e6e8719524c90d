"""Copies a container's image to each node's local disk before the steps that run in it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from yatt import clock
from yatt.config.site import ContainerSection, SiteConfig, step_environment
from yatt.launch.attempt.attempts import POLL_S
from yatt.launch.node.allocation import Allocation
from yatt.launch.node.steps import python_of, srun_line
from yatt.launch.resolve.plan import Component

START_S = 60.0
"""Time for a step to start and end, in addition to the copying."""

END_S = 10.0


def with_local_image(
    site: SiteConfig,
    components: tuple[Component, ...],
    allocation: Allocation,
    absent: frozenset[int],
    say: Callable[[str], None],
    is_told: Callable[[], bool],
) -> SiteConfig:
    """Returns the site with the image's local copy if every node has one, else the site unchanged.

    Args:
        is_told: whether this start of the job has to end; stops the copying.
    """
    stage, image = site.stage, site.container.image
    if not stage.folder or "container" not in stage.what or not _is_file(image) or is_told():
        return site
    outside = replace(site, container=ContainerSection())
    program = (python_of(outside), "-P", "-m", "yatt.launch.node.staging", json.dumps(asdict(stage)), image)
    orders = [
        (*srun_line(components, number, outside, allocation, absent), *program)
        for number, part in enumerate(components)
        if set(part.indexes) - absent
    ]
    try:
        lines = _lines(orders, step_environment(site, os.environ), stage.limit_s + START_S, is_told)
    except OSError as error:  # no process, file descriptor or temporary file
        lines = []
        say(f"the step that copies {image} cannot be started ({error.strerror})")
    num_nodes = sum(len(set(part.indexes) - absent) for part in components)
    if len(lines) == num_nodes and len(set(lines)) == 1 and image not in lines:
        return replace(site, container=replace(site.container, image=lines[0]))
    if not is_told():
        say(f"not every node has a copy of {image} in {stage.folder}; it is read from its original place")
    return site


def _is_file(image: str) -> bool:
    """Whether the image is a file, not a name to fetch. False if the filesystem fails: the runtime reports
    it."""
    try:
        return Path(image).is_file()
    except OSError:
        return False


def _lines(
    orders: list[tuple[str, ...]], env: dict[str, str], limit_s: float, is_told: Callable[[], bool]
) -> list[str]:
    """Returns the output lines of the steps that succeeded within `limit_s`.

    Raises:
        OSError: the steps cannot be started.
    """
    until_s, steps = clock.monotonic_s() + limit_s, list[subprocess.Popen[bytes]]()
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in orders]
        try:
            for order, output in zip(orders, outputs, strict=True):
                nothing = subprocess.DEVNULL
                step = subprocess.Popen(order, env=env, stdin=nothing, stdout=output, stderr=sys.stderr)
                steps.append(step)
            while any(step.poll() is None for step in steps) and clock.monotonic_s() < until_s:
                if is_told():
                    break
                time.sleep(POLL_S)
        finally:
            for step in steps:
                _end(step)
        return [
            line
            for step, output in zip(steps, outputs, strict=True)
            if step.returncode == 0
            for line in _read(output).splitlines()
        ]


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def _end(step: "subprocess.Popen[bytes]") -> None:
    if step.poll() is None:
        step.terminate()
    try:
        step.wait(END_S)
    except subprocess.TimeoutExpired:
        step.kill()
        step.wait()
