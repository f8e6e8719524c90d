"""An optimizer that cannot run is refused with the ones that can."""

import re

import pytest

from yatt.config.load import load_run_config
from yatt.errors import ConfigError


def test_muon_is_refused_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text("optimizer:\n  kind: muon\n  lr: 0.1\n")
    says = "run.yaml:2: optimizer.kind: 'muon' is not one of 'adam', 'sgd'"
    with pytest.raises(ConfigError, match=says):
        load_run_config([tmp_path / "run.yaml"], [])


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            "{lr: 0.1, sgd_momentum: 0.5}",
            "sgd_momentum has no effect with kind: adam; remove it, or write kind: sgd.",
        ),
        (
            "{lr: 0.1, kind: sgd, adam_eps: 1.0e-6}",
            "adam_eps has no effect with kind: sgd; remove it, or write",
        ),
    ],
)
def test_a_setting_of_the_other_kind_is_refused(tmp_path, section, says):
    (tmp_path / "run.yaml").write_text(f"optimizer: {section}\n")
    with pytest.raises(ConfigError, match=re.escape(f"run.yaml:1: optimizer: {says}")):
        load_run_config([tmp_path / "run.yaml"], [])
