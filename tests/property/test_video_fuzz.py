"""Damaged videos: refused in a sentence, or decoded as they are, and nothing else."""

import random

import pytest

from tests.videos import encoded_video, frames_of
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.media.videos import decoded_frames, video_facts


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".mkv"])
def test_changed_bytes_are_a_refusal_or_another_video(suffix: str) -> None:
    whole, draw = encoded_video(frames_of(12, 64, 48), 8.0, suffix), random.Random(suffix)
    taken = refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 3, 30, 200))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            facts = video_facts(bytes(data), 1 << 20)
            frames = list(decoded_frames(bytes(data), facts, range(facts.num_frames)))
        except MediaRefused as refusal:
            assert str(refusal).isprintable()
            refused += 1
            continue
        taken += 1
        assert {frame.shape for frame in frames} == {(facts.height, facts.width, 3)}
    assert min(taken, refused) > 5
