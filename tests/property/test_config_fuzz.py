"""Mutated run files: each is loaded or refused with a reason; none ends in a traceback or hangs.

`YATT_FUZZ=5000 YATT_FUZZ_SEED=7 pytest tests/property/test_config_fuzz.py` runs the long form. Without a seed
each run draws its own, and a failure prints it.
"""

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.seeds import seed_of
from yatt.config.doubts import doubtful_settings
from yatt.config.load import load_resolved, load_run_config, resolved_text
from yatt.errors import ConfigError

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
COUNT = int(os.environ.get("YATT_FUZZ", "250"))
SEED = seed_of("YATT_FUZZ_SEED")
LONGEST_CPU_S = 5.0

NONSENSE = (
    ".nan", ".inf", "-.inf", "-1", "-0.5", "1.0e+400", "9" * 5000, "0x", "0b2", "1e-6", "[]", "{}", "[[]]",
    '""', "~",
    "2024-02-30", "2024-02-03", "!!int x", "!!float y", "!!binary '&'", "!!set {a}",
    "!!python/name:os.system",
    '"\\0"', '"\\ud800"', '"\\e[2J"', '"a\\nb"', "*a", "&a [*a]", "{<<: {a: 1}}", "{? [x] : y}", "[" * 80,
    "'", '"', ": :", "%YAML 9.9", "---", "...", "\t", "\0", "\ud7ff", "true", "4:00:00", "1_000", "0o7",
    "|\n  x",
)  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """`text` with one to three small damages."""
    for _ in range(chance.randint(1, 3)):
        lines = text.split("\n")
        row = chance.randrange(len(lines))
        kind = chance.randrange(6)
        if kind == 0 and ":" in lines[row]:
            lines[row] = lines[row].partition(":")[0] + ": " + chance.choice(NONSENSE)
        elif kind == 1:
            at = chance.randrange(len(lines[row]) + 1)
            lines[row] = lines[row][:at] + chance.choice(NONSENSE) + lines[row][at:]
        elif kind == 2:
            del lines[row]
        elif kind == 3:
            lines.insert(chance.randrange(len(lines) + 1), lines[row])
        elif kind == 4:
            at = chance.randrange(len(lines[row]) + 1)
            lines[row] = lines[row][:at] + chr(
                chance.choice((0, 9, 27, 44, 58, 91, 123, 0x85, 0xFEFF, 0x202E))
            )
        else:
            lines[row] = " " * chance.randrange(6) + lines[row].lstrip()
        text = "\n".join(lines) or " "
    return text


def numbers(value: Any) -> Iterator[float]:
    """Every number in a plain config."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for child in value:
            yield from numbers(child)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.timeout(900 + COUNT // 10)
def test_a_damaged_run_file_is_loaded_or_refused_with_a_reason(tmp_path: Path) -> None:
    chance, text, path = random.Random(SEED), QUICKSTART.read_text(), tmp_path / "run.yaml"
    loaded = 0
    for number in range(COUNT):
        damaged = mutated(text, chance)
        path.write_text(damaged, errors="surrogatepass")
        began_s = time.process_time()
        try:
            config = load_run_config([path], [])
            doubtful_settings(config)
        except ConfigError as error:
            said = str(error)
            assert str(path) in said and all(c.isprintable() for c in said.replace("\n", "")), (SEED, number)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, number {number}: {error!r} for\n{damaged}") from error
        else:
            loaded += 1
            assert all(math.isfinite(value) for value in numbers(asdict(config))), (SEED, number)
            (tmp_path / "config.yaml").write_text(resolved_text(config))
            assert load_resolved(tmp_path / "config.yaml") == config, (SEED, number)
        assert time.process_time() - began_s < LONGEST_CPU_S, (SEED, number)
    assert 0 < loaded < COUNT, "some damage is harmless, most is not"


def keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar key of a plain config that ``a.b=c`` reaches."""
    for key, child in value.items():
        if isinstance(child, dict):
            yield from keys(child, f"{prefix}{key}.")
        elif not isinstance(child, list):
            yield f"{prefix}{key}", child


PLAIN = {key: value for key, value in keys(yaml.safe_load(resolved_text(load_run_config([QUICKSTART], []))))}
NUMERIC = sorted(key for key, value in PLAIN.items() if type(value) in (int, float))


@pytest.mark.parametrize("key", NUMERIC)
def test_no_number_takes_nonsense(key: str) -> None:
    for value in (".nan", ".inf", "-.inf", "-7", "1.0e+300", "9" * 400, "[]", "{}", "~", "true", "x", ""):
        if value == "-7" and key == "algorithm.entropy_coeff":
            continue  # allowed, with a note
        with pytest.raises(ConfigError, match=r"\S"):
            load_run_config([QUICKSTART], [f"{key}={value}"])
