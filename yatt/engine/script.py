"""The scripted model: tokens and log-probs are a hash of the preceding tokens. Pure, no torch.

It replaces a language model in tests of the protocol. The engine (`yatt.engine.scripted`) and a scripted
trainer agree on every log-prob because both call `scripted_logprobs`. Each token depends only on (policy
version, all tokens before, seed), so a completion that was aborted and continued ends like one that was
not aborted.

A folder may have `scripted.json` beside its tokenizer to change the script:
``{"mean_tokens": 24, "steps_per_token": 1, "seconds_per_step": 0, "answers": [[token ids], ...],
"lengths": {token id: number of tokens, ...}}``. With answers a completion is one of them (for example a
GenRM's verdict). With lengths its first token is one of the keys, drawn by the seed alone, and decides its
length; so an aborted and continued completion has the same length. No prompt may contain a key. Answers may
have ``"chances": [{token id: probability, ...}, ...]``, one for each: the probabilities of these tokens, at
temperature 1, wherever that answer has a token; others have none. So a scripted GenRM is as sure of a verdict
as its script says.
"""

import array
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from yatt.errors import ConfigError

SCRIPT_NAME = "scripted.json"
ROUNDING = 1e-6
_MASK = (1 << 64) - 1
_DEFAULT_VOCAB_SIZE = 256
_Record = TypeVar("_Record", bound=msgspec.Struct)


class _ScriptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mean_tokens: int = 24
    steps_per_token: int = 1
    seconds_per_step: float = 0.0
    answers: tuple[tuple[int, ...], ...] = ()
    lengths: dict[int, int] = {}
    chances: tuple[dict[int, float], ...] = ()


class _ModelFile(msgspec.Struct, frozen=True):
    vocab_size: int = _DEFAULT_VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Settings of a scripted model."""

    eos_ids: tuple[int, ...]
    vocab_size: int
    mean_tokens: int = 24
    """Mean number of tokens per completion: 1 of `mean_tokens` tokens is an end-of-sequence token."""

    steps_per_token: int = 1
    seconds_per_step: float = 0.0
    """Time of a step, whatever number of requests it continues."""

    answers: tuple[tuple[int, ...], ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)
    chances: tuple[Mapping[int, float], ...] = ()
    """Of each answer: probabilities of tokens; empty: a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What decides a completion. Only log-probs by the script's chances have a temperature."""

    policy_version: int
    prompt_ids: list[int]
    seed: int
    temperature: float = 1.0


def read_script(folder: str, eos_ids: tuple[int, ...]) -> Script:
    """Reads the script of a model folder; defaults if scripted.json or config.json is missing.

    Raises:
        ConfigError: scripted.json or config.json cannot be read, or its chances are none of its answers.
    """
    written = _decoded(Path(folder) / SCRIPT_NAME, _ScriptFile)
    if written.chances and not _are_chances(written):
        raise ConfigError(
            f"{Path(folder) / SCRIPT_NAME}: chances: write one object for each answer, with probabilities "
            "above 0 whose sum is at most 1."
        )
    model = _decoded(Path(folder) / "config.json", _ModelFile)
    return Script(
        eos_ids=eos_ids,
        vocab_size=model.vocab_size,
        mean_tokens=written.mean_tokens,
        steps_per_token=written.steps_per_token,
        seconds_per_step=written.seconds_per_step,
        answers=written.answers,
        lengths=written.lengths,
        chances=written.chances,
    )


def _are_chances(written: _ScriptFile) -> bool:
    has_one_each = len(written.chances) == len(written.answers) and not written.lengths
    return has_one_each and all(
        each and all(chance > 0 for chance in each.values()) and math.fsum(each.values()) <= 1 + ROUNDING
        for each in written.chances
    )


def scripted_logprobs(policy_version: int, token_ids: list[int]) -> list[float]:
    """Log-prob of each token but the first, for a scripted model of that policy version."""
    state, logprobs = _mixed(0, policy_version), []
    for index, token in enumerate(token_ids):
        if index:
            logprobs.append(_logprob(state, token))
        state = _mixed(state, token)
    return logprobs


def scripted_score(token_ids: list[int], label: int) -> float:
    """The number in [-1, 1) of a scripted reward model's head for a text."""
    state = _mixed(0, label)
    for token in token_ids:
        state = _mixed(state, token)
    return state % 2_000 / 1_000 - 1.0


