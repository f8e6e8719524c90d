"""An optimizer that cannot run is refused with the ones that can."""

import pytest

from yatt.config.load import load
from yatt.errors import ConfigError


def test_muon_is_refused_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text("optimizer:\n  kind: muon\n  lr: 0.1\n")
    says = "run.yaml:2: optimizer.kind: 'muon' is not one of 'adam', 'sgd'"
    with pytest.raises(ConfigError, match=says):
        load([tmp_path / "run.yaml"], [])
