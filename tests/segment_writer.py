"""Appends numbered lines to a rotated file, as fast as it can, until it is killed: FOLDER LIFE MOST_BYTES."""

import itertools
import json
import sys
from pathlib import Path

from yatt.adapters.files.lines import make_ready
from yatt.adapters.files.segments import Rotation, newest_segment
from yatt.adapters.files.writer import BackgroundWriter


def main() -> None:
    first, life = Path(sys.argv[1]) / "events.jsonl", int(sys.argv[2])
    make_ready(newest_segment(first))
    writer = BackgroundWriter(place=Rotation(first, int(sys.argv[3]), 10**6).place)
    for number in itertools.count():
        writer.append(first, json.dumps({"life": life, "number": number}))
        if number % 200 == 199:
            writer.flush(10.0)


if __name__ == "__main__":
    main()
