"""The store of a judge's newer weights, before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import RunFile
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import open_store
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks.judge_check import check_judge
from yatt.launch.resolve.completed import completed_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    from tests.saved_weights import save
    from tests.tiny_models import make_qwen3

    folder: Path = tmp_path_factory.mktemp("run")
    make_qwen3(folder / "judge", tied=True, seed=1)
    make_qwen3(folder / "other", tied=True, seed=1, layers=3)
    for name in ("judge", "other"):
        store = open_store(str(folder / f"{name}-store"), {})
        Checkpoints(store, 1, name).adopt(None)
        save(store, folder / name, iteration=2, run_id=name)
    (folder / "third" / "checkpoints").mkdir(parents=True)
    genrm = {
        "name": "j", "model": str(folder / "judge"), "template": "{completion}",
        "verdict": {"pattern": "([0-9])"}, "refresh": {"url": str(folder / "judge-store")},
    }  # fmt: skip
    return completed_config(load_run_config([RunFile(folder, {"genrms": [genrm]}).write()], []))


def checked(config: RunConfig, url: str) -> None:
    (genrm,) = config.genrms
    check_judge(config, replace(genrm, refresh=replace(genrm.refresh, url=url)), "genrms[0]")


def test_the_judge_s_own_checkpoints_are_accepted_and_a_store_that_has_none_yet(config: RunConfig) -> None:
    url = config.genrms[0].refresh.url
    checked(config, url)
    checked(config, url.replace("judge-store", "not-there-yet"))


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("other-store", r"is not this checkpoint's model"),
        ("run/checkpoints", r"is this run's own store; write model: policy"),
        ("train.jsonl", r"train\.jsonl is no folder"),
        ("third", r"third is a run's folder; write .*/third/checkpoints"),
    ],
)
def test_other_stores_are_refused_with_their_key(config: RunConfig, store: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        checked(config, str(Path(config.run.dir).parent / store))
    assert {found.key for found in caught.value.findings} == {"genrms[0].refresh.url"}


def test_a_relative_store_is_the_same_one_on_every_node(config: RunConfig, tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"genrms": [{
        "name": "j", "model": "m", "template": "{completion}", "verdict": {"pattern": "([0-9])"},
        "max_model_tokens": 9, "refresh": {"url": "runs/judge/checkpoints", "every": 5},
    }]})  # fmt: skip
    found = completed_config(load_run_config([run.write()], [])).genrms[0].refresh
    assert found.url == str(Path.cwd() / "runs/judge/checkpoints") and found.every == 5
