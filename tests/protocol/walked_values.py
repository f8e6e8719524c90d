"""Values of walks, made and looked up quickly: a walk of a hundred thousand worlds does little else."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
State = TypeVar("State")
Constants = TypeVar("Constants")


def changed(value: Value, **fields: Any) -> Value:
    """Does what `dataclasses.replace` does, several times as fast, for a class without slots whose values are
    made of their fields only."""
    after: Value = object.__new__(type(value))
    its = vars(after)
    its.update(vars(value))
    its.update(fields)
    assert len(its) == len(vars(value)), f"no such field: {fields}"
    return after


def key_of(value: object) -> tuple[object, ...]:
    """Equal for equal values of one class without slots, hashed and compared faster than they are."""
    return tuple(vars(value).values())


class Remembered(Generic[State, Constants]):
    """A pure step, which is worked out once for each state and event: worlds are many, states few.

    Equal states that it returns are one object, and so are equal actions, so worlds can be told apart by the
    `id` of their state.
    """

    def __init__(self, step: Callable[[State, Any, Constants], tuple[State, tuple[Any, ...]]]) -> None:
        self._step = step
        self._ones: dict[Any, Any] = {}
        self._known: dict[int, tuple[State, dict[Any, tuple[State, tuple[Any, ...]]]]] = {}

    def __call__(self, state: State, event: Any, constants: Constants) -> tuple[State, tuple[Any, ...]]:
        """The constants must be the same each time."""
        known = self._known.get(id(state))
        if known is None:
            state = self.one(state)
            known = self._known.setdefault(id(state), (state, {}))
        results = known[1]
        result = results.get(event)
        if result is None:
            result = results[event] = self.result(self._step(state, event, constants))
        return result

    def result(self, result: tuple[State, tuple[Any, ...]]) -> tuple[State, tuple[Any, ...]]:
        """The same, of states and actions that are one object if they are equal."""
        after, actions = result
        return self.one(after), tuple(map(self.one, actions))

    def one(self, value: Value) -> Value:
        """The first of all values that are equal to this one. It is kept, so no other has its `id`."""
        found: Value = self._ones.setdefault(value, value)
        return found
