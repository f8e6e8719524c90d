"""`yatt resume RUN KEY=VALUE`: which keys change, what is recorded, and an edited config.yaml."""

import ast
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from tests.runs import RunFile
from yatt.adapters.run_folder.attempt_claim import claim_attempt, mark_finished
from yatt.adapters.run_folder.ledger import run_is_finished, write_record
from yatt.adapters.run_folder.run_config import changes_of, check_unedited, load_run
from yatt.config.load import load_resolved, load_run_config, resolved_text
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError
from yatt.launch.folder.folder import open_existing, open_folder
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.plan import JobPlan, Resized
from yatt.launch.resolve.resolved import resolve_config

PACKAGE = Path(__file__).parents[3] / "yatt"


@pytest.fixture
def run(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    config = load_resolved(make_run(source).config)
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    config = completed_config(config)
    return open_folder(config), config


def test_operational_keys_change_and_are_recorded(run, capsys) -> None:
    paths, config = run
    claim_attempt(paths)
    new = resolve_config(config, changes=["checkpoint.save_every=7", "lease.ttl_s=77"])
    new.record(paths)
    assert load_run(paths) == new.config != config
    assert load_resolved(paths.config) == config  # what the run was started with
    (changed,) = changes_of(paths)
    assert changed.after == 1
    assert changed.words == (
        f"checkpoint.save_every: was {config.checkpoint.save_every}, is 7",
        f"lease.ttl_s: was {config.lease.ttl_s}, is 77.0",
    )
    assert "changed lease.ttl_s: was" in capsys.readouterr().out
    resolve_config(load_run(paths), changes=["checkpoint.save_every=8"]).record(paths)
    assert load_run(paths).lease.ttl_s == 77 and [c.after for c in changes_of(paths)] == [1, 1]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "optimizer.lr=0.5",
            "optimizer.lr: was 0.001, is 0.5 (it decides what is trained, or which run this is)",
        ),
        ("run.seed=9", "run.seed: was 0, is 9 (it decides what is trained, or which run this is)"),
        ("rollout.n=3", "is 3 (it decides what is trained, or which run this is)"),
        ("optimizer.lrr=1", "optimizer.lrr: no such key. Did you mean 'lr'?"),
        ("lease.ttl_s=soon", "lease.ttl_s: 'soon' is not a number"),
        ("more.yaml", "argument 'more.yaml': write KEY=VALUE; overlay files are for new runs."),
    ],
)
def test_other_changes_are_refused_by_name_and_nothing_is_recorded(run, argument: str, says: str) -> None:
    paths, config = run
    config = replace(config, optimizer=replace(config.optimizer, lr=0.001))
    before = paths.sealed_config.read_bytes()
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve_config(config, changes=[argument])
    assert paths.sealed_config.read_bytes() == before


def test_data_files_move_with_their_weights(run, tmp_path) -> None:
    _, config = run
    (old,) = config.data.train_files
    config = replace(config, data=replace(config.data, train_files=(old, "/b"), weights={old: 2.0}))
    files = f"data.train_files=[{tmp_path}/new, {tmp_path}/b]"
    for more in ([], [f"data.weights={{{tmp_path}/new: 2.0}}"]):
        new = resolve_config(config, changes=[files, *more])
        assert [change.key for change in new.listed] == ["data.train_files"]
        assert new.config.data.weights == {f"{tmp_path}/new": 2.0}
    for weights in (f"{{{tmp_path}/b: 2.0}}", f"{{{tmp_path}/new: 3.0}}"):
        with pytest.raises(ConfigError, match=r"data\.weights: was .* decides what is trained"):
            resolve_config(config, changes=[files, f"data.weights={weights}"])
    for order in (f"/b, {old}", f"{old}, {tmp_path}/b"):
        assert resolve_config(config, changes=[f"data.train_files=[{order}]"]).config.data.weights == {
            old: 2.0
        }
    for argument in (f"data.train_files.0={tmp_path}/new", f"data={{train_files: [{tmp_path}/new, /b]}}"):
        assert resolve_config(config, changes=[argument]).config.data.weights == {f"{tmp_path}/new": 2.0}
    with pytest.raises(ConfigError, match=r"data\.weights: was .* decides what is trained"):
        resolve_config(config, changes=[f"data.train_files=[/b, {tmp_path}/new]"])
    with pytest.raises(ConfigError, match=r"data\.weights: was .*, is \{\} \(it decides what is trained"):
        resolve_config(config, changes=[files, "data.weights={}"])
    with pytest.raises(ConfigError, match=r"the run has 2 files with data\.weights, and these are 1"):
        resolve_config(config, changes=[f"data.train_files=[{tmp_path}/new]"])


def test_a_layout_is_kept_in_deterministic_mode(run) -> None:
    _, config = run
    strict = replace(config, run=replace(config.run, deterministic=True))
    argument = ["rollout.gpu_memory_utilization=0.5"]
    assert resolve_config(
        replace(strict, run=replace(strict.run, deterministic=False)), changes=argument
    ).listed
    with pytest.raises(ConfigError, match=r"the order of sums changes, and run\.deterministic is true"):
        resolve_config(strict, changes=argument)


