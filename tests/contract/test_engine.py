"""One suite for every Engine: scripted, transformers, vLLM (tied, untied, experts)."""

import asyncio
import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runs import RunFile
from tests.tiny_models import (
    VOCAB_SIZE,
    make_qwen3,
    make_scripted_model,
    publish,
    publish_tensors,
    reference_model,
    write_publication,
)
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.node_local.host_segment import HEADER_BYTES, segment_path
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.rollouts.scoring.subject import Judged, Subject as JudgedSubject
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine, EngineOptions
from yatt.engine.weights.published import INDEX_NAME, PublicationIndex
from yatt.engine.worker import decoded_difference
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.reward.__main__ import read_verdict

PROMPT = [40, 41, 42, 43, 44]
MAX_MODEL_TOKENS = 128
TURNS_LIMIT = 2000


@dataclass
class Subject:
    """A started engine, the two models it may hold, and who else knows their log-probs."""

    engine: Engine
    kind: str
    models: tuple[str, str]
    reference: Callable[[str, list[int]], list[float]] | None
    version: int = 0


CASES = [
    "scripted", "transformers-tied", "transformers-untied", "transformers-experts", "vllm-tied",
    "vllm-untied", "vllm-experts",
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def subject(request, tmp_path_factory) -> Iterator[Subject]:
    kind, _, variant = request.param.partition("-")
    if kind != "scripted" and importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    if kind == "scripted":
        models = tuple(make_scripted_model(folder / name) for name in "ab")
    else:
        facts = {"tied": variant == "tied", "experts": 4 if variant == "experts" else 0}
        models = tuple(make_qwen3(folder / name, seed=seed, **facts) for seed, name in enumerate("ab"))
    engine = build_engine(kind, options_for(models[0]))
    engine.start()
    yield Subject(engine, kind, models, None if kind == "scripted" else transformers_logprobs)
    engine.close()


def test_log_probs_of_sampled_tokens_are_the_engines_own_scores_of_them(subject: Subject) -> None:
    """One token after the other, and all at once. A planted fault is in `test_engine_options.py`."""
    assert decoded_difference(subject.engine, options_for(subject.models[0]), PROMPT) < 1e-5
    for most in (4, 3, 2):
        short, steps = options_for(subject.models[0], max_model_tokens=most), list[int]()
        assert decoded_difference(subject.engine, short, PROMPT, partial(steps.append, 1)) < 1e-5
        assert bool(steps) == (most > 2), "one token and its score have room from 3 tokens on"


def options_for(model: str, **more: object) -> EngineOptions:
    facts = {
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "eos_ids": (2,),
        "max_model_tokens": MAX_MODEL_TOKENS,
        "max_num_seqs": 8,
        "kv_cache_bytes": 32 << 20,
        "deterministic": True,
    }
    return EngineOptions(**(facts | more))


def transformers_logprobs(folder: str, ids: list[int]) -> list[float]:
    return logprobs_of(reference_model(folder).float(), ids)


def logprobs_of(model, ids: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        table = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    return [float(table[index, token]) for index, token in enumerate(ids[1:])]


def sample(request_id: str, **more: object) -> m.SampleRequest:
    facts = {
        "request_id": request_id,
        "prompt_ids": m.pack_ids(PROMPT),
        "seed": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 12,
    }
    return m.SampleRequest(**(facts | more))


def run(engine: Engine, *samples: m.SampleRequest) -> dict[str, m.Completed]:
    for each in samples:
        engine.add(each)
    done: list[m.Completed] = []
    for _ in range(TURNS_LIMIT):
        if not engine.is_busy:
            return {each.request_id: each for each in done}
        done.extend(engine.step())
    raise AssertionError(f"still busy after {TURNS_LIMIT} turns")


def load(subject: Subject, tmp_path, which: int) -> str:
    """Update to model a or b under a fresh policy version; gives the model's folder."""
    subject.version += 1
    model = subject.models[which]
    version = subject.version
    published = publish(tmp_path / f"v{version}", model=model, policy_version=version, cuts=1 + version % 3)
    subject.engine.load_weights(subject.version, published)
    return model


def ids_of(completed: m.Completed) -> list[int]:
    return m.unpack_ids(completed.token_ids)


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def test_completions_differ_by_seed_and_repeat_for_an_equal_one(subject):
    first = run(subject.engine, *(sample(f"s{seed}", seed=seed, ignore_eos=True) for seed in range(4)))
    assert len({each.token_ids for each in first.values()}) == 4
    again = run(subject.engine, *(sample(f"s{seed}", seed=seed, ignore_eos=True) for seed in (2, 0)))
    assert again["s2"] == first["s2"]
    assert again["s0"] == first["s0"]


def test_sampled_logprobs_equal_the_score_of_the_same_tokens(subject):
    completed = run(subject.engine, sample("one", ignore_eos=True))["one"]
    scored = subject.engine.score([PROMPT + ids_of(completed), PROMPT])
    assert largest_difference(m.unpack_floats(completed.logprobs), scored[0][len(PROMPT) - 1 :]) < 1e-4
    assert len(scored[1]) == len(PROMPT) - 1


@pytest.mark.parametrize("which", [1, 1, 0], ids=["b", "b-again", "back-to-a"])
def test_after_an_update_logprobs_are_those_of_the_new_weights(subject, tmp_path, which):
    before = subject.engine.score([PROMPT])[0]
    model = load(subject, tmp_path, which)
    completed = run(subject.engine, sample("one", ignore_eos=True))["one"]
    assert completed.policy_version == subject.version
    ids = PROMPT + ids_of(completed)
    scored = subject.engine.score([ids])[0]
    assert largest_difference(scored[len(PROMPT) - 1 :], m.unpack_floats(completed.logprobs)) < 1e-4
    if subject.reference is not None:
        assert largest_difference(scored, subject.reference(model, ids)) < 1e-4
    else:
        assert scored[: len(before)] != before


def test_a_temperature_is_in_the_logprobs(subject):
    if subject.reference is None:
        pytest.skip("a script has no temperature")
    completed = run(subject.engine, sample("hot", temperature=0.5, ignore_eos=True, max_tokens=1))["hot"]
    plain = subject.engine.score([PROMPT + ids_of(completed)])[0][-1]
    assert abs(plain - m.unpack_floats(completed.logprobs)[0]) > 1e-3


WATCHED = (60, 7, 61, 44, 60)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_watched_tokens_have_the_log_probs_of_the_sampled_distribution(subject, tmp_path, temperature):
    """At each token, in the order asked, also tokens asked for twice; and nothing else becomes different."""
    model = load(subject, tmp_path, 0)
    facts = {"temperature": temperature, "ignore_eos": True, "max_tokens": 5}
    plain = run(subject.engine, sample("one", **facts))["one"]
    wanted = (*WATCHED, ids_of(plain)[2])
    asked = {f"{n}": sample(f"{n}", **facts, watched=wanted) for n in (1, 2)}
    done = run(subject.engine, *asked.values(), sample("plain", **facts))
    completed = done["1"]
    assert done["plain"] == msgspec.structs.replace(plain, request_id="plain") and plain.watched == b""
    assert msgspec.structs.replace(completed, request_id="one", watched=b"") == plain
    assert done["2"].watched == completed.watched
    rows = watched_rows(completed, len(wanted))
    assert len(rows) == 5 and rows[2][-1] == m.unpack_floats(plain.logprobs)[2]
    assert all(row[0] == row[4] and len(set(row[:4])) == 4 for row in rows)
    if subject.reference is not None:
        expected = reference_rows(model, PROMPT + ids_of(completed), wanted, temperature)
        assert max(map(largest_difference, rows, expected[len(PROMPT) - 1 :])) < 3e-6
        if temperature == 0.5:  # the shares of the watched tokens are those of the model's distribution
            untempered = reference_rows(model, PROMPT + ids_of(completed), wanted, 1.0)[len(PROMPT) - 1 :]
            shares = [shares_of([temperature * each for each in row[:4]]) for row in rows]
            assert max(map(largest_difference, shares, [shares_of(row[:4]) for row in untempered])) < 1e-6


def watched_rows(completed: m.Completed, count: int) -> list[list[float]]:
    """The log-probs of watched tokens, by sampled token."""
    values = m.unpack_floats(completed.watched)
    assert len(values) == count * len(ids_of(completed))
    return [values[at : at + count] for at in range(0, len(values), count)]


def reference_rows(
    folder: str, ids: list[int], watched: tuple[int, ...], temperature: float
) -> list[list[float]]:
    """Of watched tokens after each token but the last, by transformers."""
    import torch

    with torch.no_grad():
        logits = reference_model(folder).float()(torch.tensor([ids])).logits[0, :-1]
    return (logits / (temperature or 1.0)).log_softmax(-1)[:, list(watched)].tolist()


def shares_of(values: list[float]) -> list[float]:
    weights = [math.exp(each) for each in values]
    return [each / math.fsum(weights) for each in weights]


def test_watched_tokens_that_an_engine_cannot_give_are_refused_by_name(subject):
    """And cost nobody else anything."""
    subject.engine.add(sample("good", max_tokens=4, ignore_eos=True, watched=(5,) * m.MOST_WATCHED))
    for wrong in (-1, VOCAB_SIZE, 1 << 40):
        with pytest.raises(ValueError, match=f"watched token {wrong} is not in the model's vocabulary"):
            subject.engine.add(sample("bad", watched=(5, wrong)))
    with pytest.raises(ValueError, match="65 watched tokens; an engine takes 64 at most"):
        subject.engine.add(sample("bad", watched=(5,) * 65))
    if subject.kind == "vllm":
        with pytest.raises(ValueError, match=r"temperature 0.005 with watched tokens: vLLM takes 0.01"):
            subject.engine.add(sample("bad", temperature=0.005, watched=(5,)))
    done = run(subject.engine)
    assert list(done) == ["good"] and len(watched_rows(done["good"], m.MOST_WATCHED)) == 4


def test_log_probs_of_watched_tokens_that_are_no_numbers_are_refused(subject, tmp_path):
    """Planted: a weight of the model is none. The engine goes on."""
    if subject.kind == "scripted":
        pytest.skip("a script has no weights")
    tensors = weights_of(subject.models[0])
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    subject.version += 1
    torn = publish_tensors(tmp_path / "nan", tensors, subject.version)
    subject.engine.load_weights(subject.version, torn)
    completed = run(subject.engine, sample("one", temperature=0.0, max_tokens=2, watched=(5, 6)))["one"]
    assert (completed.finish_reason, completed.token_ids, completed.watched) == ("error", b"", b"")
    assert completed.error.startswith("the log-prob of watched token 5 is not a number")
    load(subject, tmp_path, 0)
    completed = run(subject.engine, sample("one", temperature=0.0, max_tokens=2, watched=(5, 6)))["one"]
    assert completed.error == "" and len(watched_rows(completed, 2)) == len(ids_of(completed)) > 0


def test_the_longest_completion_ends_with_reason_length(subject):
    completed = run(subject.engine, sample("long", max_tokens=7, ignore_eos=True))["long"]
    assert (len(ids_of(completed)), completed.finish_reason) == (7, "length")
    assert len(m.unpack_floats(completed.logprobs)) == 7


def test_a_token_beyond_the_vocabulary_is_refused_and_costs_nobody_else(subject):
    if subject.reference is None:
        pytest.skip("a script has no vocabulary")
    subject.engine.add(sample("good", max_tokens=4, ignore_eos=True))
    with pytest.raises(ValueError):
        subject.engine.add(sample("bad", prompt_ids=m.pack_ids([40, 10 * VOCAB_SIZE])))
    done = run(subject.engine)
    assert len(ids_of(done["good"])) == 4 and "bad" not in done


def test_the_context_bounds_a_completion(subject):
    prompt = [50] * (MAX_MODEL_TOKENS - 3)
    asked = sample("brim", prompt_ids=m.pack_ids(prompt), max_tokens=50, ignore_eos=True)
    completed = run(subject.engine, asked)["brim"]
    assert (len(ids_of(completed)), completed.finish_reason) == (3, "length")


def test_an_end_of_sequence_token_stops_and_is_kept(subject):
    asked = [sample(f"{seed}", seed=seed, max_tokens=100) for seed in range(16)]
    done = run(subject.engine, *asked).values()
    stopped = [ids_of(each) for each in done if each.finish_reason == "stop"]
    assert stopped
    assert all(ids[-1] == 2 and 2 not in ids[:-1] for ids in stopped)


def test_a_stop_text_ends_with_reason_stop(subject):
    free = ids_of(run(subject.engine, sample("free", ignore_eos=True, max_tokens=30))["free"])
    tokenizer = Tokenizer(subject.models[0])
    at, word = next(
        (index, text)
        for index in range(3, 30)
        if (text := tokenizer.decode(free[index : index + 1])).strip()
        and text.isascii()
        and text not in tokenizer.decode(free[:index])
    )
    asked = sample("cut", ignore_eos=True, max_tokens=30, stop=(word,))
    completed = run(subject.engine, asked)["cut"]
    assert completed.finish_reason == "stop"
    assert ids_of(completed) == free[: at + 1]
    assert len(m.unpack_floats(completed.logprobs)) == at + 1
    watching = run(subject.engine, msgspec.structs.replace(asked, watched=(5, 6)))["cut"]
    assert watching.token_ids == completed.token_ids and len(watched_rows(watching, 2)) == at + 1


def test_a_stop_token_ends_with_reason_stop_and_is_kept(subject):
    """Also beside a stop text, without end-of-sequence tokens, and where it has no text."""
    free = ids_of(run(subject.engine, sample("free", ignore_eos=True, max_tokens=30))["free"])
    at = next(place for place in range(3, 30) if free[place] not in free[:place])
    for name, more in (("alone", {}), ("beside", {"stop": ("</think>",)})):
        asked = sample(name, ignore_eos=True, max_tokens=30, stop_ids=(free[at], 1), watched=(5, 6), **more)
        completed = run(subject.engine, asked)[name]
        assert completed.finish_reason == "stop" and ids_of(completed) == free[: at + 1]
        assert len(m.unpack_floats(completed.logprobs)) == at + 1 == len(watched_rows(completed, 2))


def test_abort_gives_what_was_sampled(subject):
    whole = ids_of(run(subject.engine, sample("whole", ignore_eos=True, max_tokens=40))["whole"])
    subject.engine.add(sample("part", ignore_eos=True, max_tokens=40, watched=(5, 6)))
    for _ in range(6):
        assert subject.engine.step() == []
    (completed,) = subject.engine.abort(("part", "nobody"))
    partial = ids_of(completed)
    assert completed.finish_reason == "abort"
    assert 0 < len(partial) < 40
    assert whole[: len(partial)] == partial
    assert len(m.unpack_floats(completed.logprobs)) == len(partial) == len(watched_rows(completed, 2))
    assert not subject.engine.is_busy


def test_abort_of_all_empties_the_engine(subject):
    subject.engine.add(sample("first", ignore_eos=True))
    subject.engine.add(sample("second", ignore_eos=True))
    done = subject.engine.abort()
    assert {each.request_id: ids_of(each) for each in done} == {"first": [], "second": []}
    assert run(subject.engine, sample("first"))["first"].finish_reason in ("stop", "length")


def test_a_request_asked_for_twice_runs_once(subject):
    asked = sample("twice", ignore_eos=True)
    assert list(run(subject.engine, asked, asked)) == ["twice"]


def test_a_prompt_that_does_not_fit_is_refused_alone(subject):
    subject.engine.add(sample("good"))
    for length in (0, MAX_MODEL_TOKENS, MAX_MODEL_TOKENS + 9):
        with pytest.raises(ValueError, match=f"the prompt has {length} tokens"):
            subject.engine.add(sample("bad", prompt_ids=m.pack_ids([50] * length)))
    assert list(run(subject.engine)) == ["good"]


def test_an_idle_engine_has_nothing_to_give(subject):
    assert not subject.engine.is_busy
    assert subject.engine.step() == []
    assert subject.engine.abort(("nobody",)) == []


def test_an_engine_answers_as_before_after_sleep_and_wake(subject):
    before = run(subject.engine, sample("one", ignore_eos=True))["one"]
    subject.engine.sleep()
    subject.engine.wake()
    assert run(subject.engine, sample("one", ignore_eos=True))["one"] == before


def test_an_update_after_sleep_and_wake_holds(subject, tmp_path):
    subject.engine.sleep()
    subject.engine.wake()
    model = load(subject, tmp_path, 1)
    if subject.reference is not None:
        scored = subject.engine.score([PROMPT])[0]
        assert largest_difference(scored, subject.reference(model, PROMPT)) < 1e-4


def test_a_folder_without_publication_is_named(subject, tmp_path):
    with pytest.raises(WorkerFailed, match=r"no weights of policy version 99 in .*index.json cannot be read"):
        subject.engine.load_weights(99, str(tmp_path / "nowhere"))
    assert run(subject.engine, sample("one"))["one"].policy_version == subject.version


def test_a_publication_of_another_version_is_refused(subject, tmp_path):
    folder = publish(tmp_path / "v7", model=subject.models[0], policy_version=7)
    with pytest.raises(WorkerFailed, match="is of policy version 7, but version 8888 was asked for"):
        subject.engine.load_weights(8888, folder)


def test_half_an_update_is_never_sampled_from(subject, tmp_path):
    if subject.kind == "scripted":
        pytest.skip("a script has no weights")
    model = load(subject, tmp_path, 0)
    tensors = weights_of(subject.models[1])
    tensors["model.layers.1.nobody_knows_this.weight"] = tensors.pop(
        next(n for n in tensors if "layers.1" in n)
    )
    folder = publish_tensors(tmp_path / "torn", tensors, 100)
    with pytest.raises(Exception, match="nobody_knows_this"):
        subject.engine.load_weights(100, folder)
    if subject.kind == "vllm":
        with pytest.raises(WorkerFailed, match="has no whole weights"):
            subject.engine.add(sample("torn"))
        model = load(subject, tmp_path, 1)
    scored = subject.engine.score([PROMPT])[0]
    assert largest_difference(scored, subject.reference(model, PROMPT)) < 1e-4


def weights_of(model: str) -> dict:
    from safetensors.torch import load_file

    return {
        name: tensor for file in Path(model).glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def test_an_engine_that_holds_other_weights_is_found_out_to_the_bit(subject, tmp_path):
    if subject.kind == "scripted":
        pytest.skip("a script has no weights")
    load(subject, tmp_path, 0)
    folder = tmp_path / f"v{subject.version}"
    same = subject.engine.compare_weights(subject.version, str(folder))
    assert same.differing == ()
    assert same.num_compared > 4
    index = msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=PublicationIndex)
    others = index.sums | {"model.norm.weight": index.sums["model.norm.weight"] ^ 1}
    write_publication(folder, [Path(stem) for stem in index.stems], subject.version, others)
    other = subject.engine.compare_weights(subject.version, str(folder))
    assert other.differing == ("model.norm.weight",)
    assert other.num_compared == same.num_compared
    write_publication(
        folder, [Path(stem) for stem in index.stems], subject.version, dict([*index.sums.items()][:3])
    )
    assert subject.engine.compare_weights(subject.version, str(folder)).num_compared <= 3


def test_a_tensor_damaged_on_its_way_or_left_out_is_refused(subject, tmp_path):
    if subject.kind == "scripted":
        pytest.skip("a script has no weights")
    folder = Path(publish(tmp_path / "v500", model=subject.models[0], policy_version=500))
    with segment_path(folder / "host-0", "weights").open("r+b") as file:
        file.seek(HEADER_BYTES + 5)
        file.write(b"\xa5")
    with pytest.raises(Exception, match=r"published tensors .* are not here as they are at the trainer"):
        subject.engine.load_weights(500, str(folder))
    with pytest.raises(WorkerFailed, match="has no whole weights"):
        subject.engine.add(sample("torn"))
    load(subject, tmp_path, 0)


def test_weights_that_change_while_they_are_read_are_refused(subject, tmp_path, monkeypatch):
    if subject.kind == "scripted":
        pytest.skip("a script has no weights")
    folder = Path(publish(tmp_path / "v600", model=subject.models[0], policy_version=600))
    path = segment_path(folder / "host-0", "weights")
    set_sequence(path, 3)
    with pytest.raises(WorkerFailed, match="being changed; version 600 of attempt 1 was asked for"):
        subject.engine.load_weights(600, str(folder))
    run(subject.engine, sample("still"))  # refused before anything was touched
    set_sequence(path, 2)

    def overtaken(tensors):
        for index, item in enumerate(tensors):
            if index == 3:
                set_sequence(path, 3)
            yield item

    for module in ("yatt.engine.weights.transfer", "yatt.engine.transformers"):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.with_progress", overtaken)
    with pytest.raises(Exception, match="being changed; version 600"):
        subject.engine.load_weights(600, str(folder))
    with pytest.raises(WorkerFailed, match="has no whole weights"):
        subject.engine.add(sample("mix"))
    monkeypatch.undo()
    set_sequence(path, 2)
    subject.engine.load_weights(600, str(folder))
    load(subject, tmp_path, 0)


def set_sequence(path: Path, sequence: int) -> None:
    """Odd: the host copy is being changed."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write(sequence.to_bytes(8, "little"))


def test_tokens_are_of_the_vocabulary(subject):
    completed = run(subject.engine, *(sample(f"{n}", seed=n, ignore_eos=True) for n in range(4)))
    assert all(0 <= token < VOCAB_SIZE for each in completed.values() for token in ids_of(each))


@pytest.mark.parametrize(
    "structure", [{"choice": ["is three", "a text"]}, {"json": {"type": "object", "properties": {
        "score": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["score"],
        "additionalProperties": False}}],
    ids=["choice", "json"],
)  # fmt: skip
def test_an_answer_has_the_structure_that_is_asked_for_or_is_refused(subject, structure):
    tokenizer = Tokenizer(subject.models[0])
    asked = [
        sample(f"s{seed}", structure=json.dumps(structure), seed=seed, max_tokens=60) for seed in range(4)
    ]
    if subject.kind != "vllm":
        with pytest.raises(ValueError, match="need the vllm engine"):
            subject.engine.add(asked[0])
        return
    digits = tuple(tokenizer.encode_plain(each)[0] for each in "78x")
    sure = sample("sure", structure=json.dumps({"choice": ["7", "8"]}), temperature=0.5, watched=digits)
    done = run(subject.engine, *asked, sample("free", max_tokens=9), sure)
    (seven, eight, other), *_ = watched_rows(done["sure"], 3)
    assert math.exp(seven) + math.exp(eight) == pytest.approx(1.0, abs=1e-6) and other == -math.inf
    assert done["free"].finish_reason in ("length", "stop")
    for each in asked:
        ids = [i for i in m.unpack_ids(done[each.request_id].token_ids) if i != 2]
        text = tokenizer.decode(ids)
        if "choice" in structure:
            assert text in structure["choice"]
        elif done[each.request_id].finish_reason == "stop":
            assert 0 <= json.loads(text)["score"] <= 9
        else:
            assert text.startswith("{"), "cut"


# ---- a judge that thinks ------------------------------------------------------------------------

BUDGET, VERDICT = 24, 3
WORDS = ("7", "8")
COMPLETIONS = [f"one plus {word} is three" for word in ("two", "a model", "numbers", "three", "text", "")]


def judged_by(engine: Engine, config: RunConfig) -> list[tuple[Judged, float | None, dict[str, float]]]:
    """Each completion's answer, score and measures."""
    found: list[tuple[Judged, float | None, dict[str, float]]] = []
    genrm = config.genrms[0]

    async def complete(_: str, asked: m.SampleRequest) -> m.Completed:
        return run(engine, asked)[asked.request_id]

    async def abort(role: str, request_ids: tuple[str, ...]) -> None:
        raise AssertionError(f"{request_ids} of {role} are not aborted here")

    async def call(order: Any) -> m.Message:
        return read_verdict(order, genrm.verdict)

    judge = Judge(config, complete, abort, call, num_nodes=1, say=print)
    scorer = Scorer(config, judge, score_sources(config, judge, call))

    async def every() -> None:
        for number, text in enumerate(COMPLETIONS):
            group, judged = new_group(number, 0, "p", [1, 2], 1), list[Judged]()
            group.samples[0].text, group.samples[0].finish_reason = text, "stop"
            row = Row(prompt="p", data_source="", ground_truth="", raw={})
            await scorer.score(
                JudgedSubject(
                    group=group, sample=group.samples[0], row=row, ref=m.RowRef(0, 0, 0), counters=Counter(),
                    judged=judged,
                ),
                ("genrm:judge",),
            )  # fmt: skip
            found.append((judged[0], group.samples[0].scores.get("judge"), group.samples[0].extras))

    asyncio.run(every())
    return found


def greedy(model: str, ids: list[int], count: int, eos: int = 2) -> list[int]:
    """The likeliest tokens, one after the other, by transformers."""
    import torch

    reference, said = reference_model(model).float(), list[int]()
    while len(said) < count and (not said or said[-1] != eos):
        with torch.no_grad():
            said.append(int(reference(torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
    return said


def test_the_verdict_is_the_one_after_the_whole_thought(subject: Subject, tmp_path: Path) -> None:
    """The thought is what the engine samples from the question alone. The verdict is what the model, by
    transformers, says after question, thought and end: freely, or, where the engine keeps to a form, of the
    words. Thoughts end at a text that the model writes, or are cut. On vLLM it costs as much as a small
    whole run: its first grammars are compiled, and only real engines have logits."""
    kind, running, model = subject.kind, subject.engine, subject.models[0]
    if "untied" not in model:
        pytest.skip("one model of each engine suffices; a script has no logits")
    load(subject, tmp_path, 0)
    tokenizer = Tokenizer(model)
    question = tokenizer.encode("Is it right? " + COMPLETIONS[0])
    whole = greedy(model, question, BUDGET)
    end = next(
        text
        for each in whole[4:]
        if (text := tokenizer.decode([each]).strip()).isascii() and text.isprintable() and len(text) > 0
        and text not in tokenizer.decode(whole[: whole.index(each)])
    )  # fmt: skip
    words = [tokenizer.encode_plain(each)[0] for each in WORDS]
    is_bound = kind == "vllm"
    bound = {"choices": WORDS, "read": "soft", "grid": 0.0} if is_bound else {"pattern": "([78])"}
    section = {
        "name": "judge", "model": model, "engine": kind, "template": "Is it right? {completion}",
        "retries": 0, "max_tokens": VERDICT, "max_model_tokens": MAX_MODEL_TOKENS, "dtype": "float32",
        "think": {"budget": BUDGET, "end": f" {end}\n"}, "verdict": {"scores": {"7": 1.0, "8": 0.0}, **bound},
    }  # fmt: skip
    run_file = RunFile(tmp_path, {"genrms": [section], "launch": {"nodes": 1}, "rewards": []})
    config = load_run_config([run_file.write()], [])
    after = tokenizer.encode_plain(f" {end}\n")
    seen: Counter[bool] = Counter()
    for (judged, score, extras), text in zip(judged_by(running, config), COMPLETIONS, strict=True):
        question = tokenizer.encode("Is it right? " + text)
        asked = sample("whole", prompt_ids=m.pack_ids(question), temperature=0.0, max_tokens=BUDGET)
        thought = ids_of(run(running, asked)["whole"])
        assert thought == greedy(model, question, BUDGET)
        while thought and (thought[-1] == 2 or end in tokenizer.decode(thought)):
            thought.pop()
        assert judged.thought == tokenizer.decode(thought)
        assert judged.is_thought_cut == (len(thought) == BUDGET)
        seen[judged.is_thought_cut] += 1
        told = [*question, *thought, *after]
        if is_bound:
            seven, eight = shares_of(reference_rows(model, [*told, 0], tuple(words), 0.0)[-1])
            assert judged.answer == WORDS[seven < eight]
            assert score == pytest.approx(seven, abs=1e-4)
            assert extras["judge/confidence"] == pytest.approx(max(seven, eight), abs=1e-4)
            assert 0.5 <= extras["judge/confidence"] < 1 - 1e-6
        else:
            assert judged.answer == tokenizer.decode(greedy(model, told, VERDICT))
    assert seen[False] and math.isclose(seen.total(), len(COMPLETIONS))
