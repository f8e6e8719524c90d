"""Messages to the people of a run: sent to a real server, and never in the run's way."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.obs_runs import make_run
from tests.runs import HANG_S
from tests.unit.launch.test_attempts import CRASH, FINISHED, Here, crashed, run_of
from yatt.adapters.net.webhook import post_message
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.adapters.run_folder.ledger import ENDED, STARTED, write_record
from yatt.core.attempts.outcome import Outcome, Verdict
from yatt.errors import StoreTakenOver


class Receiver(HTTPServer):
    """Keeps what it is sent; answers with `status`, after `delay_s`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, str]] = []
        self.status, self.delay_s = 200, 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=secret"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        time.sleep(self.server.delay_s)
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/login")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)  # a page to log in
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=HANG_S)
    server.server_close()


def states(receiver: Receiver) -> list[str]:
    return [message["state"] for message in receiver.got]


def test_a_run_tells_that_it_is_finished_once(tmp_path, receiver):
    paths = make_run(tmp_path, logging={"webhook_url": receiver.url})
    code, _, _ = run_of(tmp_path, Here(CRASH, FINISHED))
    assert (code, states(receiver)) == (0, ["finished"])
    assert receiver.got[0]["run"] == str(paths.root)
    assert f"yatt: {paths.root}: finished" in receiver.got[0]["text"]
    assert run_of(tmp_path, Here())[0] == 0, "it is finished already"
    assert len(receiver.got) == 1


def test_a_run_that_gives_up_tells_why(tmp_path, receiver):
    crashed(make_run(tmp_path, logging={"webhook_url": receiver.url}), times=2, committed=0)
    assert run_of(tmp_path, Here(CRASH, CRASH))[0] == 93
    assert states(receiver) == ["failed"]
    assert "3 attempts in a row failed" in receiver.got[0]["text"]
    assert "(exit code 93)" in receiver.got[0]["text"]


def test_a_run_that_is_started_again_and_again_in_vain_tells_once(tmp_path, receiver):
    paths = make_run(tmp_path, logging={"webhook_url": receiver.url})
    for _ in range(2):
        attempt = claim_attempt(paths)
        write_record(paths, attempt, STARTED, {"submission": "mine", "committed": 0})
        write_record(paths, attempt, ENDED, {"exit_code": 75, "committed": 0, "reason": "preempted"})
    preempted = Outcome(verdict=Verdict.SUCCEED, reason="preempted", exit_code=75)
    for told in (0, 1, 1):
        assert run_of(tmp_path, Here(preempted))[0] == 75
        assert states(receiver) == ["no progress"] * told
    assert "3 attempts in a row ended without a checkpoint" in receiver.got[0]["text"]


@pytest.mark.parametrize(("status", "said"), [(500, "HTTP 500"), (302, "HTTP 302")])
def test_a_refused_message_costs_one_line_without_the_url(tmp_path, receiver, status: int, said: str):
    make_run(tmp_path, logging={"webhook_url": receiver.url})
    receiver.status = status
    code, _, lines = run_of(tmp_path, Here(FINISHED))
    assert code == 0
    assert lines[-1] == f"logging.webhook_url: the message 'finished' was not sent ({said})"


def test_nobody_there_and_nobody_answers(receiver):
    assert "refused" in post_message("http://127.0.0.1:9/", {})
    receiver.delay_s = 2.0
    assert post_message(receiver.url, {}, limit_s=0.3) in ("no answer", "timed out")
    assert post_message("http://no such host/", {})


def test_a_start_that_cannot_begin_tells_why(tmp_path, receiver, monkeypatch):
    def missing(*_arguments: object, **_more: object) -> None:
        raise StoreTakenOver("another folder has the store now")

    monkeypatch.setattr("yatt.launch.attempt.attempts.await_committed", missing)
    make_run(tmp_path, logging={"webhook_url": receiver.url})
    with pytest.raises(StoreTakenOver):
        run_of(tmp_path, Here(FINISHED))
    assert states(receiver) == ["failed"]
    assert "has the store now" in receiver.got[0]["text"]
