"""A model folder's shape and weight table, read by its family."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt.errors import ConfigError, Finding
from yatt.models.config_types import MODEL_KEY, refused_model
from yatt.models.families import FAMILIES, Family
from yatt.models.rows import EMBEDDING, OUTPUT, SCORE, Part, WeightRow
from yatt.models.shape import Shape
from yatt.plain_files import read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the trainer needs to know of a model."""

    shape: Shape
    rows: tuple[WeightRow, ...]

    @property
    def has_value_head(self) -> bool:
        """Whether it gives a value for each token in place of logits."""
        return self.rows[-1].hf_names == (SCORE,)


def with_value_head(model: Model) -> Model:
    """The same model with a value head in place of its output matrix, or beside tied embeddings."""
    part = Part(SCORE, 1)
    head = WeightRow(name=OUTPUT, parts=(part,), width=model.shape.hidden_size)
    rows = (*(row for row in model.rows if row.name != OUTPUT), head)
    return Model(shape=replace(model.shape, is_tied=False), rows=rows)


def read_model(folder: str, own: Family | None = None) -> Model:
    """The model in a Hugging Face folder. Reads its config.json without transformers, so that the launcher
    refuses a model before anything is started, with the same rules as the trainer.

    Args:
        own: a family of the user, for its model type.

    Raises:
        ConfigError: no config.json, or an architecture or feature that is not supported.
    """
    values = read_config(folder)
    try:
        return model_of(values, own)
    except ConfigError as error:
        raise error.with_each(partial(_in_folder, Path(folder))) from error


def _in_folder(folder: Path, found: Finding) -> Finding:
    """The mistake with the folder, which readers of a config.json do not know."""
    if found.key != MODEL_KEY:
        return found
    return replace(found, file=str(folder / found.file))


def read_config(folder: str) -> dict[str, Any]:
    """Reads a Hugging Face folder's config.json.

    Raises:
        ConfigError: it is missing, or is not one JSON object.
    """
    try:
        found = read_json_object(Path(folder) / "config.json")
    except ConfigError as error:
        raise error.about(MODEL_KEY) from error.__cause__
    if found is None:
        says = f"{folder} has no config.json; name a Hugging Face model folder."
        raise ConfigError(says, key=MODEL_KEY, missing=folder)
    return found


def model_of(config: Any, own: Family | None = None) -> Model:
    """The model in a config: the content of a config.json, or a `transformers` config object.

    Raises:
        ConfigError: an architecture or feature that is not supported, or a family's table is wrong.
    """
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    family = family_of(values.get("model_type"), own)
    shape: object = family.read(values)
    if not isinstance(shape, Shape):
        says = f"{family.model_type}: read gives {type(shape).__name__}, not Shape."
        raise ConfigError(says, key="model.family")
    rows = tuple(family.rows(shape))
    check_parameter_rows(family, rows)
    return Model(shape=shape, rows=rows)


def family_of(model_type: object, own: Family | None = None) -> Family:
    """The family of a model type.

    Raises:
        ConfigError: there is none.
    """
    known = FAMILIES | ({own.model_type: own} if own else {})
    if not isinstance(model_type, str) or model_type not in known:
        raise refused_model(
            f"architecture {model_type!r} is not supported; use one of {', '.join(known)}, or write a "
            "family of your own (model.family, docs/extending.md)."
        )
    return known[model_type]


def check_parameter_rows(family: Family, rows: tuple[WeightRow, ...]) -> None:
    """Refuses a table that cannot be right.

    Raises:
        ConfigError: it names a parameter twice, uses a tensor in two rows, or has no embedding.
    """
    names = [row.name for row in rows]
    tensors = [name for row in rows for name in row.hf_names]
    for what, found in (("parameter", names), ("tensor", tensors)):
        if twice := [name for name, count in Counter(found).items() if count > 1]:
            says = f"{family.model_type}: two rows have the {what} {twice[0]}."
            raise ConfigError(says, key="model.family")
    _check_stacks(family, rows)
    if EMBEDDING not in names:
        raise ConfigError(f"{family.model_type}: no row is {EMBEDDING}.", key="model.family")
    for row in rows:
        if row.groups < 1 or any(part.num_rows < 1 or part.num_rows % row.groups for part in row.parts):
            says = f"{family.model_type}: the parts of {row.name} do not divide into {row.groups} groups."
            raise ConfigError(says, key="model.family")


def _check_stacks(family: Family, rows: tuple[WeightRow, ...]) -> None:
    """Refuses tensors of files that would never be complete, or whose blocks differ."""
    stacks: dict[str, list[WeightRow]] = {}
    for row in rows:
        if row.stacked:
            stacks.setdefault(row.stacked.name, []).append(row)
    names = {name for row in rows for name in row.hf_names}
    for name, found in stacks.items():
        count, first = found[0].stacked.count if found[0].stacked else 0, found[0]
        places = sorted((row.stacked.index, row.stacked.count) for row in found if row.stacked)
        is_even = {(row.full_shape, row.groups, row.tail) for row in found} == {(first.full_shape, 1, ())}
        if (
            places != [(index, count) for index in range(count)]
            or not is_even
            or name in names
            or not first.width
        ):
            raise ConfigError(
                f"{family.model_type}: the rows of {name} need to be its blocks, each once, matrices of one "
                "shape in one group.",
                key="model.family",
            )
