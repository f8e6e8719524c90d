"""The worker's loop around an engine that fails."""

import errno
import os
import threading

import msgspec
import numpy as np
import pytest
import torch
import zmq

from tests.runs import HANG_S, wait_for
from tests.tiny_models import make_scripted_model
from yatt import clock
from yatt.adapters.net.worker_link import Received, WorkerLink
from yatt.adapters.node_local.media_file import hold_prepared, is_held
from yatt.core.gpus.lease import WorkerLease
from yatt.engine.protocol import EngineOptions, RanksLost
from yatt.engine.scripted import ScriptedEngine
from yatt.engine.weights.compare import compare_weights, with_progress
from yatt.engine.weights.published import tensors_taken
from yatt.engine.worker import EnginePlan, EngineWorker, failed_order
from yatt.errors import ConfigError
from yatt.media.kept import KeptFiles
from yatt.records import message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame
from yatt.weights.checksum import tensor_checksum

ATTEMPT = 2


class FailingEngine(ScriptedEngine):
    """An engine whose device breaks on the third turn."""

    turns = 0

    def step(self):
        self.turns += 1
        if self.turns == 3:
            raise RuntimeError("device-side assert")
        return super().step()


class Controller:
    """The other end of the worker's socket."""

    def __init__(self, socket):
        self.socket, self.seq = socket, 0

    def send(self, body):
        self.seq += 1
        self.socket.send_multipart([b"w", encode_frame(ATTEMPT, self.seq, 0, body, token=1)])

    def hear(self):
        """The next message that is no heartbeat."""
        while isinstance(body := self.next(), m.Renew):
            pass
        return body

    def beat(self):
        """The next heartbeat."""
        while not isinstance(body := self.next(), m.Renew):
            pass
        return body

    def next(self):
        assert self.socket.poll(int(1000 * HANG_S)), "the worker is silent"
        return decode_body(decode_frame(self.socket.recv_multipart()[1]))


@pytest.fixture
def options(tmp_path):
    return EngineOptions(
        model=make_scripted_model(tmp_path / "model"),
        dtype="float32",
        device="cpu",
        eos_ids=(2,),
        max_model_tokens=64,
        media_folder=str(tmp_path),
    )


@pytest.fixture
def controller(tmp_path, options):
    endpoint = f"ipc://{tmp_path}/server"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        link = WorkerLink(endpoint, worker="w", attempt=ATTEMPT)
        plan = EnginePlan(
            kind="scripted",
            options=options,
            build=lambda kind, given: FailingEngine(given),
            start_limit_s=HANG_S,
        )
        worker = EngineWorker(link, plan)
        thread = threading.Thread(target=worker.serve, args=(os.getppid(),))
        thread.start()
        link.send(m.Hello(worker="w", pid=1))
        controller = Controller(socket)
        assert isinstance(controller.hear(), m.Hello)
        yield controller
        controller.send(m.Stop())
        assert controller.hear() == m.Done()
        thread.join(HANG_S)
        link.close()


def sample(request_id):
    return m.SampleRequest(
        request_id=request_id,
        prompt_ids=m.pack_ids([9]),
        seed=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=30,
        ignore_eos=True,
    )


def test_a_turn_that_fails_gives_its_requests_back_and_does_not_end_the_worker(controller):
    controller.send(m.Wake())
    assert controller.hear() == m.Done()
    controller.send(sample("unlucky"))
    failed = controller.hear()
    assert (failed.request_id, failed.finish_reason) == ("unlucky", "lost")
    assert failed.error == "the engine failed: device-side assert"
    controller.send(sample("next"))
    assert controller.hear().finish_reason == "length"


def test_an_order_that_is_none_is_refused(controller):
    controller.send(m.OpenStore(host="x"))
    assert "OpenStore is no order for an engine" in controller.hear().error


class SlowEngine(ScriptedEngine):
    """One that its library builds for as long as it is told to."""

    def __init__(self, options, may_end):
        super().__init__(options)
        self.may_end = may_end

    def start(self):
        assert self.may_end.wait(HANG_S)
        super().start()


