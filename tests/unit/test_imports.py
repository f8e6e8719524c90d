"""The command line and the control plane start without any heavy library, and so in milliseconds."""

import subprocess
import sys

import pytest

from tests.runs import HANG_S

HEAVY = (
    "torch", "vllm", "PIL", "torchvision", "transformers", "megatron", "numpy", "matplotlib", "wandb",
    "tensorboard", "mlflow",
)  # fmt: skip
LIGHT = (
    "yatt.cli",
    "yatt.launch",
    "yatt.control",
    "yatt.evaluation",
    "yatt.config",
    "yatt.core",
    "yatt.records",
    "yatt.forecast.time",
    "yatt.forecast.memory",
)
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("package", LIGHT)
def test_no_module_of_the_package_imports_a_heavy_library(package):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert not set(HEAVY) & set(done.stdout.split())


def test_the_controllers_process_imports_no_heavy_library():
    code = "import sys; import yatt.control.__main__; print(*{n.partition('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert not set(HEAVY) & set(done.stdout.split())
