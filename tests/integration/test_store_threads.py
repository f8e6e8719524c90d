"""Threads that Python did not start call the ranks' store, as NCCL's monitor does once a second: none of them
costs a socket. Each of several calls at once gets its own reply, and closing ends those that wait."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import zmq

from tests.runs import HANG_S, wait_for
from yatt.adapters.net.curve import make_keys
from yatt.adapters.net.key_value import KeyValueClient, KeyValueServer
from yatt.collectives.group import RunStore
from yatt.errors import DeadlineExceeded, WorkerFailed

NUM_CALLS = 1200
"""More than the sockets that one zmq context may have."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_START = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def in_native_thread(work: Callable[[], object]) -> None:
    """Runs `work` in a thread of the C library, which is a new one for Python."""
    errors: list[BaseException] = []

    def body(_: int | None) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            errors.append(error)

    routine, thread = _START(body), ctypes.c_ulong()
    assert _LIBC.pthread_create(ctypes.byref(thread), None, routine, None) == 0
    assert _LIBC.pthread_join(thread, None) == 0
    if errors:
        raise errors[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyValueServer]:
    server = KeyValueServer("127.0.0.1", make_keys(tmp_path / "keys"))
    yield server
    server.close()


@pytest.fixture
def client(tmp_path: Path, server: KeyValueServer) -> Iterator[KeyValueClient]:
    client = KeyValueClient("127.0.0.1", server.port, make_keys(tmp_path / "keys"))
    yield client
    client.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_calls_from_native_threads_share_one_socket(client: KeyValueClient) -> None:
    store, found = RunStore(client, timedelta(seconds=30)), list[bool]()
    store.set("exception_dump", "1")
    before = num_descriptors()
    for number in range(NUM_CALLS):
        key = "exception_dump" if number % 2 else "no such key"
        in_native_thread(lambda key=key: found.append(store.check([key])))
    assert found == [False, True] * (NUM_CALLS // 2)
    assert num_descriptors() - before < NUM_CALLS // 100  # others of this process come and go


def test_each_of_several_calls_at_once_gets_its_own_reply(client: KeyValueClient) -> None:
    num_threads = 8

    def wait_and_read(number: int) -> tuple[bool, bytes]:
        return client.call("check", f"k{number}", park_s=1.0).found, client.call("get", f"k{number}").value

    with ThreadPoolExecutor(num_threads) as pool:
        for turn in range(3):
            for number in range(num_threads):
                client.call("delete", f"k{number}")
            waiting = [pool.submit(wait_and_read, number) for number in range(num_threads)]
            for number in reversed(range(num_threads)):
                client.call("set", f"k{number}", value=b"%d %d" % (turn, number))
            expected = [(True, b"%d %d" % (turn, number)) for number in range(num_threads)]
            assert [each.result() for each in waiting] == expected


def test_a_call_without_an_answer_leaves_no_socket(
    tmp_path: Path, server: KeyValueServer, client: KeyValueClient
) -> None:
    client.call("set", "k", value=b"")
    hasty = KeyValueClient("127.0.0.1", server.port, make_keys(tmp_path / "keys"), answer_s=0.0)
    try:
        assert hasty.call("check", "k", park_s=1.0).found
        before = num_descriptors()
        for _ in range(20):
            with pytest.raises(DeadlineExceeded, match="did not answer 'count' within 0 s"):
                hasty.call("count")
        # zmq's own thread closes the descriptors of a socket a little later
        wait_for(lambda: num_descriptors() <= before, what="the sockets to be closed")
    finally:
        hasty.close()


def test_a_refused_call_keeps_its_socket(client: KeyValueClient) -> None:
    client.call("set", "k", value=b"text")
    before = num_descriptors()
    for _ in range(20):
        with pytest.raises(ValueError, match="'k' is not a number"):
            client.call("add", "k", amount=1)
    assert num_descriptors() == before


def test_closing_ends_calls_that_wait(tmp_path: Path) -> None:
    context: zmq.Context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    before = num_descriptors()
    client, ended = KeyValueClient("127.0.0.1", port, make_keys(tmp_path / "keys")), list[str]()

    def wait() -> None:
        try:
            client.call("check", "never", park_s=1.0)
        except WorkerFailed as error:
            ended.append(str(error))

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    wait_for(lambda: num_descriptors() > before + 3, what="the calls to begin")
    client.close()
    for thread in waiting:
        thread.join(HANG_S)
    silent.close(linger=0)
    context.term()
    assert len(ended) == 3 and all("was closed" in text for text in ended)
    with pytest.raises(WorkerFailed, match="was closed"):
        client.call("count")


def test_a_client_whose_keys_are_damaged_says_so_and_can_be_closed(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    keys.secret("client").write_text("damaged")
    client = KeyValueClient("127.0.0.1", 1, keys)
    with pytest.raises(WorkerFailed, match="has no valid key pair"):
        client.call("count")
    client.close()
