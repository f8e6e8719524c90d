"""Templates and verdicts."""

import pytest

from yatt.config.schema import GenRMSection, VerdictSection
from yatt.config.sections.judges import JudgingSection
from yatt.errors import ConfigError
from yatt.judging.judging import judging_of
from yatt.judging.reading import check_verdict, parse_verdict
from yatt.judging.template import (
    check_template,
    conversation_text,
    numbered_completions,
    render_template,
    render_with_pictures,
)
from yatt.records.episode import MediaRef

ONE = ("completion",)
HALVES = {"verdict": VerdictSection(scores={"A": 1.0})}
FIRST, SECOND, THIRD = (MediaRef(f"{name}.png", "", 8, 8) for name in "abc")
SAMPLE = dict(prompt="p{x}", completion="{completion} }", ground_truth="g", data_source="d")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 0.00001}', 0.00001), ('{"score": 0.3333333333333333}', 0.333333333333333),
        ('{"score": 7.0}', 7.0), ('{"score": "7"}', 7.0), ('{"score": true}', None), ('{"score": NaN}', None),
        ('{"score": 1e400}', None), ('{"score": null}', None), ('{"other": 1}', None), ("[1]", None),
        ("{", None), ('{"score": 1e30}', None),
    ],
)  # fmt: skip
def test_a_json_verdict_is_read_or_is_none(text, value):
    schema = '{"type": "object", "properties": {"score": {"type": "number"}}}'
    assert parse_verdict(text, VerdictSection(json_schema=schema)) == value


@pytest.mark.parametrize(
    ("verdict", "judging", "says"),
    [
        ({"choices": ("good", "bad")}, "pointwise", "'good' gives no score; add it to k.scores"),
        ({"choices": ("1 > 2", "2 > 1")}, "listwise", "cannot have every ranking"),
        ({"json_schema": "{"}, "pointwise", "is not JSON"),
        ({"json_schema": "[]"}, "pointwise", "has no property 'score'"),
        (
            {"json_schema": '{"properties": {"score": {"type": "boolean"}}}'},
            "pointwise",
            "a boolean gives no",
        ),
        (
            {"json_schema": '{"properties": {"score": {"enum": ["A", "B"]}}}'},
            "pointwise",
            "'A' gives no score",
        ),
    ],
)
def test_a_structure_that_can_never_give_a_score_is_refused(verdict, judging, says):
    with pytest.raises(ConfigError) as caught:
        check_verdict(VerdictSection(**verdict), "k", judging)
    assert says in str(caught.value)


def test_fields_are_filled_and_never_read_again():
    parts = render_template("{data_source}|{prompt}|{completion}|{ground_truth}|{{literal}}", SAMPLE)
    assert "".join(text for text, _ in parts) == "d|p{x}|{completion} }|g|{literal}"
    assert [text for text, is_own in parts if not is_own] == ["d", "p{x}", "{completion} }", "g"]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{answer}", "{answer}"),
        ("{row[key]}", "{row[key]}"),
        ("{prompt.__class__}", "{prompt.__class__}"),
        ("{prompt[0]}", "{prompt[0]}"),
        ("{prompt!r}", "{prompt!r}"),
        ("{prompt:>9}", "{prompt:>9}"),
        ("{}", "{}"),
        ('give {"score": 1}', '{"score": 1}'),
    ],
)
def test_anything_but_a_known_field_is_refused(template, shown):
    with pytest.raises(ConfigError) as caught:
        check_template(template, "genrms[0].template", ONE)
    assert str(caught.value) == (
        f"genrms[0].template: unknown field {shown}; known are {{prompt}}, {{completion}}, {{ground_truth}}, "
        "{data_source}. Write {{ and }} for braces that are text."
    )


@pytest.mark.parametrize("template", ["open { end", "close } end"])
def test_a_lone_brace_is_refused_with_the_cure(template):
    with pytest.raises(ConfigError, match=r"Write \{\{ and \}\} for braces that are text"):
        check_template(template, "genrms[0].template", ONE)


@pytest.mark.parametrize(
    ("judging", "missing"),
    [("pointwise", "completion"), ("pairwise", "completion_a"), ("listwise", "completions")],
)
def test_a_template_that_does_not_show_the_completion_is_refused(judging, missing):
    template, way = "Is this good? {prompt} {{completion}}", JudgingSection(by=judging)
    genrm = GenRMSection(name="j", model="m", template=template, judging=way, **HALVES)
    with pytest.raises(ConfigError, match=rf"genrms\[0\].template: {{{missing}}} is missing; {judging}"):
        check_template(template, "genrms[0].template", judging_of(genrm).fields, judging)


def test_a_good_template_passes():
    check_template("Q {prompt} A {completion} {{json}}", "k", ONE)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("", "is empty"), ("(", "is not a regular expression"), ("score", "has no group")],
)
def test_a_pattern_that_can_give_no_verdict_is_refused(pattern, says):
    with pytest.raises(ConfigError, match=rf"genrms\[0\].verdict.pattern.*{says}"):
        check_verdict(VerdictSection(pattern=pattern), "genrms[0].verdict")


def test_a_good_pattern_passes():
    check_verdict(VerdictSection(pattern="score: (.)"), "k")


TABLE = VerdictSection(pattern=r"\[\[(\w+)\]\]", scores={"A": 1.0, "B": 0.0})
NUMBER = VerdictSection(pattern=r"score: (\S+)")


