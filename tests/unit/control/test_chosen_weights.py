"""The leader's choice of a GenRM's weights: what is recorded, what a fault costs, and what is kept."""

import asyncio
import json
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, RunFile, until
from yatt.adapters.run_folder.judge_weights import read_choice, record_choice, recorded_choices
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import open_store
from yatt.config.load import load_run_config
from yatt.control.leader import judge_refresh
from yatt.control.leader.judge_refresh import JudgeRefresh
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.errors import StaleAttempt, WorkerFailed
from yatt.launch.resolve.completed import completed_config
from yatt.obs.story.events import EventLog
from yatt.records.message import Done
from yatt.records.weights import ChosenWeights, UseJudges


@dataclass
class Nodes:
    """Notes the orders to all nodes."""

    told: list[UseJudges] = field(default_factory=list)
    judges: dict[str, str] = field(default_factory=dict)

    async def ask_all(self, order: UseJudges) -> list[Done]:
        self.told.append(order)
        return [Done()]


@dataclass
class Bench:
    """A run with a judge that another run trains, and that run's store."""

    judge: RunFile
    run: RunFile
    every: int = 2
    nodes: Nodes = field(default_factory=Nodes)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def store(self) -> str:
        return str(self.judge.run_dir / "checkpoints")

    @property
    def place(self) -> Path:
        return self.run.run_dir / "judges" / "genrm-my%20judge"

    def save(self, iteration: int) -> None:
        """The other run commits one more checkpoint."""
        from tests.saved_weights import save

        store = open_store(self.store, {})
        if not store.names("adopted"):
            Checkpoints(store, 1, "other").adopt(None)
        save(store, self.judge.folder / "policy", iteration=iteration, run_id="other")

    def leader(self, attempt: int = 1) -> JudgeRefresh:
        genrm = {
            "name": "my judge", "model": str(self.judge.folder / "policy"), "template": "{completion}?",
            "verdict": {"pattern": "([0-9])"}, "refresh": {"url": self.store, "every": self.every},
        }  # fmt: skip
        self.run.settings.update(launch={"nodes": 1, "phase_timeout_s": 1}, genrms=[genrm])
        config = completed_config(load_run_config([self.run.write()], []))
        node = Node(
            config=config, paths=self.run_paths(attempt), placement=placement_of(config),
            attempt=attempt, index=0, host="", device="cpu",
        )  # fmt: skip
        events = EventLog(
            attempt=attempt, node=0, role="controller", sink=lambda line: self.lines.append(json.loads(line))
        )
        own = Checkpoints(open_store(str(self.run.run_dir / "checkpoints"), {}), attempt)
        return JudgeRefresh(node, self.nodes, own, events)  # type: ignore[arg-type]

    def run_paths(self, attempt: int) -> Any:
        from yatt.paths import RunPaths

        paths = RunPaths(self.run.run_dir)
        paths.claims.mkdir(parents=True, exist_ok=True)
        (paths.claims / f"{attempt:06d}").write_text("claimed")
        return paths

    @property
    def sources(self) -> dict[int, int]:
        return {begin: read_choice(self.place, begin).source for begin in recorded_choices(self.place)}

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    judge = RunFile(tmp_path / "judge")
    judge.write()
    (judge.run_dir).mkdir()
    return Bench(judge, RunFile(tmp_path / "run"))


def test_the_newest_weights_are_taken_every_so_often_and_recorded(bench: Bench) -> None:
    async def play() -> None:
        bench.save(1)
        leader = bench.leader()
        await leader.choose_first()
        assert bench.sources == {1: 1} and not bench.nodes.told
        bench.save(4)
        await leader.begin(1)
        assert leader.metrics() == {"genrm/my judge/refreshed_to": 1.0}
        await leader.begin(2)  # reads ahead
        await until(lambda: (bench.place / read_folder(bench, 4)).is_dir(), "the weights to be written")
        bench.save(6)  # too late for iteration 3
        await leader.begin(3)
        assert bench.sources == {1: 1, 3: 4}
        assert leader.metrics() == {"genrm/my judge/refreshed_to": 4.0}

    asyncio.run(play())
    folders = [order.folders["my judge"] for order in bench.nodes.told]
    assert folders[0] == folders[1] != folders[2]
    assert [(line["iteration"], line["source"]) for line in bench.told("judge.refresh")] == [(1, 1), (3, 4)]
    from tests.saved_weights import tensors_in

    wanted, found = tensors_in(bench.judge.folder / "policy"), tensors_in(Path(folders[2]))
    assert wanted.keys() == found.keys()
    assert all(bool((wanted[name] == found[name]).all()) for name in wanted)


def read_folder(bench: Bench, iteration: int) -> str:
    names = [path.name for path in bench.place.glob(f"{iteration:08d}.*-*")]
    return names[0] if names else "nothing yet"


def test_another_attempt_has_what_was_recorded_though_there_are_newer_weights(bench: Bench) -> None:
    async def play() -> None:
        bench.save(1)
        await bench.leader().begin(1)
        bench.save(5)
        second = bench.leader(attempt=2)
        await second.choose_first()
        await second.begin(1)
        await second.begin(2)
        assert bench.sources == {1: 1}
        await second.begin(3)
        assert bench.sources == {1: 1, 3: 5}

    asyncio.run(play())