def test_a_finished_run_continues_only_with_more_iterations(run) -> None:
    paths, config = run
    mark_finished(paths, claim_attempt(paths))
    total = config.trainer.total_iterations
    assert resolve_config(config, changes=["lease.ttl_s=77"]).is_over(paths)
    assert resolve_config(config, changes=[f"trainer.total_iterations={total - 1}"]).is_over(paths)
    longer = resolve_config(config, changes=[f"trainer.total_iterations={total + 5}"])
    assert not longer.is_over(paths)
    longer.record(paths)
    assert not run_is_finished(paths) and load_run(paths).trainer.total_iterations == total + 5


def test_an_edited_config_is_refused_with_each_key(run) -> None:
    paths, config = run
    paths.config.write_text("# a note\n" + resolved_text(config))
    assert open_existing(paths.root)[1] == config  # the values are the same
    paths.config.write_text(resolved_text(replace(config, optimizer=replace(config.optimizer, lr=0.75))))
    says = f"was edited after the run was started:\n  optimizer.lr: was {config.optimizer.lr}, is 0.75\n"
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_existing(paths.root)
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_folder(config)
    assert load_run(paths) == config  # a job that is requeued meanwhile does not take the edit


def test_changes_survive_and_do_not_count_as_an_edit(run) -> None:
    paths, config = run
    new = resolve_config(config, changes=["lease.ttl_s=77"])
    new.record(paths)
    check_unedited(paths)
    assert open_folder(new.config) == paths  # a run file with the same change
    with pytest.raises(ConfigError, match=r"lease.ttl_s: was 77.0, is .*\n.*resume .*KEY=VALUE`"):
        open_folder(config)


def test_a_damaged_record_is_named_with_its_cure(run) -> None:
    paths, config = run
    paths.sealed_config.write_bytes(paths.sealed_config.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"config.sealed is damaged. Remove it"):
        open_existing(paths.root)
    paths.sealed_config.unlink()
    assert open_existing(paths.root)[1] == config


def test_a_record_of_another_version_gives_way_to_config_yaml(run) -> None:
    paths, config = run
    resolve_config(config, changes=["lease.ttl_s=77"]).record(paths)
    data = paths.sealed_config.read_text().partition(" ")[2]
    body = data.replace("ttl_s: 77.0", "no_such_key: 77.0").rstrip("\n")
    paths.sealed_config.write_text(f"{hashlib.sha256(body.encode()).hexdigest()} {body}\n")
    assert load_run(paths) == config


def test_the_scripted_engine_is_no_other_layout(run) -> None:
    _, config = run
    scripted = replace(config, rollout=replace(config.rollout, engine="scripted"))
    assert resolve_config(config, changes=["rollout.engine=transformers"]).listed
    for before, engine in ((config, "scripted"), (scripted, "vllm")):
        with pytest.raises(ConfigError, match=r"rollout\.engine: was"):
            resolve_config(before, changes=[f"rollout.engine={engine}"])


def test_fewer_iterations_than_are_saved_are_refused(run) -> None:
    paths, config = run
    write_record(paths, claim_attempt(paths), "committed.json", {"iteration": 9})
    before = paths.sealed_config.read_bytes()
    with pytest.raises(ConfigError, match="is 8, but iteration 9 is saved already; write 9 or more"):
        resolve_config(config, changes=["trainer.total_iterations=8"]).record(paths)
    assert paths.sealed_config.read_bytes() == before
    resolve_config(config, changes=["trainer.total_iterations=9"]).record(paths)


def test_a_device_in_place_of_the_record_does_not_hang(run) -> None:
    paths, _ = run
    paths.sealed_config.unlink()
    paths.sealed_config.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(paths)


PARTS = frozenset({"completed_config", "with_made_data", "with_store", "effective_config"})
"""What `resolve_config` and `JobPlan.attempt_config` are made of."""

OTHERS = frozenset(
    {"evaluation.request", "cli.commands.evaluating", "cli.judging.measuring", "cli.judging.labelling"}
)
"""An evaluation makes a config of its own out of a run's."""


def test_a_config_is_made_ready_in_one_place() -> None:
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(isinstance(func, ast.Name) and func.id in PARTS for func in calls):
            found.add(name)
    assert found == {"launch.resolve.resolved", "launch.resolve.plan"} | OTHERS


def test_every_way_gives_the_same_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file, the folder that keeps it, and the plan of a job."""
    monkeypatch.chdir(tmp_path)
    site = SiteConfig(checkpoint_url_prefix=f"{tmp_path}/store", scratch_dir="/local", shm_dir="/dev/shm")
    new = resolve_config(load_run_config([RunFile(tmp_path / "runs").write()], []), site)
    assert new.config.checkpoint.url == f"{tmp_path}/store/run-{new.config.run.id}"
    assert new.config.launch.scratch_dir != "/local", "a site's folders are of attempts"
    assert new.of_attempt.launch.scratch_dir == "/local"
    assert not new.listed and not new.is_extended
    again = resolve_config(new.config, site, changes=[])
    assert again.config is new.config and again.of_attempt == new.of_attempt
    plan = JobPlan(submission="x", layout="flat", site=site)
    assert plan.attempt_config(new.config) == new.of_attempt
    wider = resolve_config(new.config, site, ["checkpoint.save_every=7"], Resized(nodes=2))
    assert wider.of_attempt.launch.nodes == 2 and [each.key for each in wider.listed] == [
        "checkpoint.save_every"
    ]
