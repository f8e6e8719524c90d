"""Rollout and GenRM processes over a real ipc socket."""

import asyncio
import math
import os
import signal
import subprocess
import sys

import pytest
import zmq

from tests.runs import HANG_S, until, wait_for
from tests.tiny_models import make_qwen3, make_scripted_model, publish
from tests.worker_process import worker_with_server, write_run
from yatt.engine.script import scripted_logprobs
from yatt.records import message as m

PROMPT = [40, 41, 42]
RENEW_S = 0.2
"""As `write_run` has it."""


def sample(request_id: str, **more: object) -> m.SampleRequest:
    facts = {
        "request_id": request_id,
        "prompt_ids": m.pack_ids(PROMPT),
        "seed": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 20,
    }
    return m.SampleRequest(**(facts | more))


def scripted_run(folder, **script):
    model = make_scripted_model(folder / "model", **script)
    rollout = {"engine": "scripted", "max_response_tokens": 4000}
    return write_run(folder, {"model": {"path": model}, "rollout": rollout}), model


def over_scripted_rollout(folder, scene, **script):
    run, model = scripted_run(folder, **script)

    async def play():
        async with worker_with_server(run, "yatt.rollout") as server:
            await scene(server, model)

    asyncio.run(play())


def test_a_life_wake_sample_load_sample_stop(tmp_path):
    async def scene(server, model):
        assert await server.order(m.Wake()) == m.Done()
        await server.tell(sample("one"))
        first = await server.next_told()
        folder = publish(tmp_path / "v1", model=model, policy_version=1)
        probe = (m.pack_ids([7, 8, 9]), m.pack_ids(PROMPT))
        loaded = await server.order(m.LoadWeights(policy_version=1, folder=folder, probe=probe))
        assert loaded.policy_version == 1
        assert m.unpack_floats(loaded.probe_logprobs[0]) == pytest.approx(scripted_logprobs(1, [7, 8, 9]))
        await server.tell(sample("two"))
        second = await server.next_told()
        assert [first.policy_version, second.policy_version] == [0, 1]
        assert first.token_ids != second.token_ids
        assert await server.order(m.Stop()) == m.Done()
        assert await server.ended() == 0

    over_scripted_rollout(tmp_path, scene)


