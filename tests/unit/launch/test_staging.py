"""What a node copies to its own disk, and what happens when it cannot."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HANG_S
from tests.unit.core.test_placement import config
from yatt.adapters.files.files import read_or_none, unsealed_any
from yatt.adapters.node_local import local_copy
from yatt.adapters.run_folder.ledger import ENDED, STOP, write_record
from yatt.adapters.run_folder.staged import load_on_node, note_copies, on_node
from yatt.config.load import resolved_text
from yatt.config.schema import PlacementSection
from yatt.config.site import SiteConfig, StageSection, load_site
from yatt.errors import ConfigError
from yatt.launch.node.staging import Staging, fault_of, media_folders, sources_of
from yatt.launch.node.step import STOP_LOOK_S, _Step
from yatt.launch.resolve.plan import Resized, effective_config
from yatt.paths import RunPaths


def staging(folder: str, said: list[str], *, is_told: bool = False, **section: object) -> Staging:
    stage = StageSection(folder=folder, **section)
    return Staging(stage, {"TMPDIR": os.environ.get("STAGE_TEST", "/nowhere")}, said.append, lambda: is_told)


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


def test_each_source_has_a_copy_and_nothing_is_said(source: str, tmp_path: Path) -> None:
    said: list[str] = []
    mine = staging(str(tmp_path), said, keep_h=0)
    copies = mine.run([source])
    assert said == []
    assert Path(copies[source], "config.json").read_text() == "{}"
    mine.close()
    assert not Path(copies[source]).exists()


def test_a_copy_stays_for_later_runs(source: str, tmp_path: Path) -> None:
    mine = staging(str(tmp_path), [], keep_h=1)
    copies = mine.run([source])
    mine.close()
    assert Path(copies[source]).exists()


def test_a_folder_may_be_named_by_a_variable_of_the_step(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE_TEST", str(tmp_path))
    said: list[str] = []
    copies = staging("$TMPDIR", said).run([source])
    assert copies[source].startswith(str(tmp_path))
    assert fault_of(StageSection(folder="$TMPDIR"), {"TMPDIR": str(tmp_path)}) == ""


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("$JOB_TMP/x", "the environment variable JOB_TMP is not set"),
        ("/proc/here", "No such file or directory"),
        ("${", "Invalid placeholder in string: line 1, col 1"),
    ],
)
def test_without_its_folder_everything_is_read_from_where_it_is(source: str, folder: str, why: str) -> None:
    said: list[str] = []
    assert staging(folder, said).run([source]) == {}
    assert said == [f"stage.folder {folder} cannot be used ({why}); nothing is copied"]
    assert fault_of(StageSection(folder=folder), {}) == f"stage.folder {folder} cannot be used ({why})"


def test_a_file_that_cannot_be_staged_costs_only_its_copy(source: str, tmp_path: Path) -> None:
    said: list[str] = []
    missing = str(tmp_path / "missing")
    assert list(staging(str(tmp_path), said).run([missing, source])) == [source]
    assert said == [
        f"{missing} is not copied (No such file or directory); it is read from its original place"
    ]


def test_a_filesystem_that_stands_still_costs_its_limit(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = threading.Event()
    monkeypatch.setattr(local_copy, "copied_parts", lambda _: [stands.wait(HANG_S)][:0])
    said: list[str] = []
    assert staging(str(tmp_path), said, limit_s=1).run([source]) == {}
    assert said == [f"{source} was not copied within 1 s (stage.limit_s); it is read from its original place"]
    said.clear()
    assert staging(str(tmp_path), said, limit_s=600, is_told=True).run([source]) == {}
    assert said == []
    stands.set()


def test_a_disk_that_stands_still_at_the_end_holds_nobody(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, stands, ended = staging(str(tmp_path), []), threading.Event(), list[bool]()
    mine.run([source])
    monkeypatch.setattr("yatt.launch.node.staging.CLOSE_S", 0.2)
    monkeypatch.setattr(local_copy.LocalCopies, "release", lambda *_, **__: ended.append(stands.wait(HANG_S)))
    mine.close()
    assert not ended
    stands.set()


def test_a_defect_costs_a_line(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy, "copied_parts", lambda _: raises(ValueError("odd")))
    said: list[str] = []
    assert staging(str(tmp_path), said).run([source]) == {}
    assert said == [f"{source} is not copied (ValueError: odd); it is read from its original place"]


def test_a_folder_in_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = StageSection(folder="/dev/shm")
    assert "is in memory" in fault_of(stage, {})
    (Path("/dev/shm") / f"yatt-stage-{os.getuid()}").rmdir()


def test_a_node_copies_what_its_roles_read() -> None:
    run = config(3, 1, 1, 1)
    run = replace(run, placement=PlacementSection(mode="disaggregated", genrm_gpu_sets=1, trainer_nodes=1))
    judge = run.genrms[0].model
    policy, data = run.model.path, run.data.train_files
    stage = StageSection(folder="/local")
    assert sources_of(run, stage, 0) == (policy, *data)
    engines = {sources_of(run, stage, node) for node in (1, 2)}
    assert engines <= {(policy,), (judge,), (policy, judge)}
    assert any(judge in sources for sources in engines)
    critic = replace(
        run, critic=replace(run.critic, path="/critic"), algorithm=replace(run.algorithm, adv_estimator="gae")
    )
    assert sources_of(critic, stage, 0) == (policy, "/critic", *data)
    assert {sources_of(critic, stage, node) for node in (1, 2)} == engines, "only trainers have one"
    only = StageSection(folder="/local", what=("data",))
    assert [sources_of(run, only, node) for node in (0, 1)] == [data, ()]
    assert sources_of(run, StageSection(folder="/local", what=("container",)), 0) == ()


def test_media_are_copied_where_the_site_wants_it_and_they_stay_the_same(tmp_path: Path) -> None:
    stage = StageSection(folder="/local", what=("media",))
    run = config(1, 1, 1, 0)
    seeing = replace(run, data=replace(run.data, media_root=str(tmp_path), media_store="/store"))
    assert media_folders(run, stage) == media_folders(seeing, StageSection(folder="/local")) == ()
    assert media_folders(seeing, stage) == (str(tmp_path), "/store")
    away = replace(seeing, data=replace(seeing.data, media_root="s3://bucket/pictures"))
    grows = replace(seeing, environment=replace(seeing.environment, path="/tool.py", images=True))
    nowhere = replace(seeing, data=replace(seeing.data, media_root=""))
    assert media_folders(away, stage) == media_folders(nowhere, stage) == ("/store",)
    assert media_folders(grows, stage) == (str(tmp_path),)
    assert sources_of(seeing, stage, 0) == ()


def test_the_processes_of_a_node_read_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, paths = config(1, 1, 1, 0), RunPaths(tmp_path)
    algorithm = replace(run.algorithm, adv_estimator="gae")
    run = replace(run, critic=replace(run.critic, path="/critic"), algorithm=algorithm)
    paths.config.write_text(resolved_text(run))
    assert load_on_node(paths, 1, 0) == run
    (tmp_path / "copy").mkdir()
    copies = {
        "/critic": str(tmp_path / "copy"),
        run.model.path: str(tmp_path / "copy"),
        run.genrms[0].model: str(tmp_path / "gone"),
    }
    note_copies(paths, 1, 0, copies)
    seen = load_on_node(paths, 1, 0)
    assert seen.model.path == str(tmp_path / "copy")
    assert seen.critic.path == str(tmp_path / "copy")
    assert seen.genrms == run.genrms, "a copy that is gone is not used"
    assert replace(seen, model=run.model, critic=run.critic) == run
    assert load_on_node(paths, 1, 1) == run, "another node's"
    assert load_on_node(paths, 2, 0) == run, "another attempt's"
    broken = OSError(errno.EIO, "the disk is broken")
    monkeypatch.setattr(Path, "exists", lambda path: raises(broken) if path.name == "copy" else True)
    assert on_node(run, paths, 1, 0).model == run.model


def test_a_copy_of_a_data_file_has_the_weight_of_its_source(tmp_path: Path) -> None:
    run, paths = config(1, 1, 1, 0), RunPaths(tmp_path)
    (source,) = run.data.train_files
    run = replace(run, data=replace(run.data, train_files=(source, "/other"), weights={source: 3.0}))
    paths.config.write_text(resolved_text(run))
    (tmp_path / "copy").write_text("")
    note_copies(paths, 1, 0, {source: str(tmp_path / "copy")})
    seen = load_on_node(paths, 1, 0).data
    assert seen.train_files == (str(tmp_path / "copy"), "/other")
    assert seen.weights == {str(tmp_path / "copy"): 3.0}


def raises(error: Exception) -> bool:
    raise error


def test_nodes_wait_longer_for_each_other_where_they_copy_first() -> None:
    run = config(1, 1, 1, 0)
    plain = effective_config(run, SiteConfig(), Resized())
    staged = effective_config(run, SiteConfig(stage=StageSection(folder="/local", limit_s=100)), Resized())
    assert staged.launch.start_timeout_s == plain.launch.start_timeout_s + 100


def test_a_relative_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("stage: {folder: scratch, what: [model]}\n")
    with pytest.raises(ConfigError, match=r"stage\.what\[0\]") as refused:
        load_site(file)
    file.write_text("stage: {folder: scratch}\n")
    with pytest.raises(ConfigError, match="is relative") as refused:
        load_site(file)
    assert refused.value.exit_code == 2


def test_the_images_own_step_prints_where_the_copy_is(tmp_path: Path) -> None:
    image = tmp_path / "yatt.sif"
    image.write_bytes(b"image")
    for folder, place in ((str(tmp_path), f"{tmp_path}/yatt-stage-"), ("/proc/nowhere", str(image))):
        section = json.dumps({"folder": folder, "what": ["container"]})
        argv = ["yatt.launch.node.staging", section, str(image)]
        done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(place)
        assert Path(done.stdout.strip()).read_bytes() == b"image"


@pytest.fixture
def step(tmp_path: Path) -> _Step:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    return _Step(paths, 2, 0, "")


def test_a_stop_of_any_kind_ends_the_copying(step: _Step) -> None:
    assert not step.ending.is_near()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # other threads do not hold it back
        assert step.ending.is_near()
    finally:
        signal.sigtimedwait({signal.SIGUSR2}, 10)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    assert not step.ending.is_near()
    write_record(step.paths, 2, STOP, {"reason": "the time limit is near"})
    assert not step.ending.is_near(), "the folder is not looked at all the time"
    step.ending.looked_s -= STOP_LOOK_S
    assert step.ending.is_near()


@pytest.mark.parametrize(("exit_code", "num_copies"), [(1, 0), (75, 1), (None, 1)])
def test_after_a_failed_attempt_the_disk_is_not_trusted(
    step: _Step, source: str, tmp_path: Path, exit_code: int | None, num_copies: int
) -> None:
    write_record(step.paths, 1, ENDED, {"exit_code": exit_code})
    said: list[str] = []
    step._stage(staging(str(tmp_path), said), (source,))
    noted = unsealed_any(read_or_none(step.paths.staged(2, 0))) or {"copies": {}}
    assert len(noted["copies"]) == num_copies
    assert (said == []) == bool(num_copies)
