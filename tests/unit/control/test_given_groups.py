"""Rows with completions as token ids: what the policy would have sampled and would have been shown."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT
from tests.tiny_models import CHAT, make_scripted_model, make_tokenizer
from yatt.adapters.inputs.data_rows import Row, data_row
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer, eos_ids
from yatt.adapters.processes.watched_trial import Stages
from yatt.checkpoint.store.store import FolderStore
from yatt.config.load import resolved_text
from yatt.config.schema import (
    DataSection,
    GenRMSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from yatt.control.node import Node
from yatt.control.rollouts.given import GivenGroups, HeldOutGroups
from yatt.control.rollouts.groups.carried import read_state, write_state
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.given import given_ids, row_lengths
from yatt.core.gpus.placement import TRAINER, placement_of
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_text, question_ids
from yatt.paths import RunPaths
from yatt.records import cluster as c
from yatt.records.message import Turn, unpack_ids
from yatt.trainer.sft_rows import read_examples

END = 2
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier turns of the assistant are not shown, as templates leave out earlier reasoning."""


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def config_of(folder: Path, kind: Any, **rollout: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(dir=str(folder / "run"), kind=kind),
        data=DataSection(train_files=(str(folder / "rows.jsonl"),), max_prompt_tokens=200),
        model=ModelSection(path=str(folder / "policy"), dtype="float32"),
        optimizer=OptimizerSection(lr=1e-3),
        trainer=TrainerSection(total_iterations=3, train_batch_size=4, mini_batch_size=2),
        rollout=RolloutSection(max_response_tokens=200, **rollout),
        launch=LaunchSection(nodes=2, device="cpu"),
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    make_scripted_model(folder / "policy")
    return folder


def encoded(folder: Path, kind: Any, raw: dict[str, Any]):
    config, tokenizer = config_of(folder, kind), Tokenizer(str(folder / "policy"))
    row = data_row(raw, "rows.jsonl: row 1", config.data)
    return given_ids(row, tokenizer, config), tokenizer


def said(turns: tuple[Turn, ...]) -> list[tuple[bool, list[int]]]:
    return [(turn.is_sampled, unpack_ids(turn.token_ids)) for turn in turns]


ROWS = [
    {"prompt": "one plus two is", "completion": " three<|im_end|>"},
    {"prompt": chat(("user", "what is one plus two")), "completion": "three"},
    {"messages": chat(("system", "be short"), ("user", "one plus two"), ("assistant", "it is three"))},
    {"prompt": chat(("user", "hi")), "completion": chat(("assistant", "the <|im_end|> is text"))},
]


@pytest.mark.parametrize("raw", ROWS)
def test_a_row_of_one_turn_is_what_sft_in_one_process_makes_of_it(
    policy: Path, tmp_path: Path, raw: dict[str, Any]
) -> None:
    found, tokenizer = encoded(policy, "sft", raw)
    (tmp_path / "rows.jsonl").write_text(json.dumps(raw))
    (example,) = read_examples(tmp_path / "rows.jsonl", tokenizer, str(policy / "policy"), 0)
    ((turn,),) = found.completions
    assert found.prompt == example.prompt and turn.is_sampled
    ids = unpack_ids(turn.token_ids)
    if isinstance(raw.get("prompt"), str):  # there text is trusted, here a stranger's control token is text
        assert ids[-1] == END and ids[:-1] == tokenizer.encode_plain(" three<|im_end|>")
    else:
        assert ids == example.completion and ids.count(END) == 1


def test_text_ends_with_a_token_that_ends_completions_once(policy: Path) -> None:
    found, tokenizer = encoded(policy, "sft", {"prompt": "a", "completion": "b"})
    config = config_of(policy, "sft")
    config = replace(config, data=replace(config.data, allow_special_tokens=True))
    row = data_row({"prompt": "a", "completion": "b<|im_end|>"}, "", config.data)
    assert found.completions == given_ids(row, tokenizer, config).completions
    assert eos_ids(str(policy / "policy")) == (END,)


def test_every_turn_of_the_assistant_is_trained_on_and_nothing_else(policy: Path) -> None:
    messages = chat(
        ("user", "one"), ("assistant", "two"), ("tool", "three"), ("user", "<|im_start|>four"),
        ("assistant", "five plus six"),
    )  # fmt: skip
    found, tokenizer = encoded(policy, "sft", {"messages": messages})
    (turns,) = found.completions
    whole = [*found.prompt, *(token for _, ids in said(turns) for token in ids)]
    assert [*whole, *tokenizer.encode_plain("\n")] == tokenizer.encode_chat(
        messages, add_generation_prompt=False
    )
    trained = [tokenizer.decode(ids, skip_special=False) for is_sampled, ids in said(turns) if is_sampled]
    assert trained == ["two<|im_end|>", "five plus six<|im_end|>"]
    assert [is_sampled for is_sampled, _ in said(turns)] == [True, False, True]


def test_an_observation_is_what_an_environment_would_have_answered(policy: Path) -> None:
    """The ids between two turns are those of a run that samples (`Episodes`)."""
    messages = chat(("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    found, tokenizer = encoded(policy, "sft", {"messages": messages})
    (_, (_, observed), _) = said(found.completions[0])
    answer = tokenizer.encode_answer("user", "three")
    assert answer[0] == END and observed == answer[1:]


def test_a_template_that_changes_what_was_said_is_refused(tmp_path: Path) -> None:
    make_scripted_model(tmp_path / "policy")
    make_tokenizer(tmp_path / "policy", chat=FORGETS)
    assert FORGETS != CHAT
    messages = chat(("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    with pytest.raises(ConfigError, match=r"shows a conversation otherwise once it goes on.*row of its own"):
        encoded(tmp_path, "sft", {"messages": messages})
    encoded(tmp_path, "sft", {"messages": messages[:2]})
    page = (ROOT / "docs" / "given.md").read_text()
    space: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], space)  # noqa: S102 (our own page)
    every = [encoded(tmp_path, "sft", row)[0] for row in space["map_row"]({"messages": messages})]
    assert len(every) == 2, "the cure that the document gives"


def test_contents_that_a_template_trims_are_trained_on_though_they_spell_control_tokens(
    tmp_path: Path,
) -> None:
    make_scripted_model(tmp_path / "policy")
    make_tokenizer(tmp_path / "policy", chat=CHAT.replace("m['content']", "m['content'] | trim"))
    messages = chat(
        ("user", " one\n"), ("assistant", "\n<|im_end|> two "), ("user", "three\n"), ("assistant", " four"),
    )  # fmt: skip
    found, tokenizer = encoded(tmp_path, "sft", {"messages": messages})
    trained = [ids for is_sampled, ids in said(found.completions[0]) if is_sampled]
    assert [tokenizer.decode(ids, skip_special=False) for ids in trained] == [
        "<|im_end|> two<|im_end|>",
        "four<|im_end|>",
    ]
    assert [ids.count(END) for ids in trained] == [1, 1], "what the data spells is text"


def test_an_answer_that_is_asked_for_otherwise_than_it_is_shown_has_a_cure(tmp_path: Path) -> None:
    """As of models whose generation prompt opens reasoning, which the template leaves out later."""
    make_scripted_model(tmp_path / "policy")
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    assert asks in FORGETS
    make_tokenizer(tmp_path / "policy", chat=FORGETS.replace(asks, f"{asks}reason: "))
    messages = chat(("user", "one"), ("assistant", "two"))
    with pytest.raises(ConfigError, match=r"asks for an answer by .*reason: '.*Write rows as text"):
        encoded(tmp_path, "sft", {"messages": messages})
    config, tokenizer = config_of(tmp_path, "sft"), Tokenizer(str(tmp_path / "policy"))
    config = replace(config, data=replace(config.data, allow_special_tokens=True))
    text = {"prompt": tokenizer.render_chat(messages[:1]), "completion": "so it is</think>two"}
    found = given_ids(data_row(text, "", config.data), tokenizer, config)
    assert found.prompt == tokenizer.encode_chat(messages[:1]), "the cure that the message gives"


def test_an_equal_pair_costs_itself_and_is_counted(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    some = [{"prompt": str(n), "chosen": "b", "rejected": "b" if n == 2 else "c"} for n in range(6)]
    some[4] = {"prompt": chat(("user", "q")), "chosen": "b", "rejected": chat(("assistant", "b"))}
    groups = groups_of(tmp_path, 0, some, nodes=1, shuffle=False, kind="dpo")
    advanced = ask(groups, 1, 5)
    assert [fact.number for fact in advanced.groups] == [0, 1, 3, 5, 6]
    assert advanced.counters == {"rollout/equal_pairs": 2.0}, "also where the forms differ"
    assert [fact.number for fact in asyncio.run(groups.held_out.opened()).groups] == [0, 1, 3, 5]


def checked(folder: Path, kind: str, **rows: list[dict[str, Any]]) -> list[str]:
    """What the check of inputs says of these rows: mistakes, then notes."""
    config = config_of(folder, kind)
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = {f"{name}_files": (str(folder / f"{name}.jsonl"),) for name in rows}
    config = replace(
        config, data=replace(config.data, **files), validation=replace(config.validation, max_prompts=3)
    )
    faults, notes = check_text(Stages(folder, 60), resolved_text(config))
    return [*map(str, faults), *notes]


def test_the_check_tells_pairs_that_teach_nothing(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    same, other = ({"prompt": "a", "chosen": "b", "rejected": each} for each in "bc")
    (note,) = checked(tmp_path, "dpo", train=[same, other, same])
    assert note.startswith("2 of the 3 rows of") and note.endswith("are skipped.")
    (fault,) = checked(tmp_path, "dpo", train=[same, same])
    assert fault.endswith("have the same chosen and rejected: correct them.")


def test_the_check_looks_at_the_held_out_rows_that_a_run_opens(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    fits, long = ({"prompt": "a", "completion": "b" * size} for size in (3, 900))
    (fault,) = checked(tmp_path, "sft", train=[fits], val=[long, long, long, fits])
    assert "each of the first 3 rows of" in fault and "val.jsonl is longer than 200" in fault
    (note,) = checked(tmp_path, "sft", train=[fits], val=[long, long, fits, fits])
    assert "2 of 3 prompts" in note


PAIRS = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": chat(("user", "a")), "chosen": "b", "rejected": chat(("assistant", "c"))},
    {"chosen": chat(("user", "a"), ("assistant", "b")), "rejected": chat(("user", "a"), ("assistant", "c"))},
    {
        "prompt": "not read: the conversations have theirs",
        "chosen": chat(("user", "a"), ("assistant", "x"), ("user", "y"), ("assistant", "b")),
        "rejected": chat(("user", "a"), ("assistant", "x"), ("user", "y"), ("assistant", "c")),
    },
]


@pytest.mark.parametrize("raw", PAIRS)
def test_a_pair_has_one_prompt_and_the_preferred_completion_first(policy: Path, raw: dict[str, Any]) -> None:
    found, tokenizer = encoded(policy, "dpo", raw)
    texts = [[tokenizer.decode(ids) for _, ids in said(turns)] for turns in found.completions]
    assert texts == [["b"], ["c"]]
    group = found.group(7, 3, "")
    assert [group.sample_id(sample) for sample in group.samples] == [14, 15]


@pytest.mark.parametrize("raw", PAIRS)
def test_a_reward_model_is_trained_on_what_its_engine_is_asked(policy: Path, raw: dict[str, Any]) -> None:
    found, tokenizer = encoded(policy, "reward_model", raw)
    row = data_row(raw, "", config_of(policy, "reward_model").data)
    genrm = GenRMSection(name="rm", model=str(policy / "policy"), kind="scalar", chat=True)
    for turns, completion in zip(found.completions, ("b", "c"), strict=True):
        shown = {"prompt": "", "ground_truth": "", "data_source": "", "completion": completion}
        ids = question_ids(genrm, tokenizer, shown, row.prompt)
        (was_sampled, rest), end = said(turns)
        assert [*found.prompt, *rest] == ids and not was_sampled
        assert end == (True, [END]), "its value is that of the last token before it"


APART = {
    "chosen": chat(("user", "a"), ("assistant", "b")),
    "rejected": chat(("user", "x"), ("assistant", "c")),
}
BAD = [
    ("sft", {"prompt": "a"}, "row 1 needs 'prompt' and 'completion', both text; or"),
    ("sft", {"prompt": "a", "completion": ""}, "row 1 needs 'prompt' and"),
    ("sft", {"prompt": "a", "completion": 5}, "row 1 needs 'prompt' and"),
    ("sft", {"messages": chat(("user", "a"))}, "row 1 needs 'prompt' and"),
    ("sft", {"messages": chat(("assistant", "a"))}, "row 1 needs 'prompt' and"),
    ("sft", {"messages": chat(("user", "a"), ("assistant", "b"), ("user", "c"))}, "row 1 needs"),
    ("sft", {"messages": [{"role": "user"}]}, "row 1 needs"),
    ("sft", {"prompt": "a", "completion": "\ud800"}, "its completion contains a lone surrogate"),
    ("dpo", {"prompt": "a", "chosen": "b"}, "needs 'prompt', 'chosen' and 'rejected', all text; or"),
    ("sft", {"messages": [*chat(("user", "a")), {"role": "assistant", "content": None}]}, "has no 'content'"),
    ("dpo", APART, "needs 'prompt', 'chosen' and 'rejected'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "raw", "says"), BAD)
def test_a_row_of_another_form_is_named(policy: Path, kind: str, raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        encoded(policy, kind, raw)


def test_two_messages_of_the_assistant_are_refused_with_their_place(policy: Path) -> None:
    config, tokenizer = config_of(policy, "sft"), Tokenizer(str(policy / "policy"))
    messages = chat(("user", "a"), ("assistant", "b"), ("assistant", "c"))
    row = data_row({"messages": messages}, "rows.jsonl: row 4", config.data)
    with pytest.raises(ConfigError, match=r"rows.jsonl: row 4: two messages of the assistant .*'c'.*join"):
        row_lengths(row, "rows.jsonl: row 4", tokenizer, config)


def test_a_prompt_that_a_completion_does_not_begin_with_is_not_dropped(policy: Path) -> None:
    system, asked = chat(("system", "be short")), chat(("user", "q"), ("assistant", "a"))
    with pytest.raises(ConfigError, match="begins with a message that is not the assistant's"):
        encoded(policy, "sft", {"prompt": system, "completion": asked})
    with pytest.raises(ConfigError, match="write the whole conversation"):
        other = chat(("user", "q"), ("assistant", "b"))
        encoded(policy, "dpo", {"prompt": [*system, asked[0]], "chosen": asked, "rejected": other})
    encoded(policy, "sft", {"prompt": system, "completion": [*system, *asked]})


def test_several_turns_without_a_template_are_refused(policy: Path) -> None:
    config, tokenizer = config_of(policy, "sft"), Tokenizer(str(policy / "policy"))
    config = replace(config, data=replace(config.data, apply_chat_template=False))
    said_twice = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ConfigError, match=r"apply_chat_template is false, and a completion has several"):
        given_ids(data_row({"messages": said_twice}, "", config.data), tokenizer, config)
    given_ids(data_row({"messages": said_twice[:2]}, "", config.data), tokenizer, config)


def test_a_base_models_turns_end_as_its_template_ends_them(tmp_path: Path) -> None:
    """Its texts end with another token, which stands in no conversation."""
    make_scripted_model(tmp_path / "policy")
    for name in ("config.json", "tokenizer_config.json"):
        path = tmp_path / "policy" / name
        values = json.loads(path.read_text())
        other = {"eos_token_id": 0} if name == "config.json" else {"eos_token": "<|endoftext|>"}
        path.write_text(json.dumps(values | other))
    assert eos_ids(str(tmp_path / "policy")) == (0,)
    messages = chat(("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    found, tokenizer = encoded(tmp_path, "sft", {"messages": messages})
    trained = [tokenizer.decode(ids, skip_special=False) for mine, ids in said(found.completions[0]) if mine]
    assert trained == ["two<|im_end|>", "four<|im_end|>"]


@pytest.mark.parametrize("said_first", ["", None])
def test_a_turn_of_which_the_template_shows_nothing_is_refused(policy: Path, said_first: str | None) -> None:
    """Calls of tools that a template does not render, or an empty content."""
    call = {"role": "assistant", "content": said_first or "", "tool_calls": [{"name": "f"}]}
    messages = [*chat(("user", "q")), call, *chat(("tool", "42"), ("assistant", "42"))]
    with pytest.raises(ConfigError, match=r"shows nothing of .* but its end"):
        encoded(policy, "sft", {"messages": messages})
    with pytest.raises(ConfigError, match="has 'tools', which the chat template is not shown"):
        encoded(policy, "sft", {"messages": messages, "tools": [{"name": "f"}]})
    encoded(policy, "sft", {**ROWS[1], "tools": []})


def test_a_row_that_the_template_refuses_costs_itself_and_many_cost_the_run(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    bad = {"messages": chat(("user", "q"), ("assistant", "a"), ("assistant", "b"))}
    good = [{"messages": chat(("user", str(number)), ("assistant", "a"))} for number in range(8)]
    groups = groups_of(tmp_path, 0, [*good[:3], bad, *good[3:]], nodes=1)
    opened = [fact.number for fact in ask(groups, 1, 9).groups]
    assert len(opened) == 9, "the refused row is left out in each pass"
    assert "a row is left out" in caplog.text and "two messages of the assistant" in caplog.text
    many = groups_of(tmp_path, 0, [bad, bad, *good], nodes=1)
    with pytest.raises(ConfigError, match="two messages of the assistant"):
        ask(many, 1, 9)
    held_out = groups_of(tmp_path, 0, [bad, bad, *good]).held_out
    assert [fact.number for fact in asyncio.run(held_out.opened()).groups] == [2, 4, 6, 8]


def test_lengths_are_those_of_prompt_and_of_the_longest_completion(policy: Path) -> None:
    raw = {"prompt": "a", "chosen": "b" * 9, "rejected": "c"}
    config, tokenizer = config_of(policy, "dpo"), Tokenizer(str(policy / "policy"))
    row = data_row(raw, "", config.data)
    ids = given_ids(row, tokenizer, config)
    exact = replace(config, rollout=replace(config.rollout, max_response_tokens=ids.longest))
    assert row_lengths(row, "", tokenizer, exact).fits
    short = replace(config, rollout=replace(config.rollout, max_response_tokens=ids.longest - 1))
    assert not row_lengths(row, "", tokenizer, short).fits


def groups_of(
    folder: Path,
    index: int,
    rows: list[dict[str, Any]],
    nodes: int = 2,
    shuffle: bool = True,
    kind: str = "sft",
    **rollout: Any,
) -> GivenGroups:
    config = config_of(folder, kind, **rollout)
    config = replace(
        config, launch=replace(config.launch, nodes=nodes), data=replace(config.data, shuffle=shuffle)
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = RowFiles(config.data.train_files, config.data, folder / "scratch")
    placement = placement_of(config)
    assert set(placement.sampling.values()) == {TRAINER} and not placement.pools
    node = Node(
        config=config, paths=RunPaths(folder / "run"), placement=placement, attempt=1, index=index, host="",
        device="cpu",
    )  # fmt: skip
    tokenizer = Tokenizer(config.model.path)
    return GivenGroups(node, DataShard(config, files, tokenizer), HeldOutGroups(node, files, tokenizer))


def batch(groups: GivenGroups, iteration: int, target: int = 2) -> list[int]:
    return [fact.number for fact in ask(groups, iteration, target).groups]


def ask(groups: GivenGroups, iteration: int, target: int) -> c.Advanced:
    order = c.Advance(iteration=iteration, policy_version=0, target=target, roles=(TRAINER,))
    asyncio.run(groups.advance(order))
    return groups.advanced(target)


def rows(count: int) -> list[dict[str, str]]:
    return [
        {"prompt": f"{number}", "completion": "b" * (90 if number == 3 else 5)} for number in range(count)
    ]


def test_nodes_take_rows_in_turn_skip_long_ones_and_go_on_where_a_checkpoint_was(
    policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    first, second = (groups_of(tmp_path, index, rows(9)) for index in (0, 1))
    assert batch(first, 1) == [0, 2] and batch(second, 1) == [1, 3]
    begun = first.state()
    assert begun.next_number == 0, "what is open is not trained on"
    first.trained({0, 1, 2, 3}, 1)
    saved = first.state()
    assert saved.next_number == 4
    assert batch(first, 2) == [4, 6]
    asyncio.run(first.break_off())
    again = groups_of(tmp_path, 0, rows(9))
    again.restore(saved)
    assert batch(again, 2) == [4, 6]
    assert [group.number for group in again.groups_of({4, 5})] == [4]
    other = groups_of(tmp_path, 0, rows(8))
    with pytest.raises(ConfigError, match="the files are not what they were"):
        other.restore(saved)


def test_no_row_is_passed_over_or_trained_on_twice_if_nodes_got_apart_and_their_number_changes(
    policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")  # node 1 has all the long rows
    some = [{"prompt": str(n), "completion": "b" * (900 if n % 4 == 1 else 5)} for n in range(24)]
    first, second = (groups_of(tmp_path, index, some, shuffle=False) for index in (0, 1))
    seen = batch(first, 1) + batch(second, 1)
    for groups in (first, second):
        groups.trained(set(seen), 1)
    files = tuple(
        write_state(FolderStore(tmp_path), f"{n}", one.state()) for n, one in enumerate((first, second))
    )
    assert abs(first.state().next_number - second.state().next_number) > 1, "nodes have got apart"
    alone = groups_of(tmp_path, 0, some, nodes=1, shuffle=False)
    alone.restore(read_state(FolderStore(tmp_path), files, shard=0, num_shards=1))
    fits = {n for n in range(24) if alone.shard.open_given(n) != "rollout/too_long"}
    assert len(fits) == 18
    seen += batch(alone, 2, len(fits) - len(seen))
    assert sorted(seen) == sorted(fits)


def test_rows_that_are_too_long_are_counted_and_some_must_fit(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    config = config_of(tmp_path, "sft")
    shuffled = sum(row["completion"] == "b" * 90 for row in rows(9))
    assert shuffled == 1 and config.data.shuffle
    groups = groups_of(tmp_path, 0, rows(9))
    groups._node = replace(
        groups._node, config=replace(config, rollout=replace(config.rollout, max_response_tokens=2))
    )
    groups.shard._config = groups._node.config
    with pytest.raises(ConfigError, match=r"every row of data\.train_files is longer than"):
        batch(groups, 1)


def test_a_node_that_is_dealt_none_but_bad_rows_is_told_why(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    some = [{"prompt": str(n), "completion": "b" * (900 if n % 2 else 5)} for n in range(8)]
    assert batch(groups_of(tmp_path, 0, some, shuffle=False), 1) == [0, 2]
    with pytest.raises(ConfigError, match=r"has row 2 of every 2 in each pass.* Write data\.shuffle: true"):
        batch(groups_of(tmp_path, 1, some, shuffle=False), 1)
    assert batch(groups_of(tmp_path, 1, some[1:], shuffle=False), 1) == [1, 3], "7 rows go round"
    assert len(batch(groups_of(tmp_path, 1, some), 1)) == 2


def test_held_out_rows_are_dealt_to_nodes_once_and_long_ones_are_left_out(
    policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy").symlink_to(policy / "policy")
    found = []
    for index in (0, 1):
        held_out = groups_of(tmp_path, index, rows(9)).held_out
        config = held_out._node.config
        limited = replace(config, rollout=replace(config.rollout, max_response_tokens=20))
        limited = replace(limited, validation=replace(limited.validation, max_prompts=8))
        held_out._node = replace(held_out._node, config=limited)
        facts = asyncio.run(held_out.opened()).groups
        assert asyncio.run(held_out.opened()).groups == facts
        found.append([fact.number for fact in facts])
        assert [group.number for group in held_out.groups_of({0, 1, 3})] == [index]
    assert found == [[0, 2, 4, 6], [1, 5, 7]], "row 3 is too long, row 8 is beyond validation.max_prompts"


def test_a_row_without_completions_is_a_prompt(policy: Path) -> None:
    config = config_of(policy, "rl")
    row = data_row({"prompt": "a", "completion": "b"}, "", config.data)
    assert isinstance(row, Row) and row.given == ()
    assert row_lengths(row, "", Tokenizer(config.model.path), config).fits
