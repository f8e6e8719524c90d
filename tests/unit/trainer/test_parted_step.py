"""Steps of an optimizer in parts: the state that comes and goes, and what ends a step before all parts."""

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.packages import trainer_module
from yatt.adapters.node_local.host_segment import SegmentReader, Stamp, segment_path
from yatt.errors import WorkerFailed

parted_step = trainer_module("mcore.parted_step")
host_copy = trainer_module("state.host_copy")
CPU = torch.device("cpu")


def away(numel: int) -> torch.Tensor:
    """A tensor without memory."""
    tensor = torch.zeros(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


def drawn_parts(draw: random.Random, data: torch.Tensor) -> tuple[list[list], list[list], list[list[int]]]:
    """Parts with runs of several pieces, some of which are no whole tensors, and some here; and where each is
    in the data, in elements; -1: here."""
    at, parts, runs, places = 0, [], [], []
    for _ in range(draw.choice((1, 2, 3, 7))):
        part, own, where = [], [], []
        for _ in range(draw.randrange(4)):
            if draw.random() < 0.3:
                part.append(parted_step.Piece(torch.full((5,), 7.0), 1, 4))
                where.append(-1)
            first, members = at, []
            for _ in range(draw.randrange(1, 4)):
                numel = draw.randrange(1, 40)
                begin = draw.randrange(numel)
                members.append((len(part), at - first))
                where.append(at // 4)
                part.append(parted_step.Piece(away(numel), begin, numel))
                at += 4 * (numel - begin)
                end = at
                at += draw.choice((0, 12))
            own.append(parted_step.HostRun(data[first:end], members))
            at += 64
        parts.append(part)
        runs.append(own)
        places.append(where)
    return parts, runs, places


@pytest.mark.parametrize("seed", range(40))
def test_each_piece_comes_with_its_content_and_goes_with_its_new_one(seed: int) -> None:
    draw, data = random.Random(seed), torch.zeros(1 << 14, dtype=torch.uint8)
    data.view(torch.float32)[:] = torch.arange(1 << 12)
    before = data.view(torch.float32).clone()
    parts, runs, places = drawn_parts(draw, data)
    touched, number = torch.zeros_like(before, dtype=torch.bool), 0
    for part, where, contents in zip(parts, places, parted_step.visit_on_host(parts, runs, CPU), strict=True):
        for (tensor, begin, end), at, content in zip(part, where, contents, strict=True):
            number += 1
            if at < 0:
                assert content.tolist() == [7.0] * 3
                content.mul_(2)
                assert tensor.tolist() == [7.0, *[14.0] * 3, 7.0]
                continue
            assert content.tolist() == before[at : at + end - begin].tolist()
            content.mul_(-1)
            touched[at : at + end - begin] = True
    assert number == sum(map(len, parts))
    assert torch.equal(data.view(torch.float32), torch.where(touched, -before, before))


class Counting:
    """Stands for megatron-core's inner optimizer with a fused Adam, which counts its calls in its groups."""

    def __init__(self, sizes: list[int], step: int | None = None) -> None:
        self.mains = [torch.ones(size) for size in sizes]
        self.models = [torch.zeros(size + 3) for size in sizes]
        half = len(sizes) // 2
        known = {} if step is None else {"step": step}
        groups = [{"params": self.mains[:half], **known}, {"params": self.mains[half:], **known}]
        state = {main: {"exp_avg": torch.zeros_like(main)} for main in self.mains}
        for main in self.mains:
            main.grad = torch.arange(len(main)).float()
        self.optimizer = SimpleNamespace(param_groups=groups, state=state, step=self._step)
        self.shard_fp32_from_float16_groups, self.model_float16_groups = [self.mains], [self.models]
        self.shard_fp32_groups, self.model_fp32_groups = [], []
        self.ddp_config, self.model_chunks = SimpleNamespace(overlap_param_gather=True), []
        self.calls: list[list[int]] = []

    def _get_model_param_range_map(self, model: torch.Tensor) -> dict:
        return {"param": SimpleNamespace(start=2, end=len(model) - 1)}

    def _step(self) -> None:
        self.calls.append([])
        for group in self.optimizer.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for main in group["params"]:
                self.calls[-1].append(len(main))
                main += group["step"] + main.grad
                self.optimizer.state[main]["exp_avg"] -= main.grad


@pytest.mark.parametrize("first", [4, None])
def test_every_part_has_the_same_number_of_the_step(
    monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    """A planted mistake of peers: a fused Adam that is called once a part corrects its bias as often."""
    monkeypatch.setattr(parted_step, "PART_BYTES", 8 * 130)
    inner = Counting([70, 60, 2, 300, 1, 4], first)
    wholes = [group["params"] for group in inner.optimizer.param_groups]
    assert parted_step._step_parts(inner, parted_step.all_here)
    assert inner.calls == [[70, 60], [2], [128], [128], [44, 1, 4]], "300 is larger than a part"
    assert [group["params"] for group in inner.optimizer.param_groups] == wholes
    assert {group["step"] for group in inner.optimizer.param_groups} == {number := (first or 0) + 1}
    for main, model in zip(inner.mains, inner.models, strict=True):
        assert torch.equal(main, torch.arange(len(main)) + 1.0 + number)
        assert torch.equal(inner.optimizer.state[main]["exp_avg"], -main.grad)
        assert model.tolist() == [0.0, 0.0, *main.tolist(), 0.0]
    assert len(inner.optimizer.state) == 6, "nothing is left of the parts"


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_ends_the_step_before_anything_changes(norm: float) -> None:
    class Chained:
        chained_optimizers = (Counting([4]),)

        def get_grad_norm(self) -> float:
            return norm

    optimizer = Chained()
    parted_step.step_in_parts(optimizer, parted_step.all_here)
    with pytest.raises(FloatingPointError, match=f"the gradient norm is {norm}"):
        optimizer.get_grad_norm()


def test_a_state_whose_step_failed_is_of_no_version(tmp_path: Path) -> None:
    """Whatever is asked of the rank afterwards: it would be stamped as the version before."""
    moment, main = torch.zeros(40), torch.zeros(30)
    host = host_copy.HostCopy(tmp_path / "rank", attempt=1)
    host.add(host_copy.KeptTensors(areas={"state": [main, moment]}))
    reader = SegmentReader(segment_path(tmp_path / "rank", "state"))
    host.keep_away("state")
    host.changed(5)
    host.copy(["state"])
    assert reader.stamp() == Stamp(1, 5)
    pieces = [[parted_step.Piece(main, 0, 30)], [parted_step.Piece(moment, 0, 40)]]
    with pytest.raises(ZeroDivisionError), contextlib.closing(host.visited(pieces)) as visited:
        for contents in visited:
            contents[0].add_(1)
            if len(contents[0]) == 40:
                raise ZeroDivisionError
    assert reader.stamp() is None
    for ask in (lambda: host.copy(["state"]), host.offload):
        with pytest.raises(WorkerFailed, match="the host copy's state was being changed when that failed"):
            ask()
    assert reader.stamp() is None
    for _ in host.visited(pieces):
        pass
    host.changed(6)
    host.offload()
    assert reader.stamp() == Stamp(1, 6) and set(host.view(main).tolist()) == {1.0}


def test_a_part_that_fails_leaves_nothing_of_it() -> None:
    inner = Counting([4, 6], 1)
    inner.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        parted_step._step_parts(inner, parted_step.all_here)
    assert [len(group["params"]) for group in inner.optimizer.param_groups] == [1, 1]
    assert {group["step"] for group in inner.optimizer.param_groups} == {1}
    assert set(inner.optimizer.state) == set(inner.mains)
