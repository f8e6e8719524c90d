"""The pictures of a request: prepared files of this node, which an engine maps."""

import itertools
from pathlib import Path

from yatt.adapters.node_local.prepared_media import PreparedMedia, open_prepared, parts_of_prepared
from yatt.engine.protocol import EngineOptions
from yatt.errors import WorkerFailed
from yatt.records.message import PlacedMedia, SampleRequest


def prepared_pictures(sample: SampleRequest, options: EngineOptions) -> list[PreparedMedia]:
    """Maps the prepared files of a request's pictures, in their order.

    Raises:
        WorkerFailed: one is not there, or is not what the request says: the request is to be sent again.
    """
    return [prepared_picture(each, options) for each in sample.media]


def prepared_picture(media: PlacedMedia, options: EngineOptions) -> PreparedMedia:
    """Maps the prepared file of one picture; of a video, the pair of frames that this is.

    Raises:
        WorkerFailed: as `prepared_pictures`.
    """
    try:
        found = open_prepared(Path(options.media_folder), media.prepared)
    except (OSError, ValueError) as error:
        raise WorkerFailed(f"a prepared picture cannot be read: {error}") from error
    if found.grid != media.file_grid:
        raise WorkerFailed(
            f"the prepared picture {media.prepared} has the grid {found.grid}, not {media.file_grid}"
        )
    return next(itertools.islice(parts_of_prepared(found), media.part, None))


def refuse_media(sample: SampleRequest) -> None:
    """Refuses a request with pictures.

    Raises:
        ValueError: it has some.
    """
    if sample.media:
        raise ValueError("yatt's engines take no pictures yet, but the prompt has some")