def test_an_engine_that_builds_itself_is_believed_to_get_on_until_its_limit(options, monkeypatch):
    may_end = threading.Event()
    plan = EnginePlan(
        kind="scripted", options=options, build=lambda kind, given: SlowEngine(given, may_end),
        start_limit_s=5.0,
    )  # fmt: skip
    now_s = [0.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s[0])
    worker = EngineWorker(Line(), plan)
    thread = threading.Thread(target=worker._answer, args=(m.Wake(),))
    thread.start()
    wait_for(lambda: worker._build.until_s, what="the build to begin")
    seen = {worker.beat().work for _ in range(5)}
    now_s[0] += 5.1
    stuck = {worker.beat().work for _ in range(5)}
    may_end.set()
    thread.join()
    assert len(seen) == 5, "progress, though nothing is heard of the library"
    assert len(stuck) == 1, "not for ever"


class Line:
    """A line that nothing comes over."""

    turns = work = 0
    lease = WorkerLease(newest=1, held=1)


def test_every_tensor_of_new_weights_is_progress():
    tensors = {f"layer{i}": torch.full((4,), float(i)) for i in range(3)}
    published = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    before, seen = tensors_taken(), []
    for _ in with_progress(tensors.items()):
        seen.append(tensors_taken() - before)
    compare_weights(tensors.items(), published)
    assert seen == [1, 2, 3]
    assert tensors_taken() - before == 6


@pytest.mark.parametrize(("number", "is_users"), [(errno.EIO, False), (errno.EACCES, True)])
def test_a_model_folder_that_fails_for_a_while_is_no_mistake_of_the_users(number, is_users):
    error = ConfigError("tokenizer.json cannot be read")
    error.__cause__ = OSError(number, "weather")
    assert failed_order(m.Wake(), error).user is is_users


def test_an_engine_that_runs_empty_reports_its_steps_at_once(controller):
    controller.send(m.Wake())
    assert controller.hear() == m.Done()
    controller.send(sample("unlucky"))
    assert controller.hear().finish_reason == "lost"
    controller.send(sample("next"))
    assert controller.hear().finish_reason == "length"
    steps = controller.beat().steps
    while steps.steps < 32:  # two before the failure, and one for each token of the next
        steps = controller.beat().steps
    assert (steps.steps, steps.running, steps.running2) == (32, 32, 32) and steps.seconds > 0
    assert steps.texts == 1, "what failed is no answer"


def test_pictures_of_a_request_are_released_when_it_is_added_and_when_it_is_refused(controller, tmp_path):
    """A planted mistake: what is released at the end only keeps others waiting for a whole completion."""
    files = KeptFiles(tmp_path / "made", 1 << 20)
    with files.order(1), files.claimed_file(1, "a" * 64):
        files.keep_file(1, "a" * 64, (1, 1, 1), np.zeros((1, 12), np.uint8))
    os.rename(tmp_path / "made" / ("a" * 64), tmp_path / ("a" * 64))
    controller.send(m.Wake())
    assert controller.hear() == m.Done()
    for name, grid in (("added", (1, 1, 1)), ("refused", (1, 2, 2))):
        picture = m.PlacedMedia(m.MediaRef("", "ff" * 32, 8, 8), 0, 1, grid, "a" * 64)
        assert hold_prepared(tmp_path, ["a" * 64], name) and is_held(tmp_path, "a" * 64)
        controller.send(msgspec.structs.replace(sample(name), media=(picture,)))
        wait_for(lambda: not is_held(tmp_path, "a" * 64), what="the release of the picture")
        assert controller.hear().finish_reason == "lost"


class StandInLink:
    """Carries out every order."""

    def __init__(self):
        self.sent = []

    def carry_out(self, order, do, failed):
        try:
            return do(order.body)
        except RanksLost as error:
            return failed(order.body, error)

    def send(self, body, reply_to=0):
        self.sent.append((reply_to, type(body)))


class LostEngine:
    def abort(self):
        return []

    def sleep(self):
        raise RanksLost("a step failed on this rank")


def test_a_rank_that_loses_the_others_in_an_order_answers_it_and_ends():
    worker = EngineWorker(StandInLink(), None)
    worker._engine, worker._is_awake = LostEngine(), True
    with pytest.raises(RanksLost):
        worker._carry_out(Received(7, 1, m.Sleep()))
    assert worker._link.sent == [(7, m.Failed)]
