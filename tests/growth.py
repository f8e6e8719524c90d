"""Counts what a piece of work does, so that its growth can be tested without a clock."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], object], name: str = "") -> int:
    """Calls of Python and C functions, and steps of generators, in `work`; or only those with this name."""
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        if event == "call":
            counted += not name or frame.f_code.co_name == name
        elif event == "c_call":
            counted += not name or argument.__name__ == name

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what a collection that begins meanwhile calls is not of the work
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return counted
