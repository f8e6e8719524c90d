"""The files of a request. Controllers send references; an engine reads the bytes when it needs them."""

from functools import lru_cache, partial

from yatt.adapters.media import read_media
from yatt.adapters.patience import patiently
from yatt.engine.protocol import EngineOptions
from yatt.records.message import MediaRef, Sample


def request_media(sample: Sample, options: EngineOptions) -> list[bytes]:
    """Contents of the request's files. A folder that fails for a while is waited for.

    Raises:
        ValueError: a file cannot be used; only this request fails.
    """
    try:
        return [_content(options.media_root, ref) for ref in sample.media]
    except OSError as error:
        raise ValueError(f"a file of data.media_root cannot be read: {error}") from error


@lru_cache(maxsize=2)
def _content(root: str, ref: MediaRef) -> bytes:
    """A file's bytes; the samples of a group come one after another and share them."""
    return patiently(partial(read_media, root, ref))


def refuse_media(sample: Sample) -> None:
    """Refuses a request with files, for engines of text models.

    Raises:
        ValueError: it has some.
    """
    if sample.media:
        raise ValueError("this model takes text only, but the prompt has images or other files")
