"""Where a thought ends, by its tokens; and its room."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import make_tokenizer
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.judging.thinking import ThoughtEnd, thought_end, thought_room, thought_size

END = "\n</think>\n\n"
EOS = (2,)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, ["<|thought|>"])
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    return Tokenizer(str(folder))


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode_parts([TextPart(text, True)], adds_special=False)


def size(tokenizer: Tokenizer, ids: list[int], end: str = END) -> int:
    return thought_size(ids, thought_end(end, encoder(tokenizer)), EOS, tokenizer.decode)


def test_a_thought_is_what_stands_before_its_end(tokenizer: Tokenizer) -> None:
    thought, end = tokenizer.encode_plain("one plus two is "), tokenizer.encode_plain(END)
    three = tokenizer.encode_plain("three")
    for after in ([], three, [*three, *EOS]):
        ids = [*thought, *end, *after]
        kept = tokenizer.decode(ids[: size(tokenizer, ids)])
        assert kept == "one plus two is \n", "the end is </think>; the line break before it was thought"
    assert size(tokenizer, thought) == len(thought)
    assert size(tokenizer, [*thought, *EOS]) == len(thought), "the end of the answer is no part of it"
    assert size(tokenizer, [*thought, *EOS, *three, *end]) == len(thought), "nor what stands after it"
    assert size(tokenizer, list(EOS)) == 0 and size(tokenizer, []) == 0
    assert size(tokenizer, end) == 1 and size(tokenizer, tokenizer.encode_plain("</think>")) == 0


def test_the_first_of_two_ends_counts_and_a_part_of_one_is_none(tokenizer: Tokenizer) -> None:
    one, end = tokenizer.encode_plain("one"), tokenizer.encode_plain("</think>")
    assert size(tokenizer, [*one, *end, *one, *end]) == len(one)
    assert size(tokenizer, [*one, *end[:-1]]) == len(one) + len(end) - 1


def test_a_control_token_ends_a_thought_though_it_has_no_text(tokenizer: Tokenizer) -> None:
    end = thought_end("\n<|thought|>\n", encoder(tokenizer))
    (control,) = end.tokens
    assert control in end.ids and len(end.ids) == 3 and end.stop == ("<|thought|>",)
    one = tokenizer.encode_plain("one")
    assert tokenizer.decode([*one, control]) == "one"
    assert thought_size([*one, control, *one], end, EOS, tokenizer.decode) == len(one)
    spelled = tokenizer.encode_plain("<|thought|>")
    assert control not in spelled
    assert thought_size([*one, *spelled], end, EOS, tokenizer.decode) == len(one), "spelled, it ends it too"


def test_a_token_that_reaches_into_the_end_is_left_out_whole() -> None:
    """It could only be kept by other tokens than those that were sampled."""
    texts = {7: "yes", 8: ".</", 9: "think>", 10: " no"}

    def decode(ids: list[int]) -> str:
        return "".join(texts[each] for each in ids)

    end = ThoughtEnd(ids=(8, 9), text="</think>", tokens=())
    assert thought_size([7, 8, 9, 10], end, EOS, decode) == 1


@pytest.mark.parametrize("end", ["", "\n\n"])
def test_an_end_without_a_text_ends_no_thought(tokenizer: Tokenizer, end: str) -> None:
    known = thought_end(end, encoder(tokenizer))
    assert known.stop == () and known.tokens == () and len(known.ids) <= 2
    ids = tokenizer.encode_plain("one\n\ntwo")
    assert size(tokenizer, ids, end) == len(ids) and size(tokenizer, [*ids, *EOS], end) == len(ids)


@pytest.mark.parametrize(
    ("budget", "limit", "others", "room"),
    [(10, 100, 50, 10), (10, 55, 50, 5), (10, 50, 50, 0), (10, 9, 50, 0)],
)
def test_the_verdict_always_has_its_room(budget: int, limit: int, others: int, room: int) -> None:
    assert thought_room(budget, limit=limit, others=others) == room