@pytest.mark.parametrize(
    ("verdict", "text", "score"),
    [
        (TABLE, "either [[A]] or [[B]] ... I say [[B]]", 0.0),
        (TABLE, "[[B]] then [[A]]", 1.0),
        (TABLE, "[[C]]", None),
        (TABLE, "[[A]] but also [[C]]", None),
        (TABLE, "nothing", None),
        (NUMBER, "score: 3 ... score: 7.5", 7.5),
        (NUMBER, "score: seven", None),
        (NUMBER, "score: nan", None),
        (NUMBER, "score: inf", None),
        (VerdictSection(pattern="(a)|b"), "b", None),
    ],
)
def test_the_last_match_decides(verdict, text, score):
    assert parse_verdict(text, verdict) == score


@pytest.mark.parametrize("word", ["1e308", "1_0", "nan", "inf", "٣", "0x10", "1" * 40, "1001", "-1001", ""])
def test_only_a_plain_number_within_bounds_is_a_verdict(word):
    assert parse_verdict(f"score: {word}", VerdictSection(pattern="score: (.*)")) is None


@pytest.mark.parametrize(("word", "value"), [("7", 7.0), ("-0.5", -0.5), ("+3", 3.0), (".25", 0.25)])
def test_plain_numbers_are_verdicts(word, value):
    assert parse_verdict(f"score: {word}", VerdictSection(pattern="score: (.*)")) == value


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('```json\n{"score": 3}\n```', 3.0), ('\n```\n{"score": 3}```\n', 3.0),
        ('```JSON  \r\n{"score": 3}\r\n``` ', 3.0), ('```json {"score": 3}```', None),
        ('see ```json\n{"score": 3}\n```', None),
        ('```json\n{"score": 3}\n```\n```json\n{"score": 4}\n```', None),
    ],
)  # fmt: skip
def test_json_in_fences_is_json_if_nothing_else_is_there(text: str, score: float | None) -> None:
    schema = '{"type": "object", "properties": {"score": {"type": "integer"}}}'
    assert parse_verdict(text, VerdictSection(json_schema=schema)) == score


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "Q {media} {prompt} A {completion}",
            ["Q ", None, None, " ", "which, this or ?", " A ", "a <image>"],
        ),
        ("Q {prompt} A {completion}", ["Q ", "which, ", None, "this or ", None, "?", " A ", "a <image>"]),
        ("{prompt}{prompt}", ["which, ", None, "this or ", None, "?", "which, this or ?"]),
        ("A {completion}", [None, None, "A ", "a <image>"]),
        ("{media}{media}{completion}", [None, None, "a <image>"]),
    ],
)
def test_pictures_stand_where_the_template_or_the_prompt_has_them(template, says):
    shown = dict(
        prompt="which, <image>this or <image>?", completion="a <image>", ground_truth="", data_source=""
    )
    parts = render_with_pictures(template, shown, [FIRST, SECOND])
    assert [None if isinstance(part, MediaRef) else part[0] for part in parts] == says
    assert [part for part in parts if isinstance(part, MediaRef)] == [FIRST, SECOND]
    own = {part[0] for part in parts if not isinstance(part, MediaRef) and part[1]}
    assert own == {each for each in says if each in ("Q ", " ", " A ", "A ")}


def test_marks_of_another_number_are_text():
    """A prompt in which the policy was shown other pictures than the marks say has none of them there. Who is
    shown none reads the prompt as it is: a mark may be a word of it."""
    shown = dict(prompt="<image>?", completion="c", ground_truth="", data_source="")
    assert render_with_pictures("{prompt}", shown, [FIRST, SECOND]) == [FIRST, SECOND, ("?", False)]
    assert render_with_pictures("{prompt}", shown, []) == [("<image>?", False)]
    assert render_template("{media}{completion}", shown) == [("c", False)]


def test_pictures_of_a_conversation_stand_in_the_environments_turns_alone():
    said = conversation_text([
        ("I say <image>", []), ("see <image>and <image>", [FIRST, SECOND]), ("<image>!", []),
        ("a <image>", []),
    ])  # fmt: skip
    assert said == (
        "I say <image>", "\n\n", "see ", FIRST, "and ", SECOND, "", "\n\n", "<image>!", "\n\n", "a <image>"
    )  # fmt: skip
    assert conversation_text([("a", []), ("b", [])]) == "a\n\nb" and conversation_text([]) == ""
    both = numbered_completions(["x <image>", said])
    shown = dict(prompt="<image>", ground_truth="<image>", data_source="", completion=said, completions=both)
    asked = render_with_pictures("{completions}|{prompt}{ground_truth}", shown, [THIRD])
    assert [part for part in asked if isinstance(part, MediaRef)] == [FIRST, SECOND, THIRD]
    text = "".join("@" if isinstance(part, MediaRef) else part[0] for part in asked)
    one = "I say <image>\n\nsee @and @\n\n<image>!\n\na <image>"
    assert text == f"[1]\nx <image>\n\n[2]\n{one}|@<image>"
    recorded = "".join(text for text, _ in render_template("{completion}", shown))
    assert recorded == one.replace("@", "<image>"), "for people, pictures are marks"


def test_the_place_of_pictures_is_a_field_of_those_who_see():
    check_template("{media} {completion}", "k", ONE, sees=True)
    with pytest.raises(ConfigError, match=r"\{media\} stands there twice"):
        check_template("{media} {media} {completion}", "k", ONE, sees=True)
    with pytest.raises(ConfigError, match=r"unknown field \{media\}"):
        check_template("{media} {completion}", "k", ONE)
