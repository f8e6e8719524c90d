"""Each input has a digest of its own: a change of one of its files changes it, and no other one."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_models import make_scripted_model
from yatt.adapters.inputs import input_digests as digests
from yatt.config.schema import RunConfig
from yatt.config.sections.functions import EnvironmentSection, RewardSection
from yatt.config.sections.scoring import GenRMSection
from yatt.records import inputs

REWARD = "import helper\nfrom package import part\n\ndef compute_score(*_): return helper.SCORE\n"


def digests_of(config: RunConfig) -> dict[str, str]:
    found: dict[str, str] = {}
    digests.add_input_digests(config, found)
    return found


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Every kind of input, each with files of its own."""
    from yatt.config.schema import DataSection, ModelSection, RolloutSection
    from yatt.config.sections.algorithm import AlgorithmSection
    from yatt.config.sections.operation import RunSection
    from yatt.config.sections.training import OptimizerSection, TrainerSection

    for name in ("policy", "judge"):
        folder = Path(make_scripted_model(tmp_path / name))
        (folder / "model.safetensors").write_bytes(bytes(10_000))
        (folder / "generation_config.json").write_text("{}")
    files = {
        "reward/reward.py": REWARD, "reward/helper.py": "SCORE = 1.0\n", "reward/unrelated.py": "",
        "reward/package/__init__.py": "", "reward/package/part.py": "from . import deep\n",
        "reward/package/deep.py": "DEEP = 1\n", "other/algorithm.py": "", "other/family.py": "",
        "other/judging.py": "", "world/world.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "one"}\n')
    return RunConfig(
        run=RunSection(dir="unused"),
        data=DataSection(train_files=("unused",), val_files=(str(held_out),)),
        model=ModelSection(path=str(tmp_path / "policy"), family=str(tmp_path / "other/family.py")),
        optimizer=OptimizerSection(lr=1e-3),
        trainer=TrainerSection(total_iterations=1, train_batch_size=2, mini_batch_size=2),
        rollout=RolloutSection(n=2, max_response_tokens=4),
        algorithm=AlgorithmSection(path=str(tmp_path / "other/algorithm.py")),
        environment=EnvironmentSection(path=str(tmp_path / "world/world.py")),
        rewards=(
            RewardSection(name="letters", path=str(tmp_path / "reward/reward.py")),
            RewardSection(name="exact", path="builtin:exact"),
        ),
        genrms=(
            GenRMSection(
                name="judge", model=str(tmp_path / "judge"), path=str(tmp_path / "other/judging.py")
            ),
        ),
    )


CHANGES = {
    "reward/reward.py": "rewards[letters]", "reward/helper.py": "rewards[letters]",
    "reward/package/deep.py": "rewards[letters]", "reward/unrelated.py": "",
    "policy/tokenizer.json": "tokenizer", "policy/config.json": "model_config",
    "policy/generation_config.json": "model_config", "policy/model.safetensors": "weights",
    "judge/tokenizer.json": "genrms[judge].model", "judge/model.safetensors": "genrms[judge].model",
    "judge/config.json": "genrms[judge].model", "other/judging.py": "genrms[judge].path",
    "other/algorithm.py": "algorithm.path", "other/family.py": "model.family",
    "world/world.py": "environment", "held-out.jsonl": "data.val_files",
}  # fmt: skip


def test_a_change_of_a_file_is_a_change_of_its_input_only(config: RunConfig, tmp_path: Path) -> None:
    before = digests_of(config)
    assert before == digests_of(config)
    assert set(before) == {*CHANGES.values(), "chat_template"} - {""}
    for file, name in CHANGES.items():
        path = tmp_path / file
        old = path.read_bytes()
        path.write_bytes(old[:-1] + b"#" if old else b"#")
        now = digests_of(config)
        assert {each for each in before if now.get(each) != before[each]} == {name} - {""}, file
        path.write_bytes(old)
    assert digests_of(config) == before


def test_a_critic_that_begins_from_a_folder_of_its_own_is_an_input(config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, algorithm=replace(config.algorithm, path=""))
    plain, folder = digests_of(config), Path(make_scripted_model(tmp_path / "critic"))
    (folder / "model.safetensors").write_bytes(bytes(10_000))
    gae = replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"))
    assert digests_of(gae) == plain, "it begins as the policy, which is one"
    own = replace(gae, critic=replace(gae.critic, path=str(folder)))
    before = digests_of(own)
    assert before.items() - plain.items() == {
        (name, before[name]) for name in (inputs.CRITIC_CONFIG, inputs.CRITIC_WEIGHTS)
    }
    for file, name in (("config.json", inputs.CRITIC_CONFIG), ("model.safetensors", inputs.CRITIC_WEIGHTS)):
        old = (folder / file).read_bytes()
        (folder / file).write_bytes(old[:-1] + b"#")
        now = digests_of(own)
        assert {each for each in before if now.get(each) != before[each]} == {name}
        (folder / file).write_bytes(old)
    os.rename(folder, tmp_path / "moved")
    moved = replace(own, critic=replace(own.critic, path=str(tmp_path / "moved")))
    assert digests_of(moved) == before


def test_the_template_is_no_part_of_the_tokenizer(config: RunConfig, tmp_path: Path) -> None:
    before = digests_of(config)
    settings = tmp_path / "policy/tokenizer_config.json"
    values = json.loads(settings.read_text())
    for key, name in (("chat_template", "chat_template"), ("eos_token", "tokenizer")):
        settings.write_text(json.dumps(values | {key: "another"}))
        now = digests_of(config)
        assert {each for each in before if now[each] != before[each]} == {name}
    settings.write_text(json.dumps(values, indent=8))
    assert digests_of(config) == before, "the same values"
    (tmp_path / "policy/chat_template.jinja").write_text("another")
    assert digests_of(config)["chat_template"] != before["chat_template"]


def test_files_that_have_moved_are_the_same(config: RunConfig, tmp_path: Path) -> None:
    before = digests_of(config)
    for name in ("policy", "judge", "reward", "other", "world", "held-out.jsonl"):
        (tmp_path / name).rename(tmp_path / f"new-{name}")
    place = lambda path: path and path.replace(str(tmp_path), f"{tmp_path}/x").replace("/x/", "/new-")  # noqa: E731
    moved = replace(
        config,
        model=replace(config.model, path=place(config.model.path), family=place(config.model.family)),
        algorithm=replace(config.algorithm, path=place(config.algorithm.path)),
        environment=replace(config.environment, path=place(config.environment.path)),
        data=replace(config.data, val_files=(str(tmp_path / "new-held-out.jsonl"),)),
        rewards=tuple(replace(r, path=place(r.path)) for r in config.rewards),
        genrms=tuple(replace(g, model=place(g.model), path=place(g.path)) for g in config.genrms),
    )
    assert digests_of(moved) == before


def test_an_input_that_cannot_be_read_is_missing(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "policy/tokenizer.json").unlink()
    (tmp_path / "policy/tokenizer_config.json").write_text("{")
    (tmp_path / "held-out.jsonl").unlink()
    (tmp_path / "world/world.py").unlink()
    (tmp_path / "judge/tokenizer_config.json").write_text("[" * 100_000)
    gone = {"tokenizer", "chat_template", "data.val_files", "environment", "genrms[judge].model"}
    assert set(digests_of(config)) == {*CHANGES.values()} - gone - {""}


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_model_that_is_not_mounted_is_unknown_and_no_other_model(
    config: RunConfig, tmp_path: Path, how: str
) -> None:
    """Exit code 2 is not for a filesystem that is away; who needs the files says so."""
    (tmp_path / "policy").rename(tmp_path / "away")
    if how == "empty":
        (tmp_path / "policy").mkdir()
    of_policy = {"tokenizer", "chat_template", "model_config", "weights"}
    assert set(digests_of(config)) == {*CHANGES.values()} - of_policy - {""}


@pytest.mark.parametrize("at", [0, -1, digests.BLOCK_BYTES - 1, "length"])
def test_the_digest_of_a_large_file_reads_blocks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: object
) -> None:
    monkeypatch.setattr(digests, "WHOLE_BYTES", 1 << 20)
    path = tmp_path / "weights"
    content = bytearray(os.urandom(2 << 20))
    path.write_bytes(content)
    before = digests.file_digest(path)
    if at == "length":
        content += b"x"
    else:
        content[at] ^= 1
    path.write_bytes(content)
    assert digests.file_digest(path) != before


