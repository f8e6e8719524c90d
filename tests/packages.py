"""What tests need. A module is skipped without importing it: every process of tests collects all modules."""

import importlib.util
import warnings
from importlib import metadata
from types import ModuleType

import pytest
from packaging.version import Version


def needs(package: str) -> pytest.MarkDecorator:
    """The mark of tests that need this package, such as `vllm`, which takes seconds to import."""
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed")


def version_of(package: str) -> Version:
    """Of an installed package; 0 if it is missing."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return Version("0")


def trainer_module(name: str) -> ModuleType:
    """A module of `yatt.trainer` or its folders, imported when first used. megatron-core warns of what is
    not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"yatt.trainer.{name}")
