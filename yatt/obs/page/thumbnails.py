"""Small pictures beside samples: which are wanted, and how they are drawn. Another process makes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from yatt.adapters.files.lines import Record
from yatt.obs.page.page_file import render_part
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

    def drawn(self, sample: Record) -> Markup:
        """Returns a sample's small pictures as HTML, and the names of all; empty if it has none."""
        names = picture_list(sample)
        if not names:
            return Markup()
        shown = names[: self._left]
        self._left -= len(shown)
        made = [(name, self._made[name]) for name in shown if name in self._made]
        small = [(name, Markup.escape(each.data), each.fault) for name, each in made]  # not truncated
        return render_part("pictures", names, small)
