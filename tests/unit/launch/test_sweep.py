"""The runs of a sweep: which there are, what they are called, and what is wrong with what was written."""

import pytest
from hypothesis import given, strategies as st

from yatt.errors import AlreadyGoing, ConfigError, DeadlineExceeded
from yatt.launch.commands.sweep import MOST, SweepMember, submit_each, sweep_members


def test_every_combination_is_a_run_with_a_name_of_its_own():
    found = sweep_members(["trainer.lr=1e-6, 2e-6", "algorithm.kl_coef=0,0.1"])
    assert [member.settings for member in found] == [
        ("trainer.lr=1e-6", "algorithm.kl_coef=0"),
        ("trainer.lr=1e-6", "algorithm.kl_coef=0.1"),
        ("trainer.lr=2e-6", "algorithm.kl_coef=0"),
        ("trainer.lr=2e-6", "algorithm.kl_coef=0.1"),
    ]
    assert [found[0].name, found[3].name] == ["lr=1e-6,kl_coef=0", "lr=2e-6,kl_coef=0.1"]


def test_values_are_yaml_as_they_are_written():
    settings = [member.settings[0] for member in sweep_members(['a.b=[1, 2],[3],"x, y",/data/a b.jsonl'])]
    assert settings == ["a.b=[1, 2]", "a.b=[3]", 'a.b="x, y"', "a.b=/data/a b.jsonl"]
    names = [member.name for member in sweep_members(["a.b=/data/a b,ü/../%j,2"])]
    assert [name[:-8] for name in names[:2]] == ["b=_data_a_b-", "b=_.._j-"]
    assert names[2] == "b=2"
    assert [member.name for member in sweep_members(["a.b=2,/data/a b"])] == [names[2], names[0]], (
        "a name for good"
    )


@pytest.mark.parametrize(
    ("sweeps", "says"),
    [
        (["trainer.lr"], "write key=a,b,c"),
        (["trainer.lr="], "write key=a,b,c"),
        (["=1,2"], "write key=a,b,c"),
        (["a=1,1"], "a value is listed twice"),
        (["a=1", "a=2"], "a key is given twice"),
        (["a=[1"], "are not YAML"),
        (["a=1]\n- [2"], "YAML|write key"),
        ([f"a={','.join(map(str, range(MOST + 1)))}"], "more than 1000 runs"),
    ],
)
def test_what_is_no_sweep_is_said(sweeps, says):
    with pytest.raises(ConfigError, match=says):
        sweep_members(sweeps)


@given(st.text(max_size=40))
def test_any_text_is_a_sweep_or_a_mistake(text):
    try:
        found = sweep_members([f"a.b={text}"])
    except ConfigError:
        return
    assert len({member.name for member in found}) == len(found)
    assert all("/" not in member.name and "%" not in member.name for member in found)


def test_a_mistake_in_one_run_leaves_none_of_the_others_out(capsys):
    submitted = []

    def submit(member: SweepMember) -> None:
        if member.settings == ("a=2",):
            raise ConfigError("2 is too much")
        if member.settings == ("a=3",):
            raise AlreadyGoing("job 7 runs already")
        if member.settings == ("a=4",):
            raise DeadlineExceeded("no answer")
        submitted.append(member.name)

    assert submit_each(sweep_members(["a=1,3"]), submit) == 0
    assert submit_each(sweep_members(["a=4,1"]), submit) == 1
    submitted.clear()
    assert submit_each(sweep_members(["a=1,2,5"]), submit) == 2
    assert submitted == ["a=1", "a=5"]
    assert "a=2: 2 is too much" in capsys.readouterr().err
