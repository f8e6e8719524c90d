"""The run file's section about prompts. The other sections and the complete config are in
`yatt.config.schema`."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

from yatt.config.sections.given import RowForm
from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import COUNT, FILE, LINE, OPERATIONAL, range_between


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Prompts: verl's parquet and JSONL unchanged, or any JSONL by naming its columns."""

    train_files: Annotated[tuple[Annotated[str, FILE], ...], OPERATIONAL]
    """JSONL or parquet files, patterns of them (`data/*.jsonl`), or data sets of the Hugging Face hub:
    `hf:REPOSITORY[@REVISION][:CONFIG]:SPLIT`, fetched when the run is started."""

    val_files: Annotated[tuple[Annotated[str, FILE], ...], OPERATIONAL] = ()
    """Held-out rows, as train_files: prompts, scored by `validation`, or completions, for their loss."""

    weights: dict[str, Annotated[float, range_between(0, 1000)]] = field(default_factory=dict)
    """Weight of an entry of train_files; 1 if not written. With 2, a data epoch has each of its rows twice;
    with 0.25, a quarter of them, another one each time."""

    map: Annotated[str, FILE] = ""
    """Python file with a function over rows, applied once when the run is started, before all else:
    `map_row(row)` returns a row, a list of rows, or None to leave it out."""

    map_function: Annotated[str, LINE] = "map_row"
    """Name of the function in that file."""

    prompt_key: Annotated[str, LINE] = "prompt"
    """Column of the prompt: text, or a list of chat messages."""

    form: RowForm = "prompts"
    """What rows have beside the prompt; filled in by run.kind. completions: `completion`, or `messages` of
    which every turn of the assistant is trained on. pairs: `chosen` and `rejected`, with the prompt in its
    column or at the beginning of both. groups: of `yatt judge`."""

    ground_truth_key: Annotated[str, LINE] = "reward_model.ground_truth"
    """Column of the reference answer, of any type; dots select keys of nested objects. Empty: there is none.

    If a reward function or a template needs it and no row has it, the run is refused."""

    data_source_key: Annotated[str, LINE] = "data_source"
    """Column that names the source of a row; passed to reward functions."""

    default_data_source: Annotated[str, LINE] = "default"
    """Data source of rows without that column."""

    apply_chat_template: bool = True
    """Render chat messages by the model's template. A plain text prompt is used unchanged."""

    template_time: Annotated[str, LINE] = ""
    """The current time for chat templates that use the date, as 2026-01-31T12:00:00; filled in when the run
    is created, so that prompts do not change at midnight. Empty in older runs: the system clock."""

    image_key: Annotated[str, LINE] = "images"
    """Column of a prompt's pictures, for models that take some: a list of paths below `media_root`, of bytes,
    or of objects with `path` or `bytes`, as in verl's files. `<image>` stands in the prompt where each
    belongs."""

    video_key: Annotated[str, LINE] = "videos"
    """Column of a prompt's videos, for Qwen3-VL: paths below `media_root` of files (MP4, WebM, Matroska),
    lists of frames, or objects with `path`, `bytes` or `video`, as in verl's files. `<video>` stands in the
    prompt where each belongs."""

    media_root: Annotated[str, FILE, OPERATIONAL] = ""
    """Folder of the files that rows name, on every node. Rows cannot name others, nor addresses."""

    media_store: Annotated[str, FILE, OPERATIONAL] = ""
    """Folder of the pictures whose bytes were in data files, filled in at the start; empty: no pictures."""

    allow_special_tokens: bool = False
    """Parse the model's control tokens in plain text prompts (for prompts rendered beforehand). Otherwise
    they are ordinary text. The contents of chat messages never become control tokens."""

    max_prompt_tokens: Annotated[int, COUNT] = 1024
    """Maximum prompt length in tokens; longer prompts are skipped and counted."""

    shuffle: bool = True
    """Shuffle the prompts in each data epoch, with the seed (seed, data epoch)."""

    def __post_init__(self) -> None:
        rule(len(self.train_files) >= 1, "train_files is empty; write at least one file.")
        for name in self.weights:
            says = f"weights: {name!r} is no entry of train_files; write it as it is there. "
            rule(name in self.train_files, says + "data.weights={} takes back what was written before.")
        for key, name in (("image_key", self.image_key), ("video_key", self.video_key)):
            is_plain = name and not set('."\\') & set(name)
            rule(bool(is_plain), f"{key} is {name!r}; name a column at the top, without dots and quotes.")
        weights = [self.weights.get(name, 1.0) for name in self.train_files]
        rule(any(weights), "weights: all are 0; leave one above 0.")
        rule(
            _is_time(self.template_time or "2026-01-31"),
            f"template_time {self.template_time!r} is not a time; write it as 2026-01-31T12:00:00.",
        )


def _is_time(text: str) -> bool:
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False
