"""What nodes report about the work of their engines, for the split between rollout and GenRMs."""

import msgspec


class StepSums(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sums over steps of engines of one kind, which add up over engines and over time.

    Attributes:
        steps: number of steps.
        running: sequences that ran, summed over steps; each step gives each of them one token.
        running2: the same, squared.
        seconds: duration of the steps.
        running_seconds: sequences times seconds.
        texts: sequences that have ended.
    """

    steps: int = 0
    running: int = 0
    running2: int = 0
    seconds: float = 0.0
    running_seconds: float = 0.0
    texts: int = 0

    def plus(self, running: int, seconds: float, texts: int = 0) -> "StepSums":
        """Returns the sums with one more step."""
        return StepSums(
            self.steps + 1,
            self.running + running,
            self.running2 + running * running,
            self.seconds + seconds,
            self.running_seconds + running * seconds,
            self.texts + texts,
        )

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(
            self.steps + other.steps,
            self.running + other.running,
            self.running2 + other.running2,
            self.seconds + other.seconds,
            self.running_seconds + other.running_seconds,
            self.texts + other.texts,
        )

    def __sub__(self, other: "StepSums") -> "StepSums":
        return StepSums(
            self.steps - other.steps,
            self.running - other.running,
            self.running2 - other.running2,
            self.seconds - other.seconds,
            self.running_seconds - other.running_seconds,
            self.texts - other.texts,
        )


class SlabLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An awake engine's slab: its index on the node, its role, and the requests that its engines have."""

    slab: int
    role: str
    num_requests: int


class SwitchCost(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Seconds that engines of a role took last on this node; 0: not measured.

    Attributes:
        sleep_s: to fall asleep.
        wake_s: to wake, with new weights.
        build_s: to start the process and build the engine.
    """

    sleep_s: float = 0.0
    wake_s: float = 0.0
    build_s: float = 0.0


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node's engines and requests at one moment. Sums count from the start of its controller.

    Attributes:
        slabs: of awake engines.
        steps: of this node's engines, by role.
        costs: by role.
        built: slabs (index, role) whose engine is built, awake or asleep.
        unfit: the same for engines that could not be built.
        num_waiting: requests to rollout that no engine has, and those that are about to come.
        num_asked: this node's requests to each GenRM that are not answered, by role.
    """

    slabs: tuple[SlabLoad, ...] = ()
    steps: dict[str, StepSums] = {}
    costs: dict[str, SwitchCost] = {}
    built: tuple[tuple[int, str], ...] = ()
    unfit: tuple[tuple[int, str], ...] = ()
    num_waiting: int = 0
    num_asked: dict[str, int] = {}
