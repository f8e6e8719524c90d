"""What would be submitted can be seen where there is no Slurm, or while its controller is away."""

from pathlib import Path

import pytest

from tests.unit.core.test_placement import config
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError
from yatt.launch.commands.submit import plan_job, show_job
from yatt.launch.resolve.resolved import Resolved


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_dry_run_needs_no_slurm_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run, site = config(2, 1, 1, 0), SiteConfig(partition="gpu", time_limit_min=77)
    plan = plan_job(Resolved(config=run, site=site), may_lack_slurm=True)
    assert show_job(run, plan, "") == 0
    out, err = capsys.readouterr()
    assert "#SBATCH --partition=gpu" in out and "--time=77" in out and "srun" in out
    assert "no Slurm controller answers here" in err


def test_a_submission_needs_slurm() -> None:
    with pytest.raises(ConfigError, match="nothing was queued"):
        plan_job(Resolved(config=config(2, 1, 1, 0)))