def test_other_weights_of_the_same_size_are_seen_wherever_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of 1/32 that is other, as one layer: blocks lie closer together than that."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 1 << 20)
    path, content = tmp_path / "weights", os.urandom(4 << 20)
    path.write_bytes(content)
    before, size = digests.file_digest(path), len(content) // 32
    for part in range(32):
        path.write_bytes(content[: part * size] + os.urandom(size) + content[(part + 1) * size :])
        assert digests.file_digest(path) != before


EVERY = ["a.py", "b.py", "chain.py", "pkg/__init__.py", "pkg/inner.py", "ring.py"]

# ---- what a file imports ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import a", ["a.py"]),
        ("import a as x, json", ["a.py"]),
        ("from a import thing", ["a.py"]),
        ("def late():\n    import a", ["a.py"]),
        ("try:\n    import absent\nexcept ImportError:\n    import b", ["b.py"]),
        ("import pkg.inner", ["pkg/__init__.py", "pkg/inner.py"]),
        ("from pkg import inner", ["pkg/__init__.py", "pkg/inner.py"]),
        ("from pkg.inner import x", ["pkg/__init__.py", "pkg/inner.py"]),
        ("import bare.inner", ["bare/inner.py"]),
        ("import chain", ["chain.py", "a.py", "ring.py"]),
        ("from . import a", ["a.py"]),
        ("from .. import a", []),
        ("model.eval()", []),
        ("import importlib\nimportlib.import_module(name)", EVERY),
        ("import sys\nsys.path.insert(0, 'x')\nfrom bare import inner", [*EVERY, "bare/inner.py"]),
        ("import importlib.util\nimportlib.util.spec_from_file_location('h', 'h.py')", EVERY),
        ("value = eval(text)", EVERY),
        (f"if False:\n    from {'.' * 50} import x", []),
        ("import broken", ["broken.py"]),
        ("x = (", []),
    ],
)
def test_what_a_file_imports_is_found_without_running_it(
    tmp_path: Path, text: str, imported: list[str]
) -> None:
    folder = tmp_path / "own"
    files = {
        "a.py": "", "b.py": "", "chain.py": "import a, ring", "ring.py": "import chain",
        "pkg/__init__.py": "", "pkg/inner.py": "", "bare/inner.py": "",
    }  # fmt: skip
    if "broken" in text:
        files["broken.py"] = "x = ("
    (tmp_path / "a.py").parent.mkdir(exist_ok=True)
    (tmp_path / "a.py").write_text("")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "reward.py").write_text(text)
    found = digests.imported_files(folder / "reward.py")
    assert [str(each.relative_to(folder)) for each in found] == sorted([*imported, "reward.py"])


def test_a_fifo_in_the_place_of_an_input_holds_nobody(config: RunConfig) -> None:
    held_out = Path(config.data.val_files[0])
    held_out.unlink()
    os.mkfifo(held_out)
    assert inputs.HELD_OUT not in digests_of(config)
