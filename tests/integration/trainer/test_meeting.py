"""How trainer ranks meet: no pickle is read, and no port answers somebody without the run's keys."""

import ast
import json
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.auth

from tests.runs import HANG_S, RunFile, environment, held_after, living, popen, start, wait_for
from yatt.adapters.net.curve import CurveKeys, calling_socket, make_keys
from yatt.adapters.net.key_value import Call, KeyValueClient, KeyValueServer, Table

RANK = "tests.integration.trainer.meeting_rank"


@pytest.fixture
def keys(tmp_path) -> CurveKeys:
    return make_keys(tmp_path / "keys")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_meet_and_build_without_reading_a_single_pickle(models, keys, tmp_path, size):
    words = [sys.executable, "-P", "-m", RANK, str(tmp_path), str(models["qwen2"])]
    ranks = [popen([*words, str(rank), str(size)], env=environment()) for rank in range(size)]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * size
    notes = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(size)]
    assert [note["read"] for note in notes] == [[]] * size
    assert all(note["groups"] == notes[0]["groups"] for note in notes)
    assert len(notes[0]["groups"]) == 2


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses of a process's listening TCP sockets, IPv4 and IPv6, by the kernel's own tables."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes:
                found.add((_address(address, size), int(port, 16)))
    return found


def _address(text: str, size: int) -> str:
    if size == 8:
        return socket.inet_ntoa(struct.pack("<I", int(text, 16)))
    words = struct.pack("<4I", *(int(text[at : at + 8], 16) for at in range(0, 32, 8)))
    return socket.inet_ntop(socket.AF_INET6, words)


ZMTP = b"\xff"
"""A ZeroMQ socket's greeting begins so; what comes after is for holders of its keys."""

TCP_STORE = bytes([0]) + struct.pack("<I", 0x3C85F7CE) + bytes([7])
"""torch's TCPStore protocol: VALIDATE with its magic number, then GETNUMKEYS; no key is needed."""


def heard(address: str, port: int, said: bytes) -> bytes:
    """What a port answers within three seconds to somebody who has no key."""
    with socket.create_connection((address, port), timeout=HANG_S) as line:
        if said:
            line.sendall(said)
        line.settimeout(3)
        try:
            return line.recv(64)
        except (TimeoutError, ConnectionResetError):
            return b""


def curve_answers(port: int, keys: CurveKeys) -> bool:
    """Whether the key-value service answers a caller with these keys."""
    context = zmq.Context()
    try:
        line = calling_socket(context, f"tcp://127.0.0.1:{port}", "stranger", keys)
        line.send(msgspec.msgpack.encode(Call(number=1, kind="count")))
        return bool(line.poll(3000))
    finally:
        context.destroy(linger=0)


@pytest.mark.slow
def test_every_listening_port_of_live_ranks_is_on_the_runs_address_and_refuses_strangers(tmp_path):
    run = RunFile(
        tmp_path / "run", {"trainer": {"total_iterations": 100_000}, "checkpoint": {"save_every": 0}}
    )
    run.folder.mkdir()
    hold = held_after(run.folder, 2 * 16, pause_s=0)
    process = start("run", str(run.write()))
    try:
        metrics = run.run_dir / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text(), timeout_s=120, what="the first iteration")
        pids = [pid for pid, name in living(run.run_dir).items() if name == "yatt.trainer"]
        ports = {port for pid in pids for port in listening(pid)}
        assert len(pids) == 2
        assert ports
        assert {address for address, _ in ports} == {"127.0.0.1"}
        with ThreadPoolExecutor(len(ports)) as together:
            greeted = dict(zip(ports, together.map(lambda p: heard(*p, b""), ports), strict=True))
            asked = dict(zip(ports, together.map(lambda p: heard(*p, TCP_STORE), ports), strict=True))
        own = CurveKeys(run.run_dir / "keys")
        service = [place[1] for place, greeting in greeted.items() if greeting.startswith(ZMTP)]
        assert len(service) == 1, greeted
        assert not any(greeting for place, greeting in greeted.items() if place[1] not in service)
        assert not any(answer for answer in asked.values() if not answer.startswith(ZMTP)), asked
        assert curve_answers(service[0], own), "the run's own keys open it"
        strangers = stranger_keys(tmp_path / "stranger", own)
        assert not any(curve_answers(service[0], keys) for keys in strangers)
        assert process.poll() is None, "the run has not noticed"
    finally:
        hold.unlink()
        process.terminate()
        process.communicate(timeout=300)


