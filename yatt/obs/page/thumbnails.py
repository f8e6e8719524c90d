"""Small pictures beside samples: which are wanted, and how they are drawn. Another process makes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from yatt.adapters.files.lines import Record
from yatt.obs.page.parts import as_html
from yatt.obs.samples import picture_list

MOST_THUMBNAILS = 64
"""Small pictures of a page."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """One small picture. `data`: a JPEG file in base64; empty: there is none, and `fault` says why."""

    data: str
    fault: str = ""


MakeThumbnails = Callable[[Sequence[str]], Mapping[str, Thumbnail]]
"""Makes them for pictures by their names in samples; what it leaves out is not drawn."""


class Thumbnails:
    """The small pictures of a page, in the order in which they are drawn.

    Args:
        samples: those of the page, in its order: the first ones' pictures are made.
    """

    def __init__(self, samples: Sequence[Record], make: MakeThumbnails | None) -> None:
        names = [name for sample in samples for name in picture_list(sample)][:MOST_THUMBNAILS]
        self._left = MOST_THUMBNAILS
        self._made = make(list(dict.fromkeys(names))) if make is not None and names else {}

    def drawn(self, sample: Record) -> str:
        """Returns a sample's small pictures as HTML, and the names of all; empty if it has none."""
        names = picture_list(sample)
        if not names:
            return ""
        shown = names[: self._left]
        self._left -= len(shown)
        drawn = "".join(_drawn(name, self._made[name]) for name in shown if name in self._made)
        small = f'<div class="thumbs">{drawn}</div>' if drawn else ""
        return f'<div class="label">pictures</div>{small}<pre>{as_html(", ".join(names))}</pre>'


def _drawn(name: str, thumbnail: Thumbnail) -> str:
    if thumbnail.data:
        return f'<img alt="{as_html(name)}" src="data:image/jpeg;base64,{escape(thumbnail.data)}">'
    return f'<span class="thumb" title="{as_html(name)}">{as_html(thumbnail.fault)}</span>'
