"""Compares the tensors of a model folder with a weight table, before anything is started."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from yatt.models.model import Model
from yatt.models.rows import WeightRow

UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that older transformers saved and that are computed from the config."""

TIED_OUTPUT = frozenset({"lm_head.weight", "language_model.lm_head.weight"})
MAX_NAMED = 3


def tensor_faults(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields what is wrong with a folder whose tensors have these shapes.

    Tensors that no row uses are refused: they would be neither trained nor published. Exceptions are
    `UNUSED_SUFFIXES`, the output matrix if it is tied to the embedding, and the layers after the last one if
    config.json says how many there are (multi-token prediction).
    """
    wanted = file_shapes(model.rows)
    if missing := [name for name in wanted if name not in shapes]:
        yield f"has no tensor {_some(missing)}; its config.json promises them"
    turned = {row.stacked.name: turned_shape(row) for row in model.rows if row.stacked}
    other = [
        name for name, shape in wanted.items() if shapes.get(name, shape) not in (shape, turned.get(name))
    ]
    if other:
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        first = f"{other[0]} with shape {shapes[other[0]]}; its config.json promises {wanted[other[0]]}"
        yield f"has the tensor {first}{more}"
    known = wanted.keys() | (TIED_OUTPUT if model.shape.is_tied else set[str]())
    past = model.shape.num_layers
    extra = {f"model.layers.{past + number}." for number in range(model.shape.num_extra_layers)}
    others = [name for name in shapes if name not in known and not name.endswith(UNUSED_SUFFIXES)]
    if unused := [name for name in others if ".".join(name.split(".")[:3]) + "." not in extra]:
        yield f"has tensors that the weight table does not use: {_some(sorted(unused))}"


def file_shapes(rows: Iterable[WeightRow]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a folder of these rows has, by name."""
    found = dict[str, tuple[int, ...]]()
    for row in rows:
        own = row.stacked
        found |= {own.name: (own.count, row.width, row.num_rows)} if own else hf_shapes(row)
    return found


def turned_shape(row: WeightRow) -> tuple[int, int, int]:
    """Shape of the tensor that has a stacked row in files that transformers has saved."""
    assert row.stacked is not None, "a stacked row"
    return row.stacked.count, row.num_rows, row.width


def hf_shapes(row: WeightRow) -> dict[str, tuple[int, ...]]:
    """Shapes of the row's Hugging Face tensors as engines read them, by name."""
    rows = dict.fromkeys(row.hf_names, 0)
    for part in row.parts:
        rows[part.name] += part.num_rows
    tail = row.tail or ((row.width,) if row.width else ())
    return {name: (num_rows, *tail) for name, num_rows in rows.items()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