def test_the_probe_of_ports_would_find_torchs_own_store():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert len(heard("127.0.0.1", store.port, TCP_STORE)) == 8


def stranger_keys(folder: Path, own: CurveKeys) -> list[CurveKeys]:
    """Other keys altogether; and an own client key with the public key of the run's server."""
    folder.mkdir()
    other = make_keys(folder / "other")
    half = make_keys(folder / "half")
    public, _ = zmq.auth.load_certificate(own.secret("server"))
    text = half.secret("server").read_text()
    before, _ = zmq.auth.load_certificate(half.secret("server"))
    half.secret("server").write_text(text.replace(before.decode(), public.decode()))
    return [other, half]


def test_who_waits_for_a_key_is_answered_once_it_is_there(keys):
    server = KeyValueServer("127.0.0.1", keys)
    client = KeyValueClient("127.0.0.1", server.port, keys)
    try:
        done = []
        waiting = threading.Thread(target=lambda: done.append(client.call("check", "a", "b", park_s=1.0)))
        waiting.start()
        client.call("set", "a", value=b"\x00\xff")
        time.sleep(0.1)
        assert not done
        client.call("set", "b", value=b"")
        waiting.join(HANG_S)
        assert done[0].found
        assert client.call("get", "a").value == b"\x00\xff"
        assert not client.call("check", "c", park_s=0.1).found
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize(
    ("value", "amount"), [(b"\xff words", 1), (b"", 1), (b"1" * 20, 1), (b"9223372036854775807", 1)]
)
def test_adding_to_what_is_no_number_is_refused_and_the_service_goes_on(keys, value, amount):
    server = KeyValueServer("127.0.0.1", keys)
    client = KeyValueClient("127.0.0.1", server.port, keys)
    try:
        client.call("set", "k", value=value)
        with pytest.raises(ValueError, match="'k' "):
            client.call("add", "k", amount=amount)
        assert client.call("get", "k").value == value
        assert client.call("add", "n", amount=2).count == 2
    finally:
        client.close()
        server.close()


def test_the_table_does_what_torchs_stores_do():
    from torch.distributed import HashStore

    theirs, table = HashStore(), Table()

    def ours(kind, *keys, **rest):
        return table.apply(Call(number=1, kind=kind, keys=keys, **rest))

    theirs.set("k", "v")
    ours("set", "k", value=b"v")
    assert ours("get", "k").value == theirs.get("k")
    for amount in (3, 0, -1):
        assert ours("add", "n", amount=amount).count == theirs.add("n", amount)
    assert ours("get", "n").value == theirs.get("n")
    for expected, desired in (("", "first"), ("wrong", "x"), ("first", "second")):
        got = ours("compare_set", "c", expected=expected.encode(), value=desired.encode())
        assert got.value == theirs.compare_set("c", expected, desired)
    assert ours("check", "k", "c").found == theirs.check(["k", "c"])
    assert ours("check", "k", "z").found == theirs.check(["k", "z"])
    assert ours("delete", "k").found == theirs.delete_key("k")
    assert ours("delete", "k").found == theirs.delete_key("k")


def test_only_literals_are_exchanged_between_ranks():
    from yatt.collectives.exchange import all_gather_literal

    assert ast.literal_eval(repr([((("wd_mult", 0.0),), False), (None, True)]))
    with pytest.raises(TypeError, match="only Python literals can be exchanged"):
        all_gather_literal([None], object())