def test_the_heartbeat_renews_only_while_a_token_is_held(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        async with asyncio.timeout(HANG_S):
            while not server.beats or server.beats[-1].turns == server.beats[0].turns:
                await asyncio.sleep(0.1)
        assert {beat.token for beat in server.beats} == {5}
        await server.order(m.Sleep())
        server.beats.clear()
        await asyncio.sleep(4 * RENEW_S)
        assert len(server.beats) <= 1, "one may have been under way"

    over_scripted_rollout(tmp_path, scene)


def test_a_lower_token_is_refused(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        refused = await server.order(m.Sleep(), token=4)
        assert isinstance(refused, m.Failed)
        assert "token 4 is of an old lease; the newest here is 5" in refused.error
        await server.tell(sample("late"), token=4)
        late = await server.next_told()
        assert (late.request_id, late.finish_reason) == ("late", m.LOST), "asked again elsewhere"
        assert "token 4 is of an old lease" in late.error

    over_scripted_rollout(tmp_path, scene)


def test_work_for_a_sleeping_engine_is_refused(tmp_path):
    async def scene(server, model):
        await server.tell(sample("early"))
        assert "not awake under token 5; send Wake first" in (await server.next_told()).error
        await server.order(m.Wake())
        await server.order(m.Sleep())
        await server.tell(sample("asleep"))
        assert "not awake" in (await server.next_told()).error
        await server.order(m.Wake(), token=6)
        await server.tell(sample("awake"), token=6)
        assert (await server.next_told()).finish_reason in ("stop", "length")

    over_scripted_rollout(tmp_path, scene)


def test_a_bad_sample_ends_alone(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        await server.tell(sample("bad", prompt_ids=m.pack_ids([1] * 9000)))
        await server.tell(sample("good"))
        done = {each.request_id: each for each in [await server.next_told(), await server.next_told()]}
        assert done["bad"].finish_reason == "error"
        assert "the prompt has 9000 tokens" in done["bad"].error
        assert done["good"].finish_reason in ("stop", "length")

    over_scripted_rollout(tmp_path, scene)


def test_abort_sleep_and_new_weights_give_back_what_was_sampled(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        long = {"max_tokens": 4000, "ignore_eos": True}
        await server.tell(sample("aborted", **long))
        await until(lambda: server.beats and server.beats[-1].steps.steps, "a token")
        assert await server.order(m.Abort(request_ids=("aborted",))) == m.Done()
        aborted = await server.next_told()
        assert (aborted.request_id, aborted.finish_reason) == ("aborted", "abort")
        assert 0 < len(m.unpack_ids(aborted.token_ids)) < 4000
        await server.tell(sample("updated", **long))
        folder = publish(tmp_path / "v1", model=model, policy_version=1)
        await server.order(m.LoadWeights(policy_version=1, folder=folder))
        updated = await server.next_told()
        assert (updated.request_id, updated.finish_reason, updated.policy_version) == ("updated", "abort", 0)
        await server.tell(sample("slept", **long))
        await server.order(m.Sleep())
        assert (await server.next_told()).finish_reason == "abort"

    over_scripted_rollout(tmp_path, scene, steps_per_token=100)


def test_an_aborted_completion_continued_is_the_undisturbed_one(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        await server.tell(sample("whole", max_tokens=60, ignore_eos=True))
        whole = m.unpack_ids((await server.next_told()).token_ids)
        prompt = m.pack_ids(PROMPT + whole[:25])
        await server.tell(sample("rest", prompt_ids=prompt, max_tokens=35, ignore_eos=True))
        assert m.unpack_ids((await server.next_told()).token_ids) == whole[25:]

    over_scripted_rollout(tmp_path, scene)


def test_a_failed_order_is_told_with_its_cause(tmp_path):
    async def scene(server, model):
        await server.order(m.Wake())
        failed = await server.order(m.LoadWeights(policy_version=9, folder=str(tmp_path / "none")))
        assert isinstance(failed, m.Failed)
        assert "no weights of policy version 9" in failed.error
        assert "Traceback" in failed.trace
        assert not failed.user

    over_scripted_rollout(tmp_path, scene)


def test_a_worker_that_cannot_start_says_why_and_ends(tmp_path):
    run = write_run(tmp_path, {"rollout": {"engine": "scripted"}})

    async def play():
        with pytest.raises(AssertionError, match=r"names no end-of-sequence token.*exit_code=2"):
            async with worker_with_server(run, "yatt.rollout"):
                raise RuntimeError("it started")

    asyncio.run(play())


def test_a_genrm_of_an_unknown_name_is_the_users_mistake(tmp_path):
    run, _ = scripted_run(tmp_path)

    async def play():
        with pytest.raises(AssertionError, match=r"no GenRM is named 'nobody'.*exit_code=2"):
            async with worker_with_server(run, "yatt.genrm", "--genrm", "nobody"):
                raise RuntimeError("it started")

    asyncio.run(play())


def test_a_scripted_genrm_gives_its_answers(tmp_path):
    chances = [{"61": 0.75, "62": 0.25}, {"61": 0.5, "62": 0.5}]
    judge = make_scripted_model(tmp_path / "judge", answers=[[60, 61], [62]], chances=chances)
    genrm = {
        "name": "judge",
        "model": judge,
        "engine": "scripted",
        "template": "{completion}",
        "verdict": {"pattern": "(x)"},
        "max_model_tokens": 64,
    }
    model = make_scripted_model(tmp_path / "model")
    run = write_run(tmp_path, {"model": {"path": model}, "genrms": [genrm]})

    async def play():
        async with worker_with_server(run, "yatt.genrm", "--genrm", "judge") as server:
            await server.order(m.Wake())
            answers = set()
            for seed in range(8):
                await server.tell(sample(f"{seed}", seed=seed))
                answers.add(tuple(m.unpack_ids((await server.next_told()).token_ids)))
            assert answers == {(60, 61, 2), (62, 2)}
            await server.tell(sample("sure", temperature=0.0, watched=(62, 61)))
            sure = await server.next_told()
            rows = [math.exp(each) for each in m.unpack_floats(sure.watched)]
            chance = 0.75 if 61 in m.unpack_ids(sure.token_ids) else 0.5
            assert rows == pytest.approx([1 - chance, chance] * (len(sure.token_ids) // 4))
            await server.tell(sample("wrong", watched=(62, -3)))
            refused = await server.next_told()
            assert (refused.finish_reason, refused.token_ids) == ("error", b"")
            assert refused.error.startswith("watched token -3 is not in the model's vocabulary")

    asyncio.run(play())


STARTER = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(300)
"""


def test_a_worker_ends_with_its_controller(tmp_path):
    run, _ = scripted_run(tmp_path)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(f"ipc://{tmp_path}/server")
        worker = ["-m", "yatt.rollout", "--run", str(run), "--attempt", "3", "--worker", "w"]
        command = [sys.executable, *worker, "--endpoint", f"ipc://{tmp_path}/server"]
        starter = [sys.executable, "-c", STARTER, *command]
        controller = subprocess.Popen(starter, stdout=subprocess.PIPE, text=True)
        pid = int(controller.stdout.readline())
        assert server.poll(int(1000 * HANG_S)), "no Hello"
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
        controller.stdout.close()
        wait_for(lambda: not is_alive(pid), what="the worker to end")


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_vllm_worker_serves_updated_weights(tmp_path):
    models = [make_qwen3(tmp_path / name, tied=True, seed=seed) for seed, name in enumerate("ab")]
    rollout = {"engine": "vllm", "max_response_tokens": 64, "max_num_seqs": 4, "kv_cache_bytes": 32 << 20}
    model = {"path": models[0], "dtype": "float32"}
    run = write_run(tmp_path, {"model": model, "rollout": rollout, "launch": {"device": "cpu"}})

    async def play():
        async with worker_with_server(run, "yatt.rollout") as server:
            assert await server.order(m.Wake()) == m.Done()
            folder = publish(tmp_path / "v1", model=models[1], policy_version=1)
            await server.tell(sample("old", ignore_eos=True))
            old = await server.next_told()
            ids = PROMPT + m.unpack_ids(old.token_ids)
            probe = (m.pack_ids(ids),)
            loaded = await server.order(m.LoadWeights(policy_version=1, folder=folder, probe=probe))
            assert isinstance(loaded, m.WeightsLoaded), loaded
            assert (loaded.differing, loaded.num_compared > 4) == ((), True)
            await server.tell(sample("bad", prompt_ids=m.pack_ids([1] * 500)))
            assert (await server.next_told()).finish_reason == "error"
            assert await server.order(m.Sleep()) == m.Done()
            assert await server.order(m.Wake(), token=6) == m.Done()
            await server.tell(sample("new", ignore_eos=True), token=6)
            assert (await server.next_told()).policy_version == 1
            assert await server.order(m.Stop()) == m.Done()
            assert await server.ended() == 0
            return m.unpack_floats(old.logprobs), m.unpack_floats(loaded.probe_logprobs[0]), ids

    old, new, ids = asyncio.run(play())
    for folder, seen in ((models[0], old), (models[1], new)):
        expected = transformers_logprobs(folder, ids)[-len(seen) :]
        assert max(abs(a - b) for a, b in zip(seen, expected, strict=True)) < 1e-4


def transformers_logprobs(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    return [float(table[index, token]) for index, token in enumerate(ids[1:])]
