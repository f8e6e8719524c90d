"""Compares an engine's weights with the published ones, by a checksum per tensor from both sides.

Engines fuse some weights (q, k and v into one, gate and up into one) by concatenating their rows, so each
part is compared separately. Weights that an engine has sliced for its tensor-parallel rank or repacked for
its kernels cannot be compared here; the sync probe's log-probs check them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from yatt.engine.protocol import Comparison
from yatt.engine.weights.published import Publication, note_tensor
from yatt.errors import WorkerFailed
from yatt.weights.checksum import dtype_name, tensor_checksum
from yatt.weights.published import PublishedWeights

MAX_NAMED = 8
FUSED = {
    ".q_proj.": ".qkv_proj.",
    ".k_proj.": ".qkv_proj.",
    ".v_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.",
    ".up_proj.": ".gate_up_proj.",
}
"""Part of a Hugging Face name to part of the fused name, in the order of the parts' rows."""

NameInEngine = Callable[[str], str | None]
"""Returns an engine's name of a tensor by its Hugging Face name, before any are fused; None: it has none."""


def compare_weights(
    held: Iterable[tuple[str, Tensor]], published: Mapping[str, str], name_of: NameInEngine = str
) -> Comparison:
    """Compares parameters with the engine's names to checksums with Hugging Face names, where one is known.

    Args:
        published: as `yatt.weights.checksum.described_sum`, by name; tensors without a known one too.
    """
    by_place = _by_place(published, name_of)
    differing, num_compared, num_readable = [], 0, 0
    for place, tensor in held:
        for name, part in _parts(tensor, by_place.get(place, []), published):
            num_readable += 1
            if published[name].endswith("/"):
                continue
            num_compared += 1
            note_tensor()
            if tensor_checksum(part) != published[name]:
                differing.append(name)
    return Comparison(
        differing=tuple(differing[:MAX_NAMED]), num_compared=num_compared, num_readable=num_readable
    )


def with_progress(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the same tensors, and counts each as progress."""
    for item in tensors:
        note_tensor()
        yield item


def published_checksums(publication: Publication) -> dict[str, str]:
    """Returns `yatt.weights.checksum.described_sum` of each published tensor, by name.

    Raises:
        WorkerFailed: the weights are not there in this version.
    """
    weights = PublishedWeights(publication.stems, publication.stamp, part=publication.part)
    return weights.checksums(publication.sums)


def check_published(weights: PublishedWeights, sums: dict[str, int]) -> None:
    """Checks, after weights were read, that all that was read is of the published version.

    Raises:
        WorkerFailed: the host copy has changed, or a tensor is not what the trainer has.
    """
    weights.check()
    if wrong := weights.damaged(sums):
        raise WorkerFailed(
            f"of {len(sums)} published tensors these are not here as they are at the trainer: "
            f"{', '.join(wrong[:MAX_NAMED])}; they were damaged, or belong to another version"
        )
    weights.check()


def _by_place(published: Mapping[str, str], name_of: NameInEngine) -> dict[str, list[str]]:
    """Maps each engine name to the published weights that it may hold; parts of a fused weight in order."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    order = {part: index for index, part in enumerate(FUSED)}
    for name in sorted(published, key=lambda name: next((order[part] for part in FUSED if part in name), 0)):
        if (place := name_of(name)) is None:
            continue
        places[place].append(name)
        part = next((part for part in FUSED if part in place), None)
        if part is not None:
            places[place.replace(part, FUSED[part])].append(name)
    return places


def _parts(tensor: Tensor, names: list[str], published: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields each named weight's rows of `tensor`; nothing if dtype or shape differ from the published."""
    start, parts = 0, []
    for name in names:
        dtype, shape = _described(published[name])
        if not shape or dtype != dtype_name(tensor) or shape[1:] != tuple(tensor.shape[1:]):
            return
        parts.append((name, tensor[start : start + shape[0]]))
        start += shape[0]
    is_padded_vocabulary = len(names) == 1 and 0 < start < len(tensor)
    if names and (start == len(tensor) or is_padded_vocabulary):
        yield from parts


def _described(published: str) -> tuple[str, tuple[int, ...]]:
    dtype, shape, _ = published.split("/")
    return dtype, tuple(int(size) for size in shape.split("x") if size)
