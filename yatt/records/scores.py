"""Messages between a controller and its reward processes."""

from typing import ClassVar

import msgspec

from yatt.records.episode import ENVIRONMENT, MediaRef
from yatt.records.order import Message, Order


class RewardsLoaded(Message, frozen=True, kw_only=True):
    """From a reward process, before its Hello: its asynchronous functions."""

    asynchronous: tuple[str, ...]


class RewardsStuck(Message, frozen=True, kw_only=True):
    """From a reward process: the number of asynchronous calls that continue after their cancellation. All of
    them are answered as failed. `limit_s` is the limit of the newest."""

    calls: int
    limit_s: float


class RowRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Place of a data row: number of the file; offset and length of a line, or number of a parquet row."""

    file: int
    at: int
    size: int


class Scored(Message, frozen=True, kw_only=True):
    """The function's score, its other numbers, and how often it called its GenRM.

    `applies` is False if the function has no score for this sample (it returned None). A listwise verdict has
    the completions in `ranking`, the best first, instead of a score; one on several criteria their values in
    `extra`. `at`: place of a verdict's word in the GenRM's text. `pred`: the answer that the function read in
    the completion; empty if it does not say.
    """

    score: float
    extra: dict[str, float] = msgspec.field(default_factory=dict)
    asked: int = 0
    applies: bool = True
    ranking: tuple[int, ...] = ()
    pred: str = ""
    at: int = 0


class Score(Order[Scored], frozen=True, kw_only=True):
    """Order to call one reward function, or parse one verdict, on one completion.

    The reward process reads the data row itself, so that its values arrive unchanged. For a GenRM with a
    template `completion` is the GenRM's text, `num_ranked` the completions that a listwise verdict ranks, and
    `criteria` those of which a verdict has a value each.
    The function's limit is `limit_factor` times its `timeout_s`.
    """

    reward: str
    prompt: str
    completion: str
    row: RowRef
    is_held_out: bool = False
    limit_factor: int = 1
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    turns: tuple[tuple[str, str], ...] = ()
    """With an environment: role and text of all turns; `completion` is what the policy said."""
    num_ranked: int = 0
    criteria: tuple[str, ...] = ()


class ScoredMany(Message, frozen=True, kw_only=True):
    """One result per item of the order."""

    scores: tuple[Scored, ...]


class ScoreMany(Order[ScoredMany], frozen=True, kw_only=True):
    """Order to call one reward function once on several samples."""

    reward: str
    items: tuple[Score, ...]
    limit_factor: int = 1


class Stepped(Message, frozen=True, kw_only=True):
    """The environment's answer to a turn of the policy; `is_end`: there is none, the episode ends.

    `media`: pictures in `data.media_store`, one for each mark of the text; without any a mark is text.
    """

    observation: str = ""
    is_end: bool = False
    media: tuple[MediaRef, ...] = ()


class Step(Order[Stepped], frozen=True, kw_only=True):
    """Order to call the environment. `turns` are role and text of all turns after the prompt."""

    reward: ClassVar[str] = ENVIRONMENT
    prompt: str
    turns: tuple[tuple[str, str], ...]
    row: RowRef
    is_held_out: bool = False
    limit_factor: int = 1


class GroupJudged(Message, frozen=True, kw_only=True):
    """What a user's way of judging gives (`yatt.judging.outside`)."""

    payload: bytes


class JudgeGroup(Order[GroupJudged], frozen=True, kw_only=True):
    """Order to call a user's way of judging: `payload` is a group, with answers if its scores are wanted
    instead of its questions."""

    reward: str
    payload: bytes
    row: RowRef
    is_held_out: bool = False
    limit_factor: int = 1


class Answered(Message, frozen=True, kw_only=True):
    """The GenRM's text."""

    text: str
    finish_reason: str


class Ask(Order[Answered], frozen=True, kw_only=True):
    """Request of a reward function's GenRM client: complete `text` with this GenRM."""

    genrm: str
    text: str
    seed: int
    max_tokens: int
    temperature: float
