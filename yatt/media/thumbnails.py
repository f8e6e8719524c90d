"""Makes small pictures of recorded samples for a page: ``python -m yatt.media.thumbnails``, under watch.

A picture is read as the media process reads it, with the same limits, and what goes into the page is a file
of our own. A fault belongs to the picture. One that ends this process leaves the page without pictures.
"""

import base64
import json
import re
import time

from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts, refuse_pixels
from yatt.adapters.processes.watched_trial import Stages, answer_watched
from yatt.config.load import parse_resolved
from yatt.errors import ConfigError, YattError, error_line
from yatt.media.decode import decode_picture
from yatt.media.encoding import PictureEncoding
from yatt.media.fetch import MediaSources
from yatt.printable import printable
from yatt.records.media import MediaItem, media_name

SIDE, MOST_BYTES = 96, 16 << 10
PICTURE_S, ALL_S = 10.0, 30.0
"""Longest time for one picture; time after which no other one is begun."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def make_thumbnails(stages: Stages, text: str, names: list[str]) -> tuple[list[ConfigError], list[str]]:
    """Makes a small picture for each name; returns [base64 of a JPEG file, why there is none] of each, one of
    them empty, as JSON.

    Args:
        text: the run's config.
        names: paths below `data.media_root`, or digests of files in `data.media_store`.
    """
    config = parse_resolved(text)
    data, media = config.data, config.media
    sources = MediaSources(data.media_root, data.media_store, media.storage_options, PICTURE_S)
    encoding, until_s = PictureEncoding(SIDE * SIDE, MOST_BYTES, SIDE), time.monotonic() + ALL_S
    found = list[str]()
    for name in names:
        item = MediaItem("", name) if _DIGEST.fullmatch(name) else MediaItem(name)
        if time.monotonic() > until_s:
            found.append(json.dumps(["", f"there was no time left after {ALL_S:g} s"]))
            continue
        with stages.doing(f"making a small picture of {media_name(item)}", PICTURE_S):
            found.append(json.dumps(_made(sources, encoding, media.most_pixels, item)))
    return [], found


def _made(sources: MediaSources, encoding: PictureEncoding, most_pixels: int, item: MediaItem) -> list[str]:
    try:
        with sources.opened_source(item) as source:
            refuse_pixels(head_by_parts(source.read_at), most_pixels)
            content = source.content(item.sha256 or source.content_digest())
        _, file = encoding.patches_of(decode_picture(content, most_pixels))
        return [base64.b64encode(file.tobytes()).decode(), ""]
    except MediaRefused as error:
        return ["", str(error)]
    except (OSError, YattError) as error:
        says = getattr(error, "strerror", None) or printable(str(error))
        return ["", f"cannot be read: {says}"]
    except Exception as error:  # noqa: BLE001 (the libraries may raise anything for such files)
        return ["", f"cannot be shown: {printable(error_line(error))}"]


if __name__ == "__main__":
    answer_watched(make_thumbnails)
