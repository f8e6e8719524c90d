"""A container's image that cannot be copied is used where it is."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from yatt.config.site import ContainerSection, SiteConfig, StageSection
from yatt.launch.attempt import images
from yatt.launch.attempt.images import with_local_image
from yatt.launch.node.allocation import Allocation
from yatt.launch.resolve.plan import Component

PART = Component(name="trainer", first=0, nodes=1, gpus_per_node=0)


@pytest.mark.parametrize("failing", ["the filesystem", "its step"])
def test_what_fails_costs_the_copy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    image = tmp_path / "yatt.sif"
    image.write_bytes(b"image")
    container = ContainerSection(runtime="apptainer", image=str(image))
    site = replace(SiteConfig(), container=container, stage=StageSection(folder=str(tmp_path)))
    allocation = Allocation(job_id="1", restarts=0, hosts={"trainer": ("n1",)}, groups={})

    def fails(*_: object, **__: object) -> bool:
        raise OSError(errno.EIO, "the disk is broken")

    if failing == "the filesystem":
        monkeypatch.setattr(Path, "is_file", fails)
    else:
        monkeypatch.setattr(images.tempfile, "TemporaryFile", fails)
    said: list[str] = []
    assert with_local_image(site, (PART,), allocation, frozenset(), said.append, lambda: False) == site
    assert len(said) == (2 if failing == "its step" else 0)
