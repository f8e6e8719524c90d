"""`python -m yatt.trainer` as a controller sees it: a process that takes orders over a socket."""

import dataclasses
import subprocess
import sys

import pytest
import zmq

from tests.integration.trainer.conftest import child_environment
from tests.integration.trainer.program import make_config, plans, samples
from tests.runs import HANG_S
from yatt.adapters.net.curve import make_keys
from yatt.adapters.node_local.host_segment import SegmentReader, Stamp, segment_path
from yatt.config.load import resolved_text
from yatt.config.schema import LeaseSection, RewardSection, RunSection
from yatt.records import message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame
from yatt.weights.published import read_weight_plan

ATTEMPT, WAIT_S = 3, 60.0


class Controller:
    """A controller's end of the line: blocking, one worker."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(endpoint)
        self.seq, self.peer = 0, b""

    def next(self):
        assert self.socket.poll(WAIT_S * 1000), "the trainer said nothing"
        sender, data = self.socket.recv_multipart()
        frame = decode_frame(data)
        body = decode_body(frame)
        if isinstance(body, m.Renew):
            return self.next()
        self.peer = sender
        return frame, body

    def next_renewal(self):
        assert self.socket.poll(WAIT_S * 1000), "no beat"
        body = decode_body(decode_frame(self.socket.recv_multipart()[1]))
        assert isinstance(body, m.Renew)
        return body

    def order(self, body, token=5):
        self.seq += 1
        self.socket.send_multipart([self.peer, encode_frame(ATTEMPT, self.seq, 0, body, token=token)])
        frame, answer = self.next()
        assert frame.reply_to == self.seq
        return answer


@pytest.fixture
def trainer(tmp_path, models):
    made = make_config(str(models["qwen3"]), {})
    config = dataclasses.replace(
        made,
        rollout=dataclasses.replace(made.rollout, tp_size=1),  # the process checks it: there is one slot
        run=RunSection(dir=str(tmp_path)),
        rewards=(RewardSection(name="unused", path="builtin:unused"),),
        lease=LeaseSection(renew_s=0.2),
    )
    (tmp_path / "config.yaml").write_text(resolved_text(config))
    make_keys(tmp_path / "keys")
    endpoint = f"ipc://{tmp_path}/controller"
    controller = Controller(endpoint)
    command = [sys.executable, "-m", "yatt.trainer", "--run", str(tmp_path), "--attempt", str(ATTEMPT)]
    command += ["--worker", "trainer-0", "--endpoint", endpoint, "--local-rank", "0", "--node", "0"]
    process = subprocess.Popen(command, env=child_environment())
    try:
        yield controller, process, tmp_path
    finally:
        process.kill()
        process.wait()
        controller.socket.close(linger=0)


@pytest.mark.slow
def test_a_trainer_process_lives_through_an_iteration(trainer):
    controller, process, folder = trainer
    _, hello = controller.next()
    assert hello == m.Hello(worker="trainer-0", pid=process.pid)
    assert "not awake under token 4; send Wake first" in controller.order(train(), 4).error

    store = controller.order(m.OpenStore(host="127.0.0.1"))
    join = m.Join(host=store.host, port=store.port, global_rank=0, world_size=1)
    assert controller.order(join) == m.Done()
    assert controller.order(m.Wake()) == m.Done()
    assert "Build comes first" in controller.order(train()).error
    stem = folder / "rank-00000"
    built = controller.order(m.Build(stem=str(stem), attempt=ATTEMPT))
    assert built.host_bytes > 0

    assert controller.order(train(), 4).error == "token 4 is of an old lease; the newest here is 5"
    trained = controller.order(train())
    assert trained.metrics["actor/grad_norm"] > 0
    assert set(trained.timing_s) == {"old_log_prob", "ref", "adv", "update_actor"}
    check_costs(trained.costs)

    probe = (m.pack_ids([1, 2, 3]),)
    published = controller.order(m.Publish(policy_version=1, probe=probe))
    assert len(m.unpack_floats(published.probe_logprobs[0])) == 2
    assert SegmentReader(segment_path(stem, "weights")).stamp() == Stamp(ATTEMPT, 1)
    assert set(published.sums) <= {planned.name for planned in read_weight_plan(stem).weights}
    assert "version 2 was to be published, it is 1" in controller.order(m.Publish(policy_version=2)).error
    assert "iteration 2 was to be saved, it is of 1" in controller.order(m.TakeSnapshot(iteration=2)).error
    assert controller.order(m.TakeSnapshot(iteration=1)).size_bytes > 0
    assert SegmentReader(segment_path(stem, "weights")).stamp() == Stamp(ATTEMPT, 1)
    assert SegmentReader(segment_path(stem, "state")).stamp() == Stamp(ATTEMPT, 1)

    assert controller.order(m.Sleep()) == m.Done()
    asleep = controller.order(m.TakeSnapshot(iteration=1))
    assert asleep.error == "this worker is not awake under token 5; send Wake first"
    assert controller.order(m.Wake(), 6) == m.Done()
    assert controller.order(train(), 6) == trained, "the same order again is answered, not done again"
    assert controller.order(train(iteration=2), 6).metrics["actor/grad_norm"] > 0
    newest = controller.next_renewal()
    while newest.token == 5:
        newest = controller.next_renewal()
    assert newest.token == 6
    assert newest.work > 10
    assert controller.order(m.Stop()) == m.Done()
    assert process.wait(HANG_S) == 0


def check_costs(costs):
    """Every micro-batch but the last of each optimizer step was timed, under its own size."""
    facts, _ = samples(1)
    lengths = {fact.sample_id: fact.num_prompt_tokens + fact.num_completion_tokens for fact in facts}
    timed = [micro for plan in plans(1) for micro in plan.micro_batches[0][:-1]]
    assert timed, "a plan of single micro-batches would test nothing"
    sizes = [(sum(lengths[n] for n in micro), sum(lengths[n] ** 2 for n in micro)) for micro in timed]
    assert [(tokens, squares) for tokens, squares, _ in costs] == sizes * (len(costs) // len(sizes))
    assert all(seconds > 0 for *_, seconds in costs)


def train(iteration=1):
    facts, rollouts = samples(iteration)
    return m.Train(iteration=iteration, facts=facts, plan=plans(1), rollouts=rollouts)


STARTED = """
import sys
from tests.integration.trainer.program import make_config
from yatt.config.schema import RunSection
import dataclasses
config = dataclasses.replace(make_config("", {}), run=RunSection(dir="", deterministic=sys.argv[1] == "True"))

from yatt.trainer.device import prepare_process
prepare_process(config, 0)
import torch, yatt.trainer.worker
for kind in (torch.optim.AdamW, torch.optim.SGD):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], lr=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.requires_grad and parameter.grad_fn is None and parameter.max() < 1
    optimizer.zero_grad()
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_rank_on_cpu_starts_without_the_compiler_and_is_as_deterministic_as_asked(is_deterministic):
    """Its import takes more than a second, for functions that are not used."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STARTED, str(is_deterministic)],
        env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{is_deterministic} {is_deterministic}", "[]"]
