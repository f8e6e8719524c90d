"""Every open port and private socket of a live run, and what it makes of frames that nobody should send.

`YATT_FUZZ=5000 YATT_FUZZ_SEED=7` runs the long form, as for tests/property/test_frame_fuzz.py.
"""

import contextlib
import os
import random
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.frames import as_message, frames
from tests.integration.trainer.test_meeting import ZMTP, heard, listening, stranger_keys
from tests.property.test_frame_fuzz import calls, notice
from tests.runs import HANG_S, RunFile, living, rows, start, wait_for
from tests.seeds import seed_of
from yatt.adapters.net.curve import CurveKeys, calling_socket
from yatt.records import cluster as c
from yatt.records.codec import encode_frame

COUNT = int(os.environ.get("YATT_FUZZ", "500"))
SEED = seed_of("YATT_FUZZ_SEED")
ATTEMPT = 1
ITERATIONS = 100_000


def harmless(count: int, chance: random.Random) -> Iterator[list[bytes]]:
    """Frames that must not be acted on: damaged ones, and valid ones of an older attempt."""
    for parts in frames(ATTEMPT, count, chance):
        envelope = (as_message(parts[0]) or notice(parts)) if len(parts) == 1 else None
        if envelope is None or envelope[0] < ATTEMPT:
            yield parts


def orders() -> list[list[bytes]]:
    """Orders of the live run's own attempt that would show: they end it, or are answered."""
    bodies = (
        c.StatusQuery(),
        c.Quit(reason="a stranger's", exit_code=3),
        c.FailureReport(error="x", exit_code=3),
    )
    return [[encode_frame(ATTEMPT, seq, 0, body)] for seq, body in enumerate(bodies, 1)]


def unix_sockets(run: RunFile) -> list[str]:
    """Paths that processes of this run listen on."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {fields[7] for line in lines if len(fields := line.split()) == 8 and fields[3] == "00010000"}
    return sorted(path for path in paths if path.startswith(str(run.scratch)))


def sent(address: str, identity: str, keys: CurveKeys | None, messages: Iterable[list[bytes]]) -> int:
    """Send all; the number of messages that came back as answers within half a second."""
    context: zmq.Context = zmq.Context()
    try:
        line = calling_socket(context, address, identity, keys)
        for parts in messages:
            line.send_multipart(parts)
        num_answers = 0
        while line.poll(500):
            data = line.recv_multipart()[-1]
            num_answers += (as_message(data) or [0, 0, 0])[2] > 0
        line.close(linger=0)
        return num_answers
    finally:
        context.term()


def shout(address: str, port: int, chance: random.Random) -> None:
    """Bytes of one who knows no protocol, or begins one and does not go on."""
    greeting = (
        b"\xff" + bytes(8) + b"\x7f\x03\x01" + chance.choice((b"NULL", b"CURVE", b"PLAIN")).ljust(20, b"\0")
    )
    said = chance.choice((b"", greeting, greeting + bytes(32), b"GET / HTTP/1.1\r\n\r\n"))
    said += chance.randbytes(chance.choice((0, 7, 300, 100_000))) + chance.choice(
        (b"", b"\x06\xff" + b"\xff" * 8)
    )
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=HANG_S) as line:
        line.settimeout(0.2)  # nobody reads from some of them
        line.sendall(said)


def said_by(run: RunFile) -> str:
    return "\n".join(p.read_text(errors="replace") for p in run.run_dir.glob("attempts/*/logs/*"))


@pytest.mark.slow
@pytest.mark.timeout(900 + COUNT // 10)
def test_a_live_run_acts_on_nothing_that_comes_to_its_ports_and_sockets_from_others(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    run = RunFile(
        tmp_path / "run", {"trainer": {"total_iterations": ITERATIONS}, "checkpoint": {"save_every": 0}}
    )
    process = start("run", str(run.write()))
    metrics = run.run_dir / "metrics.jsonl"
    try:
        wait_for(lambda: rows(metrics), timeout_s=120, what="the first iteration")
        own = CurveKeys(run.run_dir / "keys")
        ports = {pid_port for pid in living(run.run_dir) for pid_port in listening(pid)}
        with ThreadPoolExecutor(len(ports)) as together:
            greeted = together.map(lambda place: (place, heard(*place, b"")), ports)
        channels = [f"tcp://{host}:{port}" for (host, port), said in greeted if said.startswith(ZMTP)]
        assert len(channels) == 3, "two controllers and the ranks' key-value service"
        private = unix_sockets(run)
        assert len(private) == 2, "each controller's own"
        for _ in range(COUNT):
            shout(*chance.choice(sorted(ports)), chance)
        for keys in stranger_keys(tmp_path / "strangers", own):
            for address in channels:
                assert sent(address, "node1", keys, orders()) == 0, (SEED, address)
        share = COUNT // (len(channels) + len(private))
        for address in channels:
            damage = [*harmless(share, chance), *calls(20, chance)]
            assert sent(address, f"node{chance.randrange(2, 99)}", own, damage) <= 40, (SEED, address)
        for path in private:
            assert sent(f"ipc://{path}", "stranger", None, harmless(share, chance)) == 0, (SEED, path)
        there = len(rows(metrics))
        wait_for(lambda: len(rows(metrics)) > there + 1, what=f"more iterations ({SEED})")
        assert process.poll() is None, SEED
    finally:
        process.terminate()
        process.communicate(timeout=300)
    assert process.returncode == 75, SEED
    said = said_by(run)
    assert "Traceback" not in said and "defect" not in said, (SEED, said[-5000:])
    assert said.count(f"dropped {1 << (share // 2).bit_length() - 1} invalid frames") >= 4, (SEED, said)
