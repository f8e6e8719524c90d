"""How a GenRM's answer becomes a score, and judges behind URLs."""

import json
import urllib.parse
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from yatt.config.sections.operation import no_credentials, rule
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILLED,
    FINITE,
    FREE,
    LINE,
    MOST_S,
    OPERATIONAL,
    SECONDS,
    range_between,
)

MOST_WORDS = 32
"""Most words of a soft verdict."""

GRID_ERROR = 1e-6
MOST_CRITERIA, MOST_WEIGHT = 64, 1e6
"""Most criteria of a rubric, each of which is a question and a curve, and the largest weight of one."""


def check_curve_name(name: str) -> None:
    """Raises ValueError if a name cannot be that of a curve of its own."""
    rule(bool(name.strip()), "name is empty.")
    rule("/" not in name, "name: with a '/' its curves could be those of another score; write another name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSection:
    """How a GenRM's text is parsed into a score: by pattern, choices or json_schema.

    Pointwise, the verdict is the score. Pairwise, it is the share of the comparison, 0 to 1, that the
    completion shown first has won. Listwise, it is the numbers of all completions, the best first.
    """

    pattern: Annotated[str, FREE] = ""
    """Regular expression; the *last* match counts, and its group 1 is the verdict."""

    choices: tuple[Annotated[str, FILLED], ...] = ()
    """The engine can only write one of these texts (vLLM's structured output)."""

    json_schema: Annotated[str, FREE] = ""
    """The engine can only write JSON of this schema, itself written as JSON (vLLM's structured output)."""

    json_key: Annotated[str, LINE] = "score"
    """Key of the verdict in that JSON."""

    scores: dict[str, Annotated[float, FINITE]] = field(default_factory=dict)
    """Maps verdicts to scores. Empty: the verdict itself is a plain decimal number."""

    read: Literal["word", "soft"] = "word"
    """soft: the score is the mean of `scores` by the probabilities of their words where the verdict stands,
    instead of the score of the word that was written. It needs pattern or choices, and words that begin
    with different tokens."""

    grid: Annotated[float, range_between(0, 1)] = 0.05
    """Soft: scores are rounded to multiples of this share of their range, so that equal completions get
    equal scores. 0: not rounded; groups are then hardly ever flat, and differences of a thousandth are
    trained on."""

    minimum: Annotated[float, FINITE] = -1000.0
    """A number below this is not a valid verdict."""

    maximum: Annotated[float, FINITE] = 1000.0
    """A number above this is not a valid verdict."""

    timeout_s: Annotated[float, SECONDS] = 5.0
    """Time limit of the pattern search in one text."""

    def __post_init__(self) -> None:
        rule(self.minimum <= self.maximum, f"minimum {self.minimum:g} is above maximum {self.maximum:g}.")
        kinds = [name for name in ("pattern", "choices", "json_schema") if getattr(self, name)]
        rule(len(kinds) < 2, f"{' and '.join(kinds)} are alternatives; write one of them.")
        if self.read == "soft":
            self._check_soft()

    def _check_soft(self) -> None:
        words = list(self.scores)
        rule(
            len(set(self.scores.values())) > 1 and len(words) <= MOST_WORDS and not self.json_schema,
            f"read: soft needs 2 to {MOST_WORDS} words in scores, of which not all have the same score, and "
            "pattern or choices.",
        )
        rule(all(word.strip() for word in words), "scores: a word of a soft verdict is empty.")
        steps = round(1 / self.grid) if self.grid else 2
        rule(
            not self.grid or (abs(1 / self.grid - steps) < GRID_ERROR and steps % 2 == 0),
            f"grid: {self.grid:g} is not one divided by an even number; write 0.1, 0.05, 0.02 or 0.01.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionSection:
    """One criterion of a rubric: a question to the GenRM, or a reward function."""

    name: Annotated[str, LINE]
    """Its name in metrics."""

    text: Annotated[str, FREE] = ""
    """What is to be met, shown in the template's {criterion} or {criteria}."""

    rule: Annotated[str, LINE] = ""
    """Instead of a text: the name of an entry of `rewards`, whose score from 0 to 1 is its value."""

    weight: Annotated[float, range_between(-MOST_WEIGHT, MOST_WEIGHT)] = 1.0
    """Its weight in the score; below 0: what is not to be."""

    required: bool = False
    """If its value is below 0.5, the score is 0. A required rule is looked at first: if it is not met,
    nothing is asked."""

    def __post_init__(self) -> None:
        check_curve_name(self.name)
        rule(bool(self.text.strip()) != bool(self.rule), "write either text or rule, exactly one of them.")
        rule(
            not self.required or self.weight >= 0,
            f"required, with weight {self.weight:g}: what is not to be cannot be required; turn it round.",
        )


_OF_WAYS = {
    "pairs": ("pairwise",), "matchings": ("pairwise",), "list_size": ("listwise",),
    "orders": ("pairwise", "listwise"), "scores_by": ("pairwise", "listwise"), "criteria": ("rubric",),
    "criteria_key": ("rubric",), "asks": ("rubric",), "drop": ("rubric",),
}  # fmt: skip
"""Keys of a way of judging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingSection:
    """What a GenRM is asked about a prompt's completions, and how its verdicts become their scores."""

    by: Literal["pointwise", "pairwise", "listwise", "rubric", "own"] = "pointwise"
    """Judge each completion alone, two of a group against each other, all of a group at once, or each by
    criteria. own: by what `function` of `path` gives, a way of judging of your own."""

    pairs: Literal["all", "circular", "anchor", "ground_truth", "matchings"] = "all"
    """Pairwise: all pairs; each with the next one; each with one of the group, drawn by the seed; each with
    the data row's ground truth; or each with `matchings` others, drawn by the seed."""

    matchings: Annotated[int, COUNT] = 3
    """With `pairs: matchings`: how many others each completion is compared with, at most."""

    list_size: Annotated[int, COUNT_OR_NONE] = 0
    """Listwise: a larger group is ranked in lists of so many, each of which shares a completion with the next
    one. 0: one list of all."""

    orders: Literal["both", "drawn", "one"] = "both"
    """Pairwise and listwise: both: judge in both orders, so that a preference for a place cancels. drawn: in
    one of them, drawn by the seed, at half the price. one: in the order of the group."""

    scores_by: Literal["win_rate", "bradley_terry"] = "win_rate"
    """Pairwise and listwise: from comparisons to scores in [0, 1], within the group."""

    @property
    def needs_truth(self) -> bool:
        """Whether completions are compared with the data row's ground truth."""
        return self.by == "pairwise" and self.pairs == "ground_truth"

    criteria: tuple[CriterionSection, ...] = ()
    """Rubric: what a completion is to meet. Its score is the weighted sum of their values, divided by the sum
    of the weights above 0."""

    criteria_key: Annotated[str, LINE] = ""
    """Rubric: where further criteria stand in the data row, in `extra_info` or another column that `data`
    names, with dots: a list of objects with text, and as you like name, weight and required."""

    asks: Literal["each", "together"] = "each"
    """Rubric: one question a criterion; or one question for all, whose verdict is a JSON object with a value
    for each name."""

    drop: Annotated[float, range_between(0, 0.9)] = 0.0
    """Rubric: the chance that a criterion is left out of a prompt's judgement, drawn by the seed, so that the
    policy cannot learn what pleases the judge. Required ones and rules stay."""

    def __post_init__(self) -> None:
        rule(self.list_size != 1, "list_size: 1 compares nothing; write 2 or more, or 0 for all.")
        is_rubric, names = self.by == "rubric", [each.name for each in self.criteria]
        for name, ways in _OF_WAYS.items():
            known = type(self).__dataclass_fields__[name].default
            rule(
                self.by in ways or getattr(self, name) == known,
                f"{name}: has no effect with by: {self.by}; it is for {' and '.join(ways)}. Remove it.",
            )
        rule(
            not is_rubric or bool(self.criteria or self.criteria_key),
            "by: rubric needs criteria, or criteria_key; write what is to be met.",
        )
        rule(len(set(names)) == len(names), "criteria: two have the same name.")
        rule(len(names) <= MOST_CRITERIA, f"criteria: more than {MOST_CRITERIA}.")
        asked = [each for each in self.criteria if each.text]
        rule(
            not is_rubric or bool(self.criteria_key) or any(each.weight > 0 for each in asked),
            "criteria: none that is a text has a weight above 0; without one the judge has no say.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkSection:
    """Reasoning before a verdict. A question is then two requests to the engine: free text and, after it, the
    verdict, which alone is bound to a form and read."""

    budget: Annotated[int, COUNT_OR_NONE] = 0
    """Most tokens of a thought; less where `max_model_tokens` leaves less beside the question and
    `max_tokens` of the verdict. 0: no thought; a question is one request."""

    end: Annotated[str, FREE] = "\n</think>\n\n"
    """Text between thought and verdict, which is shown to the model whether it has written it or not. A
    thought ends where the model writes this text (blanks around it aside), or ends its answer."""

    on_cut: Literal["ask", "unreadable"] = "ask"
    """A thought that is cut at its budget: ask for the verdict nevertheless; or count the answer as
    unreadable, and ask again (`retries`)."""

    def __post_init__(self) -> None:
        known = type(self).__dataclass_fields__
        for name in ("end", "on_cut"):
            rule(
                self.budget > 0 or getattr(self, name) == known[name].default,
                f"{name}: has no effect without budget; write one, in tokens, or remove it.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshSection:
    """Newer weights of a GenRM, from the checkpoints of another run that trains it meanwhile."""

    url: Annotated[str, LINE] = ""
    """The other run's checkpoint store: a folder or a URL, which is opened with `checkpoint.storage_options`.
    It is only read. Its model has the shapes of `model`, which is used until there is a checkpoint."""

    every: Annotated[int, COUNT] = 20
    """Iterations between two looks for a newer checkpoint; the first is before iteration 1. The engines are
    then built anew. What an iteration was judged by is recorded, and is the same when it is sampled again."""

    def __post_init__(self) -> None:
        no_credentials(self.url, {})
        rule(
            bool(self.url) or self.every == 20, "every: has no effect without url; write it, or remove every."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSection:
    """A judge behind a URL, with OpenAI's chat completions API. It needs no GPU of the run."""

    url: Annotated[str, LINE, OPERATIONAL] = ""
    """Base URL, for example https://api.openai.com/v1. `model` is then the name of a model there."""

    key_env: Annotated[str, LINE, OPERATIONAL] = ""
    """Environment variable that has the API key. Empty: no key is sent."""

    requests_per_minute: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 0
    """Most requests a minute of the whole run; the nodes have equal shares. 0: no limit."""

    max_concurrency: Annotated[int, COUNT, OPERATIONAL] = 16
    """Most requests at the same time, per node."""

    timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 120.0
    """Time limit of one request."""

    retries: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 5
    """Retries of a request that failed for a passing reason (429, 5xx, network). The server's Retry-After is
    respected."""

    outage_s: Annotated[float, range_between(0, MOST_S), OPERATIONAL] = 900.0
    """Longest outage of the service that is waited for: while no request of a node has an answer, requests
    that have used their retries are repeated. 0: none."""

    body: Annotated[str, FREE] = ""
    """Fields of each request's body, as a JSON object: further ones, or instead of those that yatt sends
    (model, max_tokens, temperature, seed, stop, response_format); null takes one out. For example
    `{"max_completion_tokens": 512, "max_tokens": null, "reasoning_effort": "low"}`."""

    most_pixels: Annotated[int, COUNT] = 1 << 20
    """Most pixels of a picture that the service is shown (`sees`); larger ones are made smaller."""

    most_bytes: Annotated[int, range_between(1024, 64 << 20)] = 1 << 20
    """Most bytes of such a picture, a JPEG file. Its quality, then its size is lowered until it fits."""

    @property
    def body_fields(self) -> dict[str, Any]:
        """The fields of `body`."""
        found: dict[str, Any] = json.loads(self.body) if self.body else {}
        return found

    def __post_init__(self) -> None:
        rule(_is_body(self.body), "body is not a JSON object, or has messages or stream, which are yatt's.")
        rule(not self.body or bool(self.url), "body has no effect without url; write it, or remove body.")
        rule(
            not self.url or self.url.startswith(("https://", "http://")),
            "url must begin with https:// or http://.",
        )
        rule(
            bool(self.url) or not (self.key_env or self.requests_per_minute),
            "key_env and requests_per_minute have no effect without url; write it, or remove them.",
        )
        rule(
            not set(self.url) & set("?# ") and not self.url.rstrip("/").endswith("/completions"),
            "url is the beginning that /chat/completions is added to; write it without that, ? and #. A "
            "service that has only /completions is no judge.",
        )
        rule(not self.url or _is_whole(self.url), "url has no host, a wrong port, or a user name in it.")
        rule(
            not self.key_env or self.url.startswith("https://") or _is_local(self.url),
            "key_env: a key is sent over https only, or to this machine.",
        )


def _is_body(text: str) -> bool:
    try:
        found = json.loads(text) if text else {}
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # among these: half a character
        return False
    return isinstance(found, dict) and not {"messages", "stream"} & found.keys()


def _is_whole(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and parts.username is None
    except ValueError:
        return False


def _is_local(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
