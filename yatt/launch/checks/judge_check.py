"""Checks of GenRMs before anything starts: their folders, sizes and context lengths."""

import json
from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.inputs.model_family import has_some_windows, has_turned_experts
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.run_store import store_url
from yatt.checkpoint.convert.export import check_is_of
from yatt.checkpoint.store.store import folder_of, is_folder, open_store
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import CheckpointError, ConfigError, StoreUnreachable, mistake_in
from yatt.judging.judging import most_shown
from yatt.judging.reading import structure_of, unwritable_text
from yatt.launch.checks.model_check import check_model, checked_tensors
from yatt.models.families import Family
from yatt.models.folder import ModelFolder
from yatt.models.model import read_config, read_model
from yatt.paths import RunPaths
from yatt.plain_files import read_plain

TOKENIZER, MOST_BYTES = "tokenizer.json", 1 << 29
HEAD = "ForSequenceClassification"
"""End of the names of transformers' classes that give a text numbers."""


def check_judge(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Checks the folder of a GenRM that has an engine, and the store of its newer weights.

    Raises:
        ConfigError: as `check_judge_folder` and `check_refresh`.
    """
    check_judge_folder(genrm, key)
    if genrm.refresh.url and config.trains:  # an evaluation asks the model
        check_refresh(config, genrm, f"{key}.refresh.url")


def check_judge_folder(genrm: GenRMSection, key: str) -> None:
    """Checks the folder of a GenRM that has an engine.

    Raises:
        ConfigError: it is not a Hugging Face model, a file of it is damaged, or `tp_size` does not divide its
            attention heads.
    """
    check_engine_model(genrm.model, key, genrm.engine, genrm.tp_size)
    check_head(genrm, f"{key}.model")
    refuse_turned_experts(genrm.model, f"{key}.model")


def check_refresh(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Checks, at the start of a run, the store of the run that a GenRM takes newer weights of. It may have no
    checkpoint yet. A run that has begun keeps the weights that it has.

    Raises:
        ConfigError: it is this run's own, cannot be used, or its newest checkpoint is of another model.
    """
    if RunPaths(Path(config.run.dir)).config.exists():
        return
    url, section = genrm.refresh.url, config.checkpoint
    if url.rstrip("/") == store_url(config, Path(config.run.dir)).rstrip("/"):
        raise ConfigError("is this run's own store; write model: policy for a judge of its weights.", key=key)
    _check_place(url, key)
    try:
        checkpoints = Checkpoints(open_store(url, section.storage_options, section.stall_s), 0)
        names = checkpoints.candidates().names
        manifest = checkpoints.read(names[0]) if names else None
    except (StoreUnreachable, CheckpointError) as error:
        raise ConfigError(f"{url} cannot be used from this machine ({error}).", key=key) from error
    if manifest is None:
        return
    try:
        check_is_of(manifest, ModelFolder(path=Path(genrm.model), model=read_model(genrm.model)))
    except ConfigError as error:
        raise ConfigError(f"{names[0]}: {error}", key=key) from error


def _check_place(url: str, key: str) -> None:
    if not is_folder(url) or not folder_of(url).exists():
        return
    if not folder_of(url).is_dir():
        raise ConfigError(f"{url} is no folder; write that of a run's checkpoints.", key=key)
    if (folder_of(url) / "checkpoints").is_dir():
        raise ConfigError(f"{url} is a run's folder; write {url}/checkpoints.", key=key)


def check_head(genrm: GenRMSection, key: str) -> None:
    """Checks that a folder has a head with the wanted number if, and only if, it is a scalar reward model's.

    Raises:
        ConfigError: its class is another one, or its head has fewer numbers.
    """
    if genrm.engine == "scripted":
        return
    values = read_config(genrm.model)
    names = values.get("architectures") or [""]
    name = str(names[0]) if isinstance(names, list) else ""
    has_head = name.endswith(HEAD)
    if genrm.kind != "scalar" and has_head:
        raise ConfigError(f"{genrm.model} is a {name}, which writes no text; write kind: scalar.", key=key)
    if genrm.kind != "scalar":
        return
    if not has_head:
        raise ConfigError(
            f"{genrm.model} is a {name or 'model of no named class'}; kind: scalar needs one whose class "
            f"ends with {HEAD}.",
            key=key,
        )
    labels = values.get("num_labels", len(values.get("id2label") or {}) or 2)  # transformers' default is 2
    if type(labels) is int and genrm.label >= labels:
        raise ConfigError(
            f"{key.removesuffix('model')}label: {genrm.label}, but the head of {genrm.model} has {labels} "
            "numbers, counted from 0."
        )


def check_structured(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Checks that the engine can keep to the form of verdicts.

    Raises:
        ConfigError: it cannot.
    """
    engine = config.rollout.engine if genrm.is_policy else genrm.engine
    if genrm.api.url or engine in ("auto", "vllm"):
        return
    if genrm.judging.asks == "together":
        says = f"together needs engine vllm, which keeps to JSON, not {engine}; write each."
        raise ConfigError(says, key=f"{key}.judging.asks")
    if genrm.verdict.choices or genrm.verdict.json_schema:
        says = f"choices and json_schema need engine vllm, not {engine}; write a pattern."
        raise ConfigError(says, key=f"{key}.verdict")


def check_writable(genrm: GenRMSection, tokenizer: Tokenizer, key: str) -> None:
    """Checks that the tokenizer can write what the form of verdicts asks for: no request would be answered.
    A form that is no JSON is told by another check.

    Raises:
        ConfigError: it cannot.
    """

    def can_write(text: str) -> bool:
        try:
            return text in tokenizer.decode(tokenizer.encode_plain(text))
        except (TypeError, UnicodeEncodeError):  # half a character, escaped in the schema
            return False

    names = [each.name for each in genrm.judging.criteria] if genrm.judging.asks == "together" else []
    try:
        text = unwritable_text(structure_of(genrm.verdict, names), can_write)
    except (ValueError, RecursionError):
        return
    if text:
        where = f"in the tokenizer of {tokenizer.folder}"
        says = f"{text!r} cannot be written {where}, but a verdict needs it; write"
        if names:
            raise ConfigError(f"together: {says} each.", key=f"{key}.judging.asks")
        other = "choices of other words" if genrm.verdict.choices else "another json_schema"
        raise ConfigError(f"{says} {other}, or a pattern.", key=f"{key}.verdict")


def check_teacher(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Checks that a teacher reads the policy's token ids, and has as many likeliest ones as wanted.

    Raises:
        ConfigError: its tokenizer has other tokens, or prompts have pictures; or `top_k` leaves no others.
    """
    if config.data.media_store:
        says = "a teacher is shown no pictures, and prompts have some; remove it."
        raise ConfigError(says, key=f"{key}.kind")
    if not _same_tokenizer(config.model.path, genrm.model) and not _same_tokens(
        config.model.path, genrm.model
    ):
        raise ConfigError(
            f"{genrm.model} has another tokenizer than {config.model.path}, so its log-probs would be of "
            "other tokens; name a teacher of the policy's family.",
            key=f"{key}.model",
            missing=next(filter(None, map(_missing_tokenizer, (genrm.model, config.model.path))), ""),
        )
    for folder in (genrm.model, config.model.path) if genrm.top_k else ():
        values = read_config(folder)
        text = values.get("text_config", values)
        size = text.get("vocab_size") if isinstance(text, dict) else None
        if type(size) is int and 0 < size <= genrm.top_k:
            raise ConfigError(
                f"{genrm.top_k} of {size} tokens of {folder} leaves none for the others; write {size - 1} "
                "or less.",
                key=f"{key}.top_k",
            )


def _missing_tokenizer(folder: str) -> str:
    """Returns the path of a folder's tokenizer if it is not there; else an empty text."""
    path = Path(folder) / TOKENIZER
    return "" if path.is_file() else str(path)


def refuse_turned_experts(folder: str, key: str) -> None:
    """Refuses a folder whose weights an engine could not load, where no trainer publishes others.

    Raises:
        ConfigError: its experts are the other way round than released.
    """
    if has_turned_experts(folder):
        raise ConfigError(
            f"{folder} has experts the other way round than released, which vLLM cannot load. Write it as "
            "released: `yatt convert` to a checkpoint (--to-checkpoint URL), and that to a folder.",
            key=key,
        )


def refuse_some_windows(folder: str, section: str, engine: str, own: Family | None = None) -> None:
    """Refuses a model whose windows vLLM would leave out, or give to all layers.

    Args:
        section: of the config, with the key `engine`.
        own: a family of the user.

    Raises:
        ConfigError: some layers have a window, and the engine may be vLLM.
    """
    if engine in ("auto", "vllm") and has_some_windows(folder, own):
        raise ConfigError(
            f"{folder} has windows in some layers (config.json: sliding_window), and vLLM has the same in "
            "all layers of this model type; write transformers.",
            key=f"{section}.engine",
        )


def check_engine_model(folder: str, key: str, engine: str, tp_size: int) -> None:
    """Checks the folder of a model that an engine samples.

    Args:
        key: section of the config that names it: `genrms[0]`, `model`.

    Raises:
        ConfigError: as in `check_judge_folder`.
    """
    is_policy = key == "model"
    place = f"{key}.path" if is_policy else f"{key}.model"
    tp_key = "rollout.tp_size" if is_policy else f"{key}.tp_size"
    values = check_model(folder, place, has_weights=engine != "scripted")
    if engine == "scripted":
        return  # has no weights
    refuse_some_windows(folder, "rollout" if is_policy else key, engine)
    text = values.get("text_config", values)
    sizes = text if isinstance(text, dict) else values
    places, faults = checked_tensors(folder, place)
    if not places and not faults:
        faults = ["has no tensor"]
    if faults:
        raise ConfigError(findings=[mistake_in(place, f"{folder} {fault}.") for fault in faults])
    heads = sizes.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp_size:
        says = f"{tp_size} does not divide the {heads} heads of {folder}; write a divisor."
        raise ConfigError(says, key=tp_key, has_colon=False)


def context_notes(
    config: RunConfig, genrm: GenRMSection, key: str, num_tokens: int, num_end: int = 0
) -> Iterator[str]:
    """Compares the longest question with the GenRM's context; yields notes.

    Args:
        num_tokens: length of the template and the chat template.
        num_end: length of `think.end`, if the GenRM thinks.

    Raises:
        ConfigError: the longest question does not fit, and it is counted exactly: the GenRM has the policy's
            tokenizer. Or no question leaves room for `think.budget`.
    """
    if not genrm.template:
        return
    _check_budget(genrm, f"{key}.think.budget", num_tokens, num_end)
    prompt = config.data.max_prompt_tokens if "{prompt}" in genrm.template else 0
    times = most_shown(genrm, config.rollout.n)
    longest = num_tokens + prompt + times * config.rollout.max_response_tokens
    limit, name = genrm.max_model_tokens, f"{times} * " if times > 1 else ""
    folder = config.judge_folder(genrm)
    parts = f"template with {folder} {num_tokens}" + (f" + data.max_prompt_tokens {prompt}" if prompt else "")
    parts += f" + {name}rollout.max_response_tokens {config.rollout.max_response_tokens}"
    if num_end:
        longest, parts = longest + num_end, f"{parts} + think.end {num_end}"
    if longest >= limit and _same_tokenizer(config.model.path, folder):
        raise ConfigError(
            f"the longest question has {longest} tokens ({parts}), and a verdict needs room, but the GenRM "
            f"takes {limit}. Raise max_model_tokens, or lower one of these.",
            key=f"{key}.max_model_tokens",
        )
    if genrm.think.budget and longest + genrm.think.budget + genrm.max_tokens > limit:
        yield (
            f"{key}.max_model_tokens: a question of {longest} tokens ({parts}) and a verdict of "
            f"{key}.max_tokens {genrm.max_tokens} leave less than {key}.think.budget {genrm.think.budget} of "
            f"{limit} tokens: the thought about it is shorter, or there is none."
        )
    if longest + genrm.max_tokens > limit:
        yield (
            f"{key}.max_model_tokens: a question of {longest} tokens ({parts}) leaves less than "
            f"{key}.max_tokens {genrm.max_tokens} of {limit} tokens for the verdict, which may be cut."
        )


def _check_budget(genrm: GenRMSection, key: str, num_tokens: int, num_end: int) -> None:
    """Refuses a budget for which even the shortest question leaves no room.

    Raises:
        ConfigError: it is so.
    """
    budget, limit = genrm.think.budget, genrm.max_model_tokens
    room = limit - num_tokens - num_end - genrm.max_tokens
    if budget <= room or not budget:
        return
    cure = f"Write {room} or less" if room > 0 else "Lower max_tokens"
    raise ConfigError(
        f"{budget} never has room: the shortest question has {num_tokens} tokens, think.end {num_end}, a "
        f"verdict {genrm.max_tokens} (max_tokens), and the GenRM takes {limit} (max_model_tokens). {cure}, "
        "or raise max_model_tokens.",
        key=key,
    )


def _same_tokens(policy: str, teacher: str) -> bool:
    """Whether the same texts have the same ids, although the files differ."""
    found = []
    for folder in (policy, teacher):
        try:
            content = json.loads(read_plain(Path(folder) / TOKENIZER, MOST_BYTES) or b"")
            added = {token["id"]: token["content"] for token in content["added_tokens"]}
            found.append((content["model"]["vocab"], content["model"].get("merges"), added))
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
    return bool(found[0] == found[1])


def _same_tokenizer(policy: str, judge: str) -> bool:
    own, its = (read_plain(Path(folder) / TOKENIZER, MOST_BYTES) for folder in (policy, judge))
    return own == its
