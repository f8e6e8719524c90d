"""Soft verdicts: shares of words, where they stand, and the grid."""

import math
import random

import pytest
from hypothesis import given, strategies as st

from yatt.config.schema import VerdictSection
from yatt.judging.reading import verdict_place
from yatt.judging.soft import (
    first_tokens,
    listed_at,
    on_grid,
    place_of_token,
    soft_verdict,
    soft_verdict_of_texts,
)
from yatt.records.judged import ListedToken

IDS = {"Y": (7,), "N": (9, 11)}
SCORES = {"Y": 1.0, "N": 0.0}
LOGITS = st.floats(-30, 30)


@given(st.lists(LOGITS, min_size=4, max_size=4), st.floats(0.05, 4))
def test_the_share_is_that_of_the_logits_at_whatever_temperature_was_sampled(
    logits: list[float], temperature: float
) -> None:
    """Against a softmax of the logits of the three watched tokens; a fourth token is the rest."""
    by_token = dict(zip((7, 9, 11, 12), logits, strict=True))
    top = max(logits)
    weights = {token: math.exp(each - top) for token, each in by_token.items()}
    expected = weights[7] / (weights[7] + weights[9] + weights[11])
    scaled = [each / temperature for each in logits]
    whole = max(scaled) + math.log(math.fsum(math.exp(each - max(scaled)) for each in scaled))
    logprobs = {token: each / temperature - whole for token, each in by_token.items() if token != 12}
    found = soft_verdict(IDS, logprobs, SCORES, temperature)
    assert found is not None
    assert found.score == pytest.approx(expected, abs=1e-9)
    assert found.confidence == pytest.approx(max(expected, 1 - expected), abs=1e-9)
    rest = math.exp(scaled[3] - whole)
    assert found.elsewhere == pytest.approx(rest, abs=1e-9)


def test_greedy_logprobs_are_the_models_own_and_words_without_mass_are_none() -> None:
    quarter = {7: math.log(0.6), 9: math.log(0.1), 11: math.log(0.1)}
    found = soft_verdict(IDS, quarter, SCORES, 0.0)
    assert found is not None and found.score == pytest.approx(0.75)
    assert found.elsewhere == pytest.approx(0.2)
    assert soft_verdict(IDS, dict.fromkeys((7, 9, 11), -math.inf), SCORES, 0.0) is None
    certain = soft_verdict(IDS, {7: 0.0, 9: -math.inf, 11: -math.inf}, SCORES, 0.0)
    assert certain is not None and (certain.score, certain.confidence, certain.elsewhere) == (1.0, 1.0, 0.0)


class Vocabulary:
    """Takes the longest token that is next, as tokenizers do; a text without a token is an unknown one."""

    def __init__(self, tokens: list[str], begins: str = "") -> None:
        self.tokens, self.begins = ["<unk>", *tokens], begins

    def encode(self, text: str) -> list[int]:
        text, ids = self.begins + text, []
        while text:
            known = [each for each in self.tokens[1:] if text.startswith(each)]
            token = max(known, key=len, default="")
            ids.append(self.tokens.index(token) if token else 0)
            text = text[len(token) or 1 :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.tokens[each] for each in ids if each).removeprefix(self.begins)

    def firsts(self, *words: str, most: int = 64) -> dict[str, list[str]]:
        found = first_tokens(words, self.encode, self.decode, most)
        return {word: [self.tokens[each] for each in ids] for word, ids in found.items()}


def test_words_are_known_by_their_first_tokens_whatever_stands_before_them() -> None:
    """Vocabularies join marks to letters; some put a space before a text."""
    joined = Vocabulary(["Y", "ES", "N", "O", " Y", " N", "(Y", "(N", ":", " ", "("])
    assert joined.firsts("YES", "NO") == {"YES": ["Y", " Y", "(Y"], "NO": ["N", " N", "(N"]}
    assert joined.firsts("YES", "NO", most=2) == {"YES": ["Y"], "NO": ["N"]}
    spaced = Vocabulary(["Y", "N", " Y", " N", " ", "\n"], begins=" ")
    assert spaced.firsts("Y", "N") == {"Y": [" Y", "Y"], "N": [" N", "N"]}
    letters = Vocabulary(["Y", "N", "?"])
    assert letters.firsts("Y", "N") == {"Y": ["Y"], "N": ["N"]}, "a vocabulary without marks and spaces"


