"""A form of verdicts that the judge's vocabulary cannot write is found before anything starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig, VerdictSection
from yatt.config.sections.judges import CriterionSection, JudgingSection
from yatt.errors import ConfigError
from yatt.judging.reading import structure_of, unwritable_text
from yatt.launch.checks.input_trial import check_inputs

LETTERS = "0123456789+= abcdefgYN.\n"
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"reason": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["a"],
})  # fmt: skip


def make_letters(folder: Path, letters: str = LETTERS) -> None:
    """A tokenizer with one token a letter, the last one ends a text, as `yatt sft` makes it."""
    fast = tokenizers.Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=letters[-1])
    )
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([letters[-1]])
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": letters[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder: Path = tmp_path_factory.mktemp("run")
    for name in ("policy", "judge"):
        make_scripted_model(folder / name)
    make_letters(folder / "judge")
    judge = {
        "name": "j", "model": str(folder / "judge"), "template": "{completion}",
        "verdict": {"pattern": "([YN])", "scores": {"Y": 1, "N": 0}}, "max_model_tokens": 99, "max_tokens": 4,
    }  # fmt: skip
    (folder / "train.jsonl").write_text('{"prompt": "0 plus 3 is", "answer": "3"}\n')
    run = RunFile(folder, {"genrms": [judge], "data": {"ground_truth_key": "answer"}})
    return load_run_config([run.write()], [])


def of_judge(config: RunConfig, **values: object) -> RunConfig:
    (genrm,) = config.genrms
    return replace(config, genrms=(replace(genrm, **values),))


def refused(config: RunConfig) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config)
    (found,) = caught.value.findings
    return found.key, found.says


def test_choices_of_its_letters_are_accepted_and_others_named(config: RunConfig) -> None:
    scores = {"Y": 1.0, "N": 0.0, "maybe": 0.5}
    check_inputs(of_judge(config, verdict=VerdictSection(choices=("Y", "N"), scores=scores)))
    key, says = refused(of_judge(config, verdict=VerdictSection(choices=("Y", "maybe"), scores=scores)))
    assert key == "genrms[0].verdict"
    assert says.startswith("'maybe' cannot be written in the tokenizer of ")
    assert says.endswith("but a verdict needs it; write choices of other words, or a pattern.")


def test_json_without_braces_is_refused_and_a_pattern_offered(config: RunConfig) -> None:
    key, says = refused(of_judge(config, verdict=VerdictSection(json_schema=SCHEMA, json_key="a")))
    assert key == "genrms[0].verdict" and says.startswith("'{' cannot be written in the tokenizer of ")


def test_criteria_together_are_json_too(config: RunConfig) -> None:
    criteria = (CriterionSection(name="a", text="b"), CriterionSection(name="c", text="d"))
    rubric = JudgingSection(by="rubric", asks="together", criteria=criteria)
    template = "{completion}{criteria}"
    values = {"judging": rubric, "template": template, "verdict": VerdictSection(minimum=0, maximum=1)}
    key, says = refused(of_judge(config, **values))
    assert key == "genrms[0].judging.asks" and says.endswith("needs it; write each.")


def test_a_tokenizer_of_bytes_writes_every_form(config: RunConfig, tmp_path: Path) -> None:
    judge = make_scripted_model(tmp_path / "judge")
    check_inputs(of_judge(config, model=judge, verdict=VerdictSection(json_schema=SCHEMA, json_key="a")))


@pytest.mark.parametrize(
    ("verdict", "lacks", "found"),
    [
        ({"choices": ("A", "B")}, "B", "B"),
        ({"choices": ("A", "B")}, "C", ""),
        ({"json_schema": SCHEMA, "json_key": "a"}, '"a"', '"a"'),
        ({"json_schema": SCHEMA, "json_key": "a"}, '"reason"', ""),  # is not required
        ({"json_schema": SCHEMA, "json_key": "a"}, "7", ""),  # another digit will do
        ({"json_schema": SCHEMA, "json_key": "a"}, ",", ","),
        ({"pattern": "(Y)"}, "Y", ""),
    ],
)  # fmt: skip
def test_choices_and_what_is_in_every_answer_are_asked_for(verdict: dict, lacks: str, found: str) -> None:
    structure = structure_of(VerdictSection(**verdict))
    assert unwritable_text(structure, lambda text: lacks not in text) == found


def test_names_and_values_are_asked_for_as_an_engine_takes_them(config: RunConfig, tmp_path: Path) -> None:
    """Other scripts unescaped."""
    schema = {"type": "object", "properties": {"да": {"enum": ["нет", "Y"]}}, "required": ["да"]}
    structure = structure_of(VerdictSection(json_schema=json.dumps(schema), json_key="да"))
    assert unwritable_text(structure, lambda text: "\\" not in text) == ""
    assert unwritable_text(structure, str.isascii) == '"да"'
    assert unwritable_text(structure, lambda text: "н" not in text) == '"нет"'


@pytest.mark.parametrize("schema", ["{bad", '{"a":' * 100_000, '{"enum": ["\\ud800"]}'])
def test_a_broken_form_is_not_taken_for_a_damaged_tokenizer(config: RunConfig, schema: str) -> None:
    verdict = VerdictSection(json_schema=schema, json_key="a")
    try:
        check_inputs(of_judge(config, verdict=verdict))
    except ConfigError as error:
        assert "damaged" not in str(error) and "\\ud800" in schema


def test_a_schema_of_any_shape_is_read_without_a_failure() -> None:
    shapes = [True, {}, [], {"properties": 3, "type": "object"}, {"enum": {}}, {"anyOf": [{}]},
              {"type": "object", "properties": {"a": True}, "required": ["a"]},
              {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": 3},
              {"type": "object", "properties": {}, "required": [[], "b"]}]  # fmt: skip
    for shape in shapes:
        assert isinstance(unwritable_text(json.dumps({"json": shape}), lambda _: False), str)
