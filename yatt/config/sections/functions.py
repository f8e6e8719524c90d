"""The run file's sections about functions of the user: environments of episodes, and rewards."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.sections.judges import check_curve_name
from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import COUNT, FILE, FINITE, LINE, OPERATIONAL, SECONDS, Free


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    """A function of your own that answers the policy's turns; without it a sample has one turn.

    `step(text, episode)` gets the policy's turn and returns the answer as text, or None to end the episode.
    It is called in processes that may be killed, and keeps no state: `episode` has all earlier turns."""

    path: Annotated[str, FILE] = ""
    """A Python file; empty: no environment."""

    function: Annotated[str, LINE] = "step"
    """Name of the function in the file. Async functions are awaited."""

    role: Literal["user", "tool"] = "user"
    """Role of the answers in the model's chat template."""

    max_turns: Annotated[int, COUNT] = 8
    """Maximum number of the policy's turns; the last one is not answered. All turns and answers together have
    at most `rollout.max_response_tokens`."""

    images: bool = False
    """Its answers may have pictures: `{"text": ..., "images": [...]}` with a mark `<image>` in the text for
    each; an image is the bytes of a file, or a picture of PIL. They are kept with the run's made data."""

    kwargs: dict[str, Free] = field(default_factory=dict)
    """Passed to the function in `episode.kwargs`."""

    timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 60.0
    """Time limit of one call."""

    trial: Annotated[bool, OPERATIONAL] = True
    """Before each start, call the function on a few rows, with the ground truth and with an empty text as the
    policy's turn. It is refused if every call fails by a missing key, attribute or name, or a wrong type;
    other failures are told."""

    def __post_init__(self) -> None:
        rule(bool(self.path) or not self.images, "images has no effect without path; remove it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """A reward function: `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`."""

    name: Annotated[str, LINE]
    """Name of the score in metrics."""

    path: Annotated[str, FILE]
    """A Python file, or `builtin:NAME` for a function that ships with yatt."""

    function: Annotated[str, LINE] = "compute_score"
    """Name of the function in the file. Async functions are awaited."""

    style: Literal["verl", "trl"] = "verl"
    """trl: `fn(prompts, completions, **columns) -> list[float]`."""

    scope: Literal["auto", "sample", "batch", "group"] = "auto"
    """What one call gets: a sample; a batch of samples; or all samples of a prompt group. With batch and
    group, verl functions get lists (`data_sources, solution_strs, ground_truths, extra_infos`) and return a
    list. auto: trl functions get the group, others a sample."""

    batch_size: Annotated[int, COUNT] = 64
    """With scope batch: most samples of a call."""

    batch_wait_s: Annotated[float, SECONDS, OPERATIONAL] = 0.05
    """With scope batch: how long a call waits for more samples."""

    weight: Annotated[float, FINITE] = 1.0
    """Weight of the score in the reward. 0: measured only; its failures then drop no prompt group."""

    kwargs: dict[str, Free] = field(default_factory=dict)
    """Keyword arguments of each call."""

    timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 60.0
    """Time limit of one call."""

    trial: Annotated[bool, OPERATIONAL] = True
    """Before each start, call the function on a few rows, with the ground truth and with an empty text as
    completion. It is refused if every call fails by a missing key, attribute or name, or a wrong type; other
    failures are told."""

    def __post_init__(self) -> None:
        check_curve_name(self.name)
        rule(
            not self.path.startswith("builtin:")
            or (self.scope in ("auto", "sample") and self.style == "verl"),
            "a built-in function scores one sample; leave out scope and style.",
        )

    @property
    def effective_scope(self) -> Literal["sample", "batch", "group"]:
        """The scope, with auto resolved."""
        if self.scope == "auto":
            return "group" if self.style == "trl" else "sample"
        return self.scope
