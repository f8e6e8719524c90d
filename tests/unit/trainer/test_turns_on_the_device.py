"""Two models that take turns on a device: whatever is done to them, each has its content when it is there."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from tests.packages import trainer_module
from yatt.adapters.node_local.host_segment import SegmentReader, Stamp, segment_path
from yatt.errors import WorkerFailed

host_copy = trainer_module("state.host_copy")
SIZES = {"weights": 40, "state": 70, "critic": 24, "critic_state": 50}
POLICY, CRITIC = ("weights", "state", "private"), ("critic", "critic_state", "critic_private")
BYTES = {
    names: 4 * sum(SIZES.get(name, 9) for name in names) + 4 * 11  # with gradients
    for names in (POLICY, CRITIC)
}


class Trainer:
    """A host copy of two models and what their tensors have to contain."""

    def __init__(self, folder: Path, *, is_kept_away: bool) -> None:
        self.stem, self.is_kept_away, self.in_turn = folder / "rank-00000", is_kept_away, False
        names = [*SIZES, "private", "critic_private"]
        self.tensors = {name: torch.zeros(SIZES.get(name, 9)) for name in names}
        self.wanted = dict.fromkeys(names, 0.0)
        self.gradients = [torch.zeros(11), torch.zeros(11)]
        self.host = host_copy.HostCopy(self.stem, attempt=1)
        self._add(POLICY, 0, is_apart=False)
        self.host.offload()
        self._add(CRITIC, 1, is_apart=True)
        if is_kept_away:
            self.host.keep_away("state")
            self.host.keep_away("critic_state")
        self.host.swap_out()
        self.host.changed(0)
        self.version = 0
        self.readers = {name: SegmentReader(segment_path(self.stem, name)) for name in SIZES}

    def _add(self, names: tuple[str, str, str], number: int, *, is_apart: bool) -> None:
        areas = {name: [self.tensors[name]] for name in names[:2]}
        kept = host_copy.KeptTensors(
            areas=areas, private=[self.tensors[names[2]]], dropped=[self.gradients[number]]
        )
        self.host.add(kept, is_apart=is_apart)

    def write(self, names: tuple[str, ...], value: float) -> None:
        """A model changes: on the device, or what is kept away on the host."""
        for name in names:
            if self.is_kept_away and name.endswith("state"):
                self.host.overwrite(name)
            self.host.view(self.tensors[name]).fill_(value)
            self.wanted[name] = value

    def update(self, value: float, *, trains_policy: bool) -> None:
        self.host.swap_in()
        self.look(CRITIC)
        self.look_at_copies(("weights", "state"))
        self.write(CRITIC, value)
        self.host.swap_out()
        if trains_policy:
            self.write(POLICY, value + 0.5)
        self.version += 1
        self.host.changed(self.version)

    def look(self, there: tuple[str, ...]) -> None:
        """Compares what is on the device, and finds nothing else there."""
        on_host = [name for name in there if self.is_kept_away and name.endswith("state")]
        assert self.host.device_bytes == BYTES[there] - 4 * sum(SIZES[name] for name in on_host)
        for name in there:
            assert self.host.view(self.tensors[name]).unique().tolist() == [self.wanted[name]]
            assert (self.tensors[name].untyped_storage().size() == 0) is (name in on_host)

    def look_at_copies(self, names: Collection[str] = tuple(SIZES)) -> None:
        """Compares segments as another process sees them."""
        for name in names:
            reader = self.readers[name]
            assert reader.stamp() == Stamp(1, self.version)
            found = torch.frombuffer(bytearray(reader.data), dtype=torch.float32)[: SIZES[name]]
            assert found.unique().tolist() == [self.wanted[name]]


@pytest.mark.parametrize("is_kept_away", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_contents_survive_turns_sleep_and_saves(seed: int, is_kept_away: bool, tmp_path: Path) -> None:
    draw, trainer = random.Random(seed), Trainer(tmp_path, is_kept_away=is_kept_away)
    trainer.look(POLICY)
    for number in range(30):
        match draw.choice(("update", "update", "warm up", "save", "publish", "sleep")):
            case "update":
                trainer.update(number + 1.0, trains_policy=True)
            case "warm up":
                trainer.update(number + 1.0, trains_policy=False)
            case "save":
                trainer.host.copy(SIZES)
                trainer.look_at_copies()
            case "publish":
                trainer.host.copy(["weights"])
            case "sleep":
                trainer.host.offload()
                trainer.look_at_copies()
                assert trainer.host.device_bytes == 0
                trainer.host.onload()
        trainer.look(POLICY)


def test_without_a_second_model_a_turn_is_nothing(tmp_path: Path) -> None:
    tensor = torch.ones(40)
    host = host_copy.HostCopy(tmp_path / "rank-00000", attempt=1)
    host.add(host_copy.KeptTensors(areas={"weights": [tensor]}))
    host.swap_in()
    assert host.device_bytes == 160
    host.swap_out()
    host.copy(["weights"])  # of the version that it was


def test_a_turn_that_failed_leaves_no_copy_that_could_be_saved(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, is_kept_away=False)
    trainer.update(1.0, trains_policy=True)
    trainer.host.copy(SIZES)
    trainer.host.swap_in()
    trainer.write(CRITIC, 2.0)
    trainer.host.swap_out()  # and the policy's update fails
    for name in ("critic", "critic_state"):
        assert trainer.readers[name].stamp() is None
    with pytest.raises(WorkerFailed, match="was being changed when that failed"):
        trainer.host.copy(SIZES)
