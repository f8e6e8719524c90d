"""`yatt show RUN ITERATION [SAMPLE]`: what the run knows about its samples.

The text of a sample is data. Everything that is printed is escaped, so it cannot affect the terminal.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from yatt.adapters.files.lines import Record, is_number
from yatt.adapters.run_folder.run_config import load_run
from yatt.cli.commands.look import open_view
from yatt.config.sections.operation import LoggingSection
from yatt.errors import ConfigError
from yatt.obs.rollouts import RecordedIteration, iterations_of, read_iteration, strict_value
from yatt.obs.samples import COMPLETION, judge_said, pictures_in_words, spoken_turns
from yatt.paths import RunPaths
from yatt.printable import printable

NARROW, WIDE = 60, 100
MOST_SCORES = 3
INDENT = "  "


def show(run: Path, iteration: int, sample: int | None, *, as_json: bool) -> int:
    """Prints the table of an iteration's samples, or one sample.

    Raises:
        ConfigError: it is not a run folder, or the iteration or the sample is not recorded.
    """
    paths = open_view(run).paths
    found = read_iteration(paths, iteration, sample)
    if found is None:
        raise ConfigError(_not_recorded(paths, iteration))
    if sample is not None and not found.samples:
        cure = "" if found.is_whole else f" {CURE}"
        raise ConfigError(
            f"sample {sample} of iteration {iteration} is not recorded; `yatt show {run} {iteration}` lists "
            f"those that are.{cure}"
        )
    if as_json:
        print(json.dumps(strict_value(_as_json(found, sample)), allow_nan=False))
        return 0
    for line in _table(found) if sample is None else _one(found):
        sys.stdout.write(line + "\n")
    for line in _wrapped(_notes(found, load_run(paths).logging)):
        sys.stdout.write(line + "\n")
    return 0


CURE = "Write `logging: {rollouts: all}` in the run file to record every sample of later iterations."


def _not_recorded(paths: RunPaths, iteration: int) -> str:
    config, known = load_run(paths), list(iterations_of(paths.rollouts))
    section, view = config.logging, open_view(paths.root)
    view.refresh()
    newest = max(view.story.iteration, *known, 0)
    later = f": the run is at iteration {newest}" if iteration > newest else ""
    says = f"no sample of iteration {iteration} of {paths.root} is recorded{later}."
    if config.is_given:
        return f"{says} With run.kind: {config.run.kind} completions are rows of data.train_files."
    if section.rollouts != "all":
        return f"{says} {CURE}"
    have = f"{known[0]} to {known[-1]} are" if known else "no iteration is"
    return (
        f"{says} In {paths.rollouts} {have}: it is not trained on yet, was not written (event "
        f"rollouts.lost), or is older than logging.rollouts_keep, which is {section.rollouts_keep}."
    )


def _as_json(found: RecordedIteration, sample: int | None) -> Record:
    head = {
        "iteration": found.iteration,
        "attempt": found.attempt,
        "is_whole": found.is_whole,
        "unreadable_lines": found.num_unreadable,
        "missing_files": found.num_missing,
    }
    if sample is None:
        return {**head, "samples": found.samples}
    return {**head, "sample": found.samples[0], "judged": found.judged}


def _head(found: RecordedIteration) -> str:
    says = [f"iteration {found.iteration}"]
    says += [f"attempt {found.attempt}"] if found.attempt else []
    return ", ".join(says)


def _notes(found: RecordedIteration, section: LoggingSection) -> Iterable[str]:
    if not found.is_whole:
        lost = f"Its files were not written, or logging.rollouts_keep ({section.rollouts_keep}) removed them."
        yield f"Only some samples are recorded. {lost if section.rollouts == 'all' else CURE}"
    if found.num_missing:
        yield f"Files of {found.num_missing} trainer nodes are missing: see the events rollouts.lost."
    if found.num_unreadable:
        yield f"{found.num_unreadable} damaged lines were skipped."
    if found.num_replaced:
        yield f"Files of earlier attempts, whose work was lost, were left out: {found.num_replaced}."


# ---- the table ----------------------------------------------------------------------------------


def _table(found: RecordedIteration) -> Iterable[str]:
    names = sorted({name for each in found.samples for name in _mapping(each, "scores")})
    shown = names[:MOST_SCORES]
    head = ["sample", "group", "tokens", "finish", *map(printable, shown), "reward", "advantage", ""]
    rows = [_row(each, shown) for each in found.samples]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    yield f"{_head(found)}: {len(rows)} samples"
    yield _line(head, widths)
    groups = [each.get("group") for each in found.samples]
    for number, (each, row) in enumerate(zip(found.samples, rows, strict=True)):
        if number == 0 or groups[number] is None or groups[number] != groups[number - 1]:
            yield from _preview("prompt", each)
        yield _line(row, widths)
        yield from _preview("completion", each)
    if len(names) > len(shown):
        yield f"Other scores: {', '.join(map(printable, names[MOST_SCORES:]))} (see one sample, or --json)"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(w) if i == 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
    return " ".join([*cells[:-1], row[-1]]).rstrip()


def _preview(key: str, each: Record) -> Iterable[str]:
    """One line with the beginning and the end of a text, if it is recorded."""
    text = _mapping(each, "texts").get(key)
    if not isinstance(text, str):
        return
    first = "" if key == "prompt" else INDENT * 2
    room = _width() - len(first) - len(key) - 2
    line = printable(" ".join(text.split()))
    if len(line) > room:
        line = f"{line[: room // 2 - 3]} ... {line[-(room - room // 2 - 3) :]}"
    yield f"{first}{key}: {line}"


def _row(each: Record, names: Sequence[str]) -> list[str]:
    scores = _mapping(each, "scores")
    return [
        _text(each["sample"]),
        _text(each.get("group")),
        _text(each.get("num_tokens")),
        _text(each.get("finish_reason") or None)[:10],
        *(_number(scores.get(name)) for name in names),
        _number(each.get("reward")),
        _number(each.get("advantage")),
        " ".join(_marks(each)),
    ]


def _marks(each: Record) -> list[str]:
    """Returns words for what happened to a sample besides being trained on."""
    known = (
        ("dropped", each.get("dropped")),
        ("failed", each.get("failed")),
        ("masked", each.get("is_masked")),
        ("reused", each.get("is_carried")),
    )
    return [word for word, holds in known if holds]


# ---- one sample ---------------------------------------------------------------------------------


def _one(found: RecordedIteration) -> Iterable[str]:
    each = found.samples[0]
    yield f"{_head(found)}, sample {each['sample']}"
    yield from _facts(each)
    said = [(who if who == COMPLETION else f"turn of the {who}", text) for who, text in spoken_turns(each)]
    pictures = pictures_in_words(each) or None
    asked = ("prompt", each.get("prompt")), ("pictures", pictures)
    for title, text in (*asked, *said, ("ground truth", each.get("ground_truth"))):
        if text is not None:
            yield from _block(title, text)
    for judged in found.judged:
        yield from _judgement(judged)
    if not found.judged:
        for name, text in sorted(_mapping(each, "verdicts").items()):
            yield from _block(f"last {judge_said(name)} (its end)", text)
    yield ""


def _facts(each: Record) -> Iterable[str]:
    versions = each.get("policy_versions")
    spans = (
        [each for each in versions if isinstance(each, list) and each] if isinstance(versions, list) else []
    )
    facts = [
        ("state", _state(each)),
        ("prompt group", _and(each.get("group"), "data row", each.get("row"), each.get("data_source"))),
        ("tokens", _and(each.get("num_tokens"), "prompt", each.get("num_prompt_tokens"))),
        ("finish reason", each.get("finish_reason") or None),
        ("policy", ", ".join(f"version {_text(v[0])}: {_text(v[-1])} tokens" for v in spans) or None),
        ("reward", _number(each.get("reward"))),
        ("advantage", _number(each.get("advantage"))),
    ]
    facts += [(f"score {name}", _number(value)) for name, value in sorted(_mapping(each, "scores").items())]
    facts += [(f"number {name}", _number(value)) for name, value in sorted(_mapping(each, "extras").items())]
    facts += [(f"no score {name}", why) for name, why in sorted(_mapping(each, "unmeasured").items())]
    for name, value in facts:
        if value not in (None, "", "-"):
            yield from _wrapped([f"{printable(str(name)):15} {printable(str(value))}"], hanging=" " * 16)


def _state(each: Record) -> str:
    if each.get("failed"):
        return f"failed: {each['failed']}"
    if each.get("dropped"):
        return f"not trained on; its group was dropped: {each['dropped']}"
    if each.get("is_masked"):
        return "masked: only its reward is used, in its group's baseline"
    carried = "; it has tokens of an earlier iteration" if each.get("is_carried") else ""
    return f"trained on{carried}"


def _judgement(judged: Record) -> Iterable[str]:
    name, about = judged.get("genrm"), judged.get("samples")
    which = (
        f" about samples {', '.join(map(_text, about))}" if isinstance(about, list) and len(about) > 1 else ""
    )
    if not judged.get("is_readable"):
        verdict = "no readable verdict"
    elif judged.get("ranking") is not None:
        verdict = f"ranking {judged['ranking']}"
    else:
        values = [f"{key} {_number(value)}" for key, value in _mapping(judged, "values").items()]
        scores = [] if judged.get("score") is None else [f"score {_number(judged['score'])}"]
        verdict = ", ".join([*scores, *values]) or "no score"
    yield from _block(f"prompt of GenRM {name}{which}", judged.get("prompt"))
    if judged.get("thought") is not None:
        cut = " (cut)" if judged.get("is_thought_cut") else ""
        yield from _block(f"thought of GenRM {name} before its answer{cut}", judged["thought"])
    yield from _block(f"answer {_text(judged.get('tries'))} of GenRM {name}: {verdict}", judged.get("answer"))


def _block(title: str, value: Any) -> Iterable[str]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    yield ""
    yield from _wrapped([f"{printable(title)}:"])
    for line in text.split("\n"):
        yield from _wrapped([printable(line.expandtabs())], first=INDENT, hanging=INDENT)


# ---- cells --------------------------------------------------------------------------------------


def _wrapped(lines: Iterable[str], first: str = "", hanging: str = "") -> Iterable[str]:
    for line in lines:
        yield from textwrap.wrap(
            line,
            _width(),
            initial_indent=first,
            subsequent_indent=hanging,
            replace_whitespace=False,
            drop_whitespace=True,
            break_on_hyphens=False,
        ) or [""]


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROW), WIDE)


def _mapping(each: Record, key: str) -> dict[str, Any]:
    found = each.get(key)
    return found if isinstance(found, dict) else {}


def _and(*parts: Any) -> str:
    return " ".join(str(part) for part in parts if part is not None)


def _text(value: Any) -> str:
    return "-" if value is None else printable(str(value))


def _number(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) else _text(value)