def test_words_that_begin_alike_or_have_no_token_are_told() -> None:
    digits = Vocabulary(["1", "0", " "])
    with pytest.raises(ValueError, match="'1' and '10' begin with the same token"):
        digits.firsts("1", "10")
    with pytest.raises(ValueError, match="'Y' has no token of its own"):
        digits.firsts("Y", "1")


@given(st.lists(st.text("ab \n", min_size=1, max_size=4), min_size=1, max_size=12), st.data())
def test_a_character_is_found_in_its_token(tokens: list[str], data: st.DataObject) -> None:
    text = "".join(tokens)
    offset = data.draw(st.integers(0, len(text) - 1))
    expected = next(i for i in range(len(tokens)) if len("".join(tokens[: i + 1])) > offset)
    assert place_of_token(offset, text, lambda count: "".join(tokens[:count]), len(tokens)) == expected
    listed = [ListedToken(text=each, alternatives={}) for each in tokens]
    found = listed_at(offset, listed)
    assert found is listed[expected] and listed_at(len(text), listed) is None


def test_a_character_after_tokens_of_single_bytes_is_found() -> None:
    """Each of them decodes to a replacement mark of its own until the character is whole."""
    tokens = [*(bytes([byte]) for byte in "\U0001fae0\U0001fae0".encode()), b"ok ", b"Y"]

    def decode(count: int) -> str:
        whole = b"".join(tokens[:count])
        return (
            "".join(whole[i : i + 1].decode(errors="replace") for i in range(len(whole)))
            if count < 8 and count % 4
            else whole.decode(errors="replace")
        )

    text = decode(len(tokens))
    assert place_of_token(text.index("Y"), text, decode, len(tokens)) == len(tokens) - 1


@pytest.mark.parametrize(
    ("verdict", "text", "place"),
    [
        ({"pattern": r"\[\[(Y|N)\]\]"}, "Y? [[N]] or [[Y]]", 14), ({"pattern": "is:( *[YN])"}, "is:  Y", 5),
        ({"choices": ("Y", "N")}, " \nN", 2),
    ],
)  # fmt: skip
def test_the_word_of_the_last_match_is_where_the_verdict_stands(verdict: dict, text: str, place: int) -> None:
    assert verdict_place(text, VerdictSection(scores=SCORES, **verdict)) == place and text[place] in "YN"


def test_a_services_alternatives_belong_to_the_word_that_they_begin() -> None:
    scores = {"YES": 1.0, "NO": 0.0, "NOT SURE": 0.5}
    listed = {" Y": math.log(0.5), "YES": math.log(0.1), "NO": math.log(0.2), "NOT": math.log(0.1), "x": -2.0}
    found = soft_verdict_of_texts(ListedToken(text="YES", alternatives=listed), scores)
    assert found is not None, "NO begins two words: it is of none"
    assert found.score == pytest.approx((0.6 + 0.5 * 0.1) / 0.7)
    assert soft_verdict_of_texts(ListedToken(text="x", alternatives={"x": 0.0, "": 0.0}), scores) is None


@given(st.floats(0, 1), st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5]))
def test_a_score_on_the_grid_is_near_and_one_of_few(share: float, grid: float) -> None:
    score = 2.0 + 8.0 * share
    found = on_grid(score, grid, [10.0, 2.0, 5.0])
    assert abs(found - score) <= 8.0 * grid / 2 + 1e-9
    assert ((found - 2.0) / 8.0 / grid) == pytest.approx(round((found - 2.0) / 8.0 / grid))
    assert on_grid(score, 0.0, [10.0, 2.0]) == score
    assert 2.0 <= found <= 10.0 and on_grid(10.0, grid, [2.0, 10.0]) == 10.0
    assert on_grid(0.5, grid, [0.0, 1.0]) == 0.5, "a tie is on it"


def test_without_the_grid_noise_would_be_trained_on() -> None:
    """Why it is there: four completions of which a judge is certain have rewards that differ by 1e-4."""
    draw = random.Random(1)
    scores = [1.0 - 1e-4 * draw.random() for _ in range(4)]
    assert len(set(scores)) == 4 and len({on_grid(each, 0.05, [0.0, 1.0]) for each in scores}) == 1
