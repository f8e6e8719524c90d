"""The layout of a job: one component or two."""

import pytest
import yaml

from tests.runs import ROOT
from yatt.config.load import load_command
from yatt.config.site import load_site
from yatt.errors import ConfigError
from yatt.launch.resolve.plan import job_layout

SPLIT = ["launch.nodes=4", "placement.mode=disaggregated"]


def layout(tmp_path, *changes, can_het=True, **site):
    config = load_command(ROOT / "configs/recipes/qwen3-8b-rule.yaml", [*SPLIT, *changes])
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"partition": "gpu", **site}))
    return job_layout(config, load_site(tmp_path / "site.yaml"), can_het=can_het)


def test_one_trainer_node_that_asks_for_the_same_is_in_a_flat_job(tmp_path) -> None:
    """Slurm would requeue a job of two components when any node dies, since the first has one node."""
    assert layout(tmp_path, "placement.trainer_nodes=1") == "flat"
    assert layout(tmp_path, "placement.trainer_nodes=2") == "het"
    assert layout(tmp_path, "placement.trainer_nodes=1", layout="het") == "het"


def test_nodes_that_ask_for_different_things_are_two_components(tmp_path) -> None:
    one = "placement.trainer_nodes=1"
    assert layout(tmp_path, one, "launch.engine_gpus_per_node=4") == "het"
    assert layout(tmp_path, one, components={"engines": {"constraint": "a100"}}) == "het"
    assert layout(tmp_path, one, components={"engines": {"constraint": "a100"}}, can_het=False) == "flat"


def test_a_layout_that_cannot_be_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="only sched/backfill starts heterogeneous jobs"):
        layout(tmp_path, "placement.trainer_nodes=2", layout="het", can_het=False)
