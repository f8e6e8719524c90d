"""Engine libraries read the environment at import: set it once for this process."""

import pytest

from yatt.engine.environment import prepare


@pytest.fixture(scope="session", autouse=True)
def engine_environment():
    prepare(device="cpu", threads=1)
