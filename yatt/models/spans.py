"""Where the rows of Hugging Face tensors are in a megatron-core parameter, as numbers.

For code that moves bytes without tensors; `yatt.weights.convert.fuse_tensors` does the same with tensors.
"""

from dataclasses import dataclass, replace

from yatt.models.rows import WeightRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Consecutive rows of a parameter that are consecutive rows of one Hugging Face tensor.

    Args:
        name: of the Hugging Face tensor.
        block: of a tensor [blocks, columns, rows], in which they are consecutive columns; None: of two
            dimensions at most.
        first: row of that tensor.
        begin: row of the parameter.
    """

    name: str
    first: int
    begin: int
    num_rows: int
    block: int | None = None

    @property
    def end(self) -> int:
        """Row of the parameter after the last one."""
        return self.begin + self.num_rows


def row_spans(row: WeightRow) -> list[RowSpan]:
    """Returns the spans of a parameter in tensors as engines read them, in the order of its rows; together
    they are all of its rows."""
    firsts, taken = [], dict.fromkeys(row.hf_names, 0)
    for part in row.parts:
        firsts.append(taken[part.name])
        taken[part.name] += part.num_rows
    spans, begin = [], 0
    for group in range(row.groups):
        for part, first in zip(row.parts, firsts, strict=True):
            height = part.num_rows // row.groups
            spans.append(RowSpan(name=part.name, first=first + group * height, begin=begin, num_rows=height))
            begin += height
    return spans


def file_spans(row: WeightRow) -> list[RowSpan]:
    """Returns the spans of a parameter in the tensors of a folder's files."""
    if (own := row.stacked) is None:
        return row_spans(row)
    return [RowSpan(name=own.name, first=0, begin=0, num_rows=row.num_rows, block=own.index)]


def spans_within(spans: list[RowSpan], begin: int, end: int) -> list[RowSpan]:
    """Returns the parts of the spans that are in the rows [begin, end) of the parameter."""
    found = []
    for span in spans:
        low, high = max(begin, span.begin), min(end, span.end)
        if low < high:
            first = span.first + low - span.begin
            found.append(replace(span, first=first, begin=low, num_rows=high - low))
    return found