def scripted_likeliest(script: Script, token_ids: list[int], count: int) -> tuple[bytes, bytes]:
    """A scripted teacher's likeliest tokens after each token, and their log-probs, packed [tokens, count]."""
    ids, logprobs = array.array("i"), array.array("f")
    for token in token_ids:
        first = _mixed(0, token) % script.vocab_size
        ids.extend((first + place) % script.vocab_size for place in range(count))
        logprobs.extend(-(place + 1.0) for place in range(count))
    return ids.tobytes(), logprobs.tobytes()


def scripted_watched(
    script: Script, draw: Draw, token_ids: list[int], watched: tuple[int, ...]
) -> list[list[float]]:
    """Log-probs of watched tokens wherever a completion has a token, [tokens, watched]; those of its own
    tokens are as in `scripted_completion`."""
    state, rows = _begun(draw), []
    said = _said(script, state, draw)
    for token in token_ids:
        possible = (token, *watched) if not said else (token, *said)  # others have no chance
        known = {each: said.get(each, _logprob(state, each)) for each in possible}
        rows.append([known.get(each, -math.inf) for each in watched])
        state = _mixed(state, token)
    return rows


def _said(script: Script, state: int, draw: Draw) -> dict[int, float]:
    """Log-probs of the tokens that the script gives chances, by the temperature (0: as they are)."""
    if not script.chances:
        return {}
    chances, power = script.chances[_choice(script, state, draw.seed)], 1 / (draw.temperature or 1.0)
    rest = 1.0 - math.fsum(chances.values())
    scaled = {token: math.log(chance) * power for token, chance in chances.items()}
    others = [math.log(rest) * power] if rest > ROUNDING else []  # as one token
    top = max((*scaled.values(), *others), default=0.0)
    whole = top + math.log(math.fsum(math.exp(each - top) for each in (*scaled.values(), *others)))
    return {token: each - whole for token, each in scaled.items()}


def scripted_completion(
    script: Script, draw: Draw, *, max_tokens: int, ignore_eos: bool
) -> tuple[list[int], list[float], str]:
    """Tokens, their log-probs and the finish reason of one completion."""
    state, seed = _begun(draw), draw.seed
    token_ids: list[int] = []
    logprobs: list[float] = []
    answer, said = _answer(script, state, seed, draw.prompt_ids), _said(script, state, draw)
    while len(token_ids) < max_tokens:
        token = answer[len(token_ids)] if answer else _next_token(script, state, seed, ignore_eos)
        token_ids.append(token)
        logprobs.append(said.get(token, _logprob(state, token)))
        if (token in script.eos_ids and not ignore_eos) or len(token_ids) == len(answer):
            return token_ids, logprobs, "stop"
        state = _mixed(state, token)
    return token_ids, logprobs, "length"


def _answer(script: Script, state: int, seed: int, prompt_ids: list[int]) -> tuple[int, ...]:
    if script.lengths:
        return _of_length(script, _mixed(0, seed), prompt_ids)
    if not script.answers:
        return ()
    return script.answers[_choice(script, state, seed)] + script.eos_ids[:1]


def _choice(script: Script, state: int, seed: int) -> int:
    return _mixed(state, seed) % len(script.answers)


def _begun(draw: Draw) -> int:
    """The state after a prompt."""
    state = _mixed(0, draw.policy_version)
    for token in draw.prompt_ids:
        state = _mixed(state, token)
    return state


def _of_length(script: Script, draw: int, prompt_ids: list[int]) -> tuple[int, ...]:
    """Returns the rest of the completion that has begun in `prompt_ids`, or a new one."""
    keys = sorted(script.lengths)
    at = next((i for i in reversed(range(len(prompt_ids))) if prompt_ids[i] in script.lengths), None)
    key = keys[draw % len(keys)] if at is None else prompt_ids[at]
    begun = 0 if at is None else len(prompt_ids) - at
    plain = [t for t in range(script.vocab_size) if t not in script.lengths and t not in script.eos_ids]
    rest = [plain[_mixed(draw, i) % len(plain)] for i in range(max(begun, 1), script.lengths[key] - 1)]
    return (*(() if begun else (key,)), *rest, script.eos_ids[0])


def _next_token(script: Script, state: int, seed: int, ignore_eos: bool) -> int:
    draw = _mixed(state, seed)
    if draw % script.mean_tokens == 0 and not ignore_eos:
        return script.eos_ids[0]
    token = _mixed(draw, 1) % script.vocab_size
    while token in script.eos_ids:
        token = (token + 1) % script.vocab_size
    return token


def _logprob(state: int, token: int) -> float:
    return -(_mixed(state, ~token) % 1000 + 1) / 250


def _mixed(state: int, value: int) -> int:
    """One round of splitmix64."""
    x = (state + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _decoded(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
