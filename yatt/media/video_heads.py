"""Says what videos have: ``python -m yatt.media.video_heads MOST_PIXELS MEMORY``, one video after the other.

Whoever makes data starts it, with limits of time and memory, because it decodes bytes of strangers. It reads
a video's length and content from its standard input, and writes one line of JSON: `VideoFacts`, or the words
of a refusal. It ends with its input.
"""

import os
import resource
import sys
from typing import BinaryIO

import msgspec

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.machine.memory import data_bytes
from yatt.media.head_processes import LENGTH_BYTES
from yatt.media.videos import video_facts


def answer_heads(given: BinaryIO, answers: BinaryIO, most_pixels: int) -> None:
    """Answers until the input ends."""
    while len(head := given.read(LENGTH_BYTES)) == LENGTH_BYTES:
        content = given.read(int.from_bytes(head, "little"))
        try:
            found: object = video_facts(content, most_pixels)
        except MediaRefused as error:
            found = str(error)
        except MemoryError:
            found = "needs more memory than a video may"
        del content
        answers.write(msgspec.json.encode(found) + b"\n")
        answers.flush()


def serve_heads() -> None:
    """Answers with little memory, and leaves no core."""
    most_pixels, memory = map(int, sys.argv[1:])
    limit = data_bytes() + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer_heads(sys.stdin.buffer, sys.stdout.buffer, most_pixels)


if __name__ == "__main__":
    serve_heads()
    os._exit(0)
