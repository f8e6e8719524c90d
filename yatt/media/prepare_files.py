"""Prepares the pictures of data files for `yatt sft`: ``python -m yatt.media.prepare_files``, under watch.

Rows have references (`yatt.launch.resolve.making_media`). Prepared files stay in a folder on disk, so that
the next training finds them.
"""

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import write_atomically
from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.media import media_of
from yatt.adapters.node_local.prepared_media import INDEX
from yatt.adapters.processes.watched_trial import Stages, answer_watched
from yatt.config.load import load_as
from yatt.config.sections.sft import VIDEOS, SftConfig, sft_rules
from yatt.errors import ConfigError
from yatt.media.fetch import MediaSources
from yatt.media.kept import KeptFiles
from yatt.media.making import PictureMaker
from yatt.media.prepare import load_preparation
from yatt.media.videos import load_video_preparation
from yatt.records.media import MediaFault, MediaItem, PreparedItem, facts_of_video

MOST_BYTES = 1 << 50
"""Of all files together: no limit, since they are on disk."""

SHOWN_FAULTS = 3
ORDER = 1


def prepare_files(stages: Stages, file: str, folder: str) -> tuple[list[ConfigError], list[str]]:
    """Prepares every picture of the data files of an SFT file; returns mistakes and notes.

    Args:
        folder: gets the prepared files, and an index of them by the digest of the picture's own file.

    Raises:
        ConfigError: a data file or the model's processor cannot be used.
    """
    config = load_as(SftConfig, [Path(file)], [], sft_rules)
    media = config.media
    preparation = load_preparation(Path(config.start), media.min_pixels, media.max_pixels)
    sources = MediaSources(config.media_root, config.media_store, media.storage_options, media.timeout_s)
    files = KeptFiles(Path(folder), MOST_BYTES)
    maker = PictureMaker(sources, {"": preparation}, files, media.most_pixels, stages.tick)
    video = media.video
    maker.videos = partial(
        load_video_preparation, config.start, video.fps, video.max_frames, video.min_pixels, video.max_pixels
    )
    found, faults = dict[str, str](), list[MediaFault]()
    items = _pictures(config, stages.tick)
    what = f"preparing the pictures of {', '.join(filter(None, _data_files(config)))}"
    with (
        stages.doing(what, media.timeout_s),
        files.order(ORDER),
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        for item, made in zip(items, pool.map(partial(_made, maker), items), strict=True):
            stages.tick()
            if isinstance(made, MediaFault):
                faults.append(made)
            else:
                found[item.sha256] = made.digest
    if faults:
        shown = "\n  ".join(fault.error for fault in faults[:SHOWN_FAULTS])
        mistake = ConfigError(f"{len(faults)} pictures cannot be used, the first ones:\n  {shown}")
        if all(fault.waits for fault in faults):  # no mistake of the user: the same may succeed later
            mistake.__cause__ = OSError(errno.EHOSTUNREACH, shown)
        return [mistake], []
    write_atomically(Path(folder, INDEX), json.dumps(found).encode())
    return [], []


def _made(maker: PictureMaker, item: MediaItem) -> PreparedItem | MediaFault:
    return maker.make_item(ORDER, 0, item)


def _data_files(config: SftConfig) -> tuple[str, ...]:
    return config.train_file, config.validation.file


def _pictures(config: SftConfig, tick: Callable[[], None]) -> list[MediaItem]:
    """The pictures of all rows, each once."""
    found = dict[MediaItem, None]()
    for path in filter(None, _data_files(config)):
        for raw, place in raw_rows(Path(path)):
            refs = media_of(raw.get(config.image_key), place)
            refs += media_of(raw.get(VIDEOS), place, are_videos=True)
            found.update((MediaItem(ref.path, ref.sha256, video=facts_of_video(ref)), None) for ref in refs)
            tick()
    return list(found)


if __name__ == "__main__":
    answer_watched(prepare_files)