def test_without_a_checkpoint_the_judge_is_its_model_and_the_news_say_so(bench: Bench) -> None:
    async def play() -> None:
        leader = bench.leader()
        await leader.choose_first()
        await leader.begin(1)
        assert bench.nodes.told[-1].folders == {"my judge": str(bench.judge.folder / "policy")}
        assert leader.metrics() == {"genrm/my judge/refreshed_to": 0.0}

    asyncio.run(play())
    assert not bench.told("judge.refresh")
    assert "has no checkpoint yet" in bench.told("judge.not_refreshed")[0]["why"]


@pytest.mark.parametrize("fault", ["damaged", "emptied", "other model"])
def test_weights_that_cannot_be_used_leave_those_that_were_there(bench: Bench, fault: str) -> None:
    async def play() -> None:
        bench.save(1)
        leader = bench.leader()
        await leader.begin(1)
        if fault == "emptied":
            shutil.rmtree(bench.store)
        else:
            bench.save(2)
        if fault == "damaged":
            for file in Path(bench.store).glob("global_step_2/*/rank*"):
                file.write_bytes(file.read_bytes()[:-50_000] + bytes(50_000))
        if fault == "other model":
            path = bench.judge.folder / "policy" / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 256}))
        await leader.begin(3)
        assert bench.sources == {1: 1, 3: 1}

    asyncio.run(play())
    (news,) = bench.told("judge.not_refreshed")
    assert news["iteration"] == 3 and news["why"]
    assert not list(bench.place.glob(".*")), "nothing half-written is left"


def test_a_damaged_record_and_lost_weights_end_the_attempt_with_place_and_cure(bench: Bench) -> None:
    async def play() -> None:
        bench.save(1)
        await bench.leader().begin(1)
        folder = bench.place / read_choice(bench.place, 1).folder
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(WorkerFailed, match=r"is gone: the weights that .*Put it back; or remove"):
            await bench.leader().begin(2)
        (bench.place / "00000001.json").write_text("{}")
        with pytest.raises(WorkerFailed, match=r"00000001.json is damaged; remove it"):
            await bench.leader().begin(2)

    asyncio.run(play())


def test_a_stale_attempt_records_nothing(bench: Bench) -> None:
    async def play() -> None:
        bench.save(1)
        stale = bench.leader()
        bench.run_paths(2)
        with pytest.raises(StaleAttempt):
            await stale.begin(1)

    asyncio.run(play())
    assert recorded_choices(bench.place) == []


def test_of_two_records_of_one_iteration_the_first_holds(bench: Bench) -> None:
    paths = bench.run_paths(1)
    first = record_choice(paths, "my judge", ChosenWeights(begins=3, attempt=1))
    second = ChosenWeights(begins=3, folder="00000004.000001-436a8a313533", source=4, attempt=2)
    assert record_choice(paths, "my judge", second) == first


@pytest.mark.parametrize(("saved", "left"), [((2, 5, 6), [5, 7]), ((6,), [7]), ((), [1, 3, 5, 7])])
def test_weights_that_no_attempt_can_need_again_are_removed(
    bench: Bench, saved: tuple[int, ...], left: list[int]
) -> None:
    """Of the newest two saves; an older one that is kept for ever counts for nothing."""
    from tests.saved_weights import save

    async def play() -> None:
        leader = bench.leader()
        own = Checkpoints(open_store(str(bench.run.run_dir / "checkpoints"), {}), 1)
        own.adopt(None)
        for iteration in (1, 3, 5):
            bench.save(iteration)
            await leader.begin(iteration)
        assert len(list(bench.place.glob("*-*"))) == 3
        for iteration in saved:
            save(own.store, bench.run.folder / "policy", iteration=iteration)
        bench.save(7)
        await leader.begin(7)

    asyncio.run(play())
    assert sorted(int(path.name[:8]) for path in bench.place.glob("*-*")) == left


def test_what_a_killed_attempt_was_writing_is_removed(bench: Bench) -> None:
    left = bench.place / ".00000002.000001-436a8a313533.17.0123abcd"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    async def play() -> None:
        bench.save(1)
        await bench.leader().begin(1)

    asyncio.run(play())
    assert bench.sources == {1: 1} and not left.exists()


def test_a_store_that_hangs_costs_a_time_limit_and_no_weights(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_hanging, is_over = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        if is_hanging.is_set():
            is_over.wait(HANG_S)
        return open_store(*arguments)

    monkeypatch.setattr(judge_refresh, "open_store", hang)

    async def play() -> None:
        bench.save(1)
        leader = bench.leader()
        await leader.begin(1)
        bench.save(2)
        is_hanging.set()
        await leader.begin(3)
        assert bench.sources == {1: 1, 3: 1}

    try:
        asyncio.run(play())
    finally:
        is_over.set()
    assert "did not answer within 1 s" in bench.told("judge.not_refreshed")[0]["why"]
